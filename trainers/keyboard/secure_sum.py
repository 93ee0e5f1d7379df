"""Secure aggregation in the trainer: every client's message as integers, and their modular sum back as a sum.

Updates are encoded in units of the clip norm in force, so that one scale serves whatever adaptive clipping does
and the rounding inflates the bound of every round by the same factor. The centred clip bit, +-1/2, is one more
entry of the vector, +-1: exact. Rounding and shares of noise are drawn from the run's secret key, by round and client;
the signs of the rotation are public and new in every round.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, Key, PyTree, UInt32

from jaxpriv import cohort, keys, secagg

CLAMP_PROBABILITY = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecureSum:
    """How the clients of a run encode; public.

    encoding: of updates in units of the clip norm (its `max_norm` is 1).
    seed: of the rotation's signs.
    """

    encoding: secagg.Encoding
    seed: int

    @property
    def distributed(self) -> bool:
        """Whether the clients add the noise, in shares."""
        return self.encoding.share_stddev > 0

    @property
    def length(self) -> int:
        """Entries of a client's vector: the padded update and the clip bit."""
        return self.encoding.padded + 1

    @property
    def bytes_up(self) -> int:
        """Of a client's masked vector, packed; keys and shares of the protocol beneath come on top."""
        return -(-self.length * self.encoding.bits // 8)


def choose(
    *, dimension: int, bits: int, report_goal: int, noise_multiplier: float, distributed: bool, seed: int
) -> SecureSum:
    """The finest encoding that clamps any coordinate of any client with probability below 1e-6 a round.

    Args:
      dimension: parameters of the model.
      noise_multiplier: of the noise on the sum of updates, in units of the clip norm; inf without noise.
      distributed: the clients add it.

    Raises:
      ValueError: too few (or too many) bits for so many clients, with the numbers.
    """
    scale = secagg.choose_scale(
        dimension=dimension,
        max_norm=1.0,
        bits=bits,
        num_clients=report_goal,
        noise_stddev=noise_multiplier,
        distributed=distributed,
        clamp_probability=CLAMP_PROBABILITY,
    )
    share = noise_multiplier * scale / math.sqrt(report_goal) if distributed else 0.0
    encoding = secagg.Encoding(
        dimension=dimension, max_norm=1.0, scale=scale, bits=bits, num_clients=report_goal, share_stddev=share
    )
    return SecureSum(encoding=encoding, seed=seed)


def encoder(
    secure: SecureSum,
    rounding: Key[Array, ""],
    signs: Float[Array, " padded"],
    step: Int[Array, ""],
    clip_norm: Float[Array, ""],
) -> cohort.EncodeFn:
    """The clients' side of round `step`: `(client id, clipped update, bit) -> (message, facts)`."""
    own = keys.for_round(rounding, step)

    def encode(client_id, update, bit):
        flat, _ = ravel_pytree(update)
        message, info = secagg.encode(
            keys.for_client(own, client_id), flat / clip_norm, signs, encoding=secure.encoding
        )
        twice = secagg.wrap(jnp.round(2 * bit).astype(jnp.int32), secure.encoding.bits)
        facts = {"num_clamped": info.num_clamped, "num_retried": (info.tries > 1).astype(jnp.int32)}
        return jnp.append(message, twice), facts

    return encode


def recover(
    secure: SecureSum,
    total: cohort.EncodedSum,
    signs: Float[Array, " padded"],
    clip_norm: Float[Array, ""],
    *,
    like: PyTree,
) -> cohort.ClippedSum:
    """The server's side: sums over clients, from the sum of their messages modulo 2^bits."""
    residues: UInt32[Array, " length"] = total.message & jnp.uint32(2**secure.encoding.bits - 1)
    _, unravel = ravel_pytree(like)
    flat = secagg.decode(residues[:-1], signs, encoding=secure.encoding)
    below = secagg.unwrap(residues[-1], secure.encoding.bits).astype(jnp.float32) / 2
    return cohort.ClippedSum(unravel(flat * clip_norm), below)


def signs(secure: SecureSum, step: Int[Array, ""]) -> Float[Array, " padded"]:
    """Of the rotation of round `step`: public."""
    key = keys.for_round(keys.stream(keys.root(secure.seed), "rotation"), step)
    return secagg.random_signs(key, secure.encoding)
