"""Updates as integers for a secure sum: scale, rotate, round, clamp, wrap; and back.

The server of a secure aggregation sees only a sum modulo 2^bits. Client side, on an update clipped to L2
norm C: multiply by `scale`; rotate (public random signs, then a Walsh-Hadamard transform over the vector
padded to a power of two), which spreads it evenly over the coordinates; round each coordinate up or down at
random, unbiased, again if the integers' norm passes its bound; clamp to +-`largest`, so that a sum of
`num_clients` cannot wrap; reduce modulo 2^bits. Server side: lift the sum back to signed integers, rotate
back, divide by `scale`. Rounding inflates the L2 bound; the accountant uses `Encoding.inflated_norm` in
place of C. (Kairouz, Liu, Steinke 2021, arXiv:2102.06387, section 4.)

Arrays only; keys, masks and drop-outs of the protocol beneath are the trainer's.
"""

import dataclasses
import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Key, UInt32

from jaxpriv import sampling
from jaxpriv._words import draw_key, once, words

# A squared norm measured by `_squared_norm` is off by less than this share of itself; smaller than what
# `clipping.MARGIN` leaves below C, so that a clipped update is never too long to be sent.
_SLACK = 2.0**-17
_BLOCK = 8
_MOST_TRIES = 32
_LARGEST_SHARE = 4096.0  # finer grids gain nothing, and cost longer tables of the discrete Gaussian
_EXACT = 2**22  # up to here a float32 has two bits left for the fraction to be rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """How updates become integers; public, the same for every client of a round.

    dimension: parameters of the flat update.
    max_norm: C, to which updates are clipped before.
    scale: s, integers a unit; 1 / s is the rounding step. `choose_scale` finds one.
    bits: the sum is taken modulo 2^bits; at most 32.
    num_clients: most clients in one sum (the report goal).
    beta: conditional rounding may refuse a rounding with at most this probability; larger is tighter, and
      biased by a hair. 0: unconditional rounding and its worst-case bound.
    share_stddev: of the discrete Gaussian that each client adds, in integers; 0 where the server adds the
      noise.

    Raises:
      ValueError: sizes that do not fit (with the numbers), more than 32 bits, a bound that is not finite.
    """

    dimension: int
    max_norm: float
    scale: float
    bits: int
    num_clients: int
    beta: float = math.exp(-0.5)
    share_stddev: float = 0.0

    def __post_init__(self):
        for name, least in (("dimension", 1), ("num_clients", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("max_norm", "scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must be in [0, 1), got {self.beta}")
        if not 0 <= self.share_stddev < math.inf:
            raise ValueError(f"share_stddev must be finite and not negative, got {self.share_stddev}")
        if not 2 <= self.bits <= 32:
            raise ValueError(
                f"bits must be from 2 to 32, got {self.bits}: JAX sums in 32 bits, and would wrap a longer modulus "
                "in silence"
            )
        if self.largest < 1:
            raise ValueError(
                f"{self.bits} bits cannot hold a sum of {self.num_clients} clients' integers of dimension "
                f"{self.dimension} (each clamped to +-{self.largest}); take more bits or fewer clients"
            )

    @property
    def padded(self) -> int:
        """D, the dimension padded to a power of two."""
        return 1 << (self.dimension - 1).bit_length()

    @property
    def largest(self) -> int:
        """What each coordinate is clamped to: (2^(bits - 1) - 1) / num_clients, less 12 deviations of noise."""
        headroom = math.ceil(12 * self.share_stddev * math.sqrt(self.num_clients))
        return (2 ** (self.bits - 1) - 1 - headroom) // self.num_clients

    @property
    def integer_norm(self) -> float:
        """The L2 bound that every client's integer vector keeps (proposition 22 of the paper)."""
        norm, root = self.scale * self.max_norm, math.sqrt(self.padded)
        if self.beta == 0:
            return norm + root
        tail = math.sqrt(-2 * math.log(self.beta)) * (norm + root / 2)
        return min(norm + root, math.sqrt(norm**2 + root**2 / 4 + tail))

    @property
    def inflated_norm(self) -> float:
        """The L2 bound after encoding, in the units of the update: what the accountant takes in place of C."""
        return self.integer_norm / self.scale


class EncodingInfo(NamedTuple):
    """For the operator's log, not covered by the guarantee.

    num_clamped: coordinates beyond +-`largest`. tries: roundings drawn.
    """

    num_clamped: Int32[Array, ""]
    tries: Int32[Array, ""]


def choose_scale(
    *,
    dimension: int,
    max_norm: float,
    bits: int,
    num_clients: int,
    noise_stddev: float,
    distributed: bool = False,
    clamp_probability: float = 1e-6,
    max_inflation: float = 1.1,
) -> float:
    """The finest scale at which clamping is rare: in all of a round with `clamp_probability` at most.

    By Hoeffding a rotated coordinate exceeds t C / sqrt(D) with probability at most 2 exp(-t^2 / 2).

    Args:
      noise_stddev: of the noise on the sum (noise multiplier times C); rounding must stay below it. inf where
        no noise is added.
      distributed: the clients add that noise, in shares of stddev `noise_stddev * scale / sqrt(num_clients)`:
        it takes its part of the range (12 deviations), and a share has a stddev of at most 4,096.
      max_inflation: largest `inflated_norm / max_norm` put up with.

    Raises:
      ValueError: no scale serves: too few bits for so many clients and such a dimension.
    """
    padded = 1 << (dimension - 1).bit_length()
    spread = math.sqrt(2 * math.log(2 * padded * num_clients / clamp_probability))
    largest = min((2 ** (bits - 1) - 1) // num_clients, _EXACT)
    where = f"{bits} bits, {num_clients} clients and dimension {dimension}"
    if largest < 2:
        raise ValueError(
            f"{where} leave each coordinate +-{largest}: too few bits; take more, or fewer clients"
        )
    coordinate = spread * max_norm / math.sqrt(padded)  # what a rotated coordinate hardly ever exceeds
    scale = (largest - 1) / coordinate
    if distributed:
        room = 2 ** (bits - 1) - 2 * num_clients - 2
        scale = min(scale, room / (12 * noise_stddev + num_clients * coordinate))
        scale = min(scale, _LARGEST_SHARE * math.sqrt(num_clients) / noise_stddev)
        if scale <= 0:
            raise ValueError(f"{where} leave no room for the clients' noise; take more bits or fewer clients")
    rounding = math.sqrt(num_clients) / (2 * scale)
    if rounding >= noise_stddev:
        raise ValueError(
            f"{where} leave a rounding error of {rounding:.3g} a coordinate of the sum, above the noise of "
            f"{noise_stddev:.3g}; take more bits"
        )
    encoding = Encoding(
        dimension=dimension, max_norm=max_norm, scale=scale, bits=bits, num_clients=num_clients
    )
    if encoding.inflated_norm > max_inflation * max_norm:
        raise ValueError(
            f"{where} inflate the norm bound {encoding.inflated_norm / max_norm:.3g} times, beyond {max_inflation}; "
            "take more bits"
        )
    return scale


def random_signs(key: Key[Array, ""], encoding: Encoding) -> Float[Array, " padded"]:
    """The rotation's signs, +-1: public, the same for every client of a round, fresh in the next one."""
    (word,) = words(draw_key(key), (encoding.padded,), 1)
    return jnp.where(word >> jnp.uint32(31) == 0, 1.0, -1.0)


def encode(
    key: Key[Array, ""],
    update: Float[Array, " dimension"],
    signs: Float[Array, " padded"],
    *,
    encoding: Encoding,
) -> tuple[UInt32[Array, " padded"], EncodingInfo]:
    """One client's message before masking: integers modulo 2^bits whose L2 norm is at most `integer_norm`.

    Rounding is drawn again while the norm passes its bound, and after 32 tries goes towards zero, which
    keeps it. An update that is not finite, or is longer than `max_norm`, becomes the zero vector.

    Args:
      key: the client's own, for rounding and for its share of noise. signs: of `random_signs`.
    """
    if update.shape[0] != encoding.dimension:
        raise ValueError(f"update has {update.shape[0]} parameters, the encoding {encoding.dimension}")
    rounding_key, noise_key = jax.random.split(key)
    bound = jnp.float32(encoding.integer_norm**2 * (1 - _SLACK))
    rotated = jnp.float32(encoding.scale) * rotate(update.astype(jnp.float32), signs)
    floor = jnp.floor(rotated)
    fraction = rotated - floor

    def fits(integers):
        return _squared_norm(integers) <= bound

    def draw(carry):
        tries, _, _ = carry
        key = draw_key(jax.random.fold_in(rounding_key, tries))

        def up_or_down():
            (word,) = words(key, rotated.shape, 1)
            uniform = (word >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)
            return floor + (uniform < fraction)

        integers = once(tries, up_or_down)
        return tries + 1, integers, fits(integers)

    tries, integers, is_short = lax.while_loop(
        lambda carry: ~carry[2] & (carry[0] < _MOST_TRIES), draw, (jnp.int32(0), rotated, jnp.bool_(False))
    )

    def towards_zero():
        shorter = jnp.trunc(rotated)
        return jnp.where(fits(shorter), shorter, 0.0)  # 0 also where a NaN made the comparison False

    integers = lax.cond(is_short, lambda: integers, towards_zero)
    largest = encoding.largest
    info = EncodingInfo((jnp.abs(integers) > largest).sum().astype(jnp.int32), tries)
    # Clamped as floats first, so that the conversion cannot overflow; float32(largest) may round up by a
    # hair.
    whole = jnp.clip(jnp.clip(integers, -float(largest), float(largest)).astype(jnp.int32), -largest, largest)
    if encoding.share_stddev:
        whole = whole + sampling.discrete_gaussian(noise_key, whole.shape, stddev=encoding.share_stddev)
    return wrap(whole, encoding.bits), info


def wrap(integers: Int32[Array, "..."], bits: int) -> UInt32[Array, "..."]:
    """Signed integers as residues modulo 2^bits."""
    return lax.bitcast_convert_type(integers, jnp.uint32) & jnp.uint32(2**bits - 1)


def unwrap(residues: UInt32[Array, "..."], bits: int) -> Int32[Array, "..."]:
    """Residues as the signed integers nearest zero, the inverse of `wrap` below 2^(bits - 1)."""
    top = jnp.uint32(32 - bits)
    return lax.bitcast_convert_type(residues << top, jnp.int32) >> top.astype(jnp.int32)


def modular_sum(messages: UInt32[Array, "clients padded"], bits: int) -> UInt32[Array, " padded"]:
    """The sum over clients modulo 2^bits: exact, as 2^bits divides the 2^32 at which uint32 wraps."""
    return messages.sum(0, dtype=jnp.uint32) & jnp.uint32(2**bits - 1)


def decode(
    total: UInt32[Array, " padded"], signs: Float[Array, " padded"], *, encoding: Encoding
) -> Float[Array, " dimension"]:
    """The sum of the clients' updates, from the modular sum of their messages: unbiased but for clamping.

    Its rounding error has a standard deviation of at most sqrt(clients) / (2 scale) a coordinate.
    """
    integers = unwrap(total, encoding.bits).astype(jnp.float32)
    return rotate_back(integers, signs, encoding.dimension) / jnp.float32(encoding.scale)


def rotate(vector: Float[Array, " dimension"], signs: Float[Array, " padded"]) -> Float[Array, " padded"]:
    """The signs, then the orthonormal Walsh-Hadamard transform over the vector padded to a power of two."""
    padded = jnp.pad(vector, (0, signs.shape[0] - vector.shape[0]))
    return _hadamard(padded * signs)


def rotate_back(
    rotated: Float[Array, " padded"], signs: Float[Array, " padded"], dimension: int
) -> Float[Array, " dimension"]:
    """The inverse of `rotate`; what the padding has become is dropped."""
    return (_hadamard(rotated) * signs)[:dimension]


def _hadamard(vector):
    """By Kronecker factors of up to 32, each a product with a small matrix of signs; as every factor's axis goes
    from first to last, they end where they began."""
    size = vector.shape[0]
    left = size.bit_length() - 1
    while left:
        radix = 1 << min(left, 5)
        rows = vector.reshape(radix, -1).T
        vector = jnp.dot(rows, _sign_matrix(radix), precision=lax.Precision.HIGHEST).reshape(size)
        left -= min(left, 5)
    return vector * jnp.float32(1 / math.sqrt(size))


def _sign_matrix(size):
    index = jnp.arange(size)
    return 1.0 - 2.0 * (lax.population_count(index[:, None] & index[None]) & 1).astype(jnp.float32)


def _squared_norm(integers):
    """Sums of 8 terms at a time, in float32: up to 2^32 entries the relative error is below 11 * 7 * 2^-24,
    whatever the order within them, and 2^-24 of each square: 2^-17.7 in all."""
    total = integers * integers
    while total.size > 1:
        slabs = jnp.pad(total, (0, -total.size % _BLOCK)).reshape(_BLOCK, -1)
        total = functools.reduce(
            operator.add, list(slabs)
        )  # XLA's reduction over a first axis is 30 times as slow
    return total.reshape(())
