"""The client axis: clients are plain functions, and only sums over them leave.

Arrays of a cohort are laid out `[chunks, clients, ...]`. The clients of a chunk are computed at once, chunks one
after the other, so that the width of a chunk trades memory for speed and changes results by rounding only
(1e-6 relative). Width 1 runs each client by itself, with its own number of steps: the fastest on a CPU.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxpriv import clipping, keys, quantile

Scalar = float | Float[Array, ""]
# data of one client, its key -> its update and scalars about it (sums of losses, say)
ClientFn = Callable[[Any, Any, Any], tuple[Any, Any]]
# a client's id, its clipped update and centred bit -> its message and scalars about it
EncodeFn = Callable[[Any, Any, Any], tuple[Any, Any]]

# Chunks added up before their sum joins the total: keeps rounding near sqrt(chunks), at no cost.
_GROUP = 32


class Cohort(NamedTuple):
    """Who takes part in a round, `[chunks, clients]`.

    ids: the clients' numbers; their randomness follows these, never their position.
    present: False for places that only fill up a chunk; they count nowhere.
    num_examples: how many examples the client has; 0 makes it an empty client, whose message is fixed.
    data: what `client_fn` is given, any pytree of `[chunks, clients, ...]`.
    """

    ids: Int[Array, "chunks clients"]
    present: Bool[Array, "chunks clients"]
    num_examples: Int[Array, "chunks clients"]
    data: PyTree


class ClippedSum(NamedTuple):
    """What the server may go on with, once noise is added: sums over clients, never means.

    update: sum of the clipped updates; zeroing one client's message moves it by at most `max_norm` in L2.
    below: sum of the centred bits `1[norm <= estimate] - 1/2`; zeroing a message moves it by at most 1/2.
    """

    update: PyTree[Float[Array, "..."]]
    below: Float[Array, ""]


class EncodedSum(NamedTuple):
    """What the server of a secure aggregation sees: the sum of the clients' messages, and nothing else.

    message: as `encode` made them; sums of unsigned integers wrap and are exact, whatever the order.
    """

    message: PyTree


class CohortInfo(NamedTuple):
    """Facts for the operator alone, computed from client data and not covered by any guarantee. Not released.

    num_present: clients that took part, empty and non-finite ones included.
    num_empty: of these, clients without examples (zero vector sent, bit -1/2).
    num_non_finite: of these, clients whose update held a NaN or an infinity (zero vector sent, bit -1/2).
    num_clipped: clients whose update was longer than the bound.
    num_examples: examples used.
    norm: sum of the norms before clipping, over clients with examples and finite updates.
    metrics: sums of what `client_fn` returned beside the update, over the same clients.
    encoding: sums of what `encode` returned beside the message; () without one.
    """

    num_present: Int[Array, ""]
    num_empty: Int[Array, ""]
    num_non_finite: Int[Array, ""]
    num_clipped: Int[Array, ""]
    num_examples: Int[Array, ""]
    norm: Float[Array, ""]
    metrics: PyTree[Float[Array, ""]]
    encoding: PyTree = ()


def arrange(ids, num_examples, data: PyTree, *, chunk_size: int, num_clients: int | None = None) -> Cohort:
    """Lays host arrays with a leading clients axis out as `[chunks, chunk_size, ...]`, filled up with absent places.

    Clients are sorted by number of examples, the largest first, so that those of one chunk take about equally
    long; the sums do not depend on it.

    Args:
      num_clients: places to fill up to (the report goal, say), so that shapes stay the same from round to round.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size=}")
    ids = np.asarray(ids)
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise ValueError(f"client ids must be integers from 0 to 2**31 - 1, got {ids.min()} to {ids.max()}")
    num_examples = np.asarray(num_examples, np.int32)
    real = len(num_examples)
    places = max(real, num_clients or 0, 1)
    if num_clients is not None and real > num_clients:
        raise ValueError(f"{real} clients do not fit in {num_clients=}; raise it or pass fewer clients")
    chunks = -(-places // chunk_size)
    order = np.argsort(-num_examples, kind="stable")

    def lay(x):
        x = np.asarray(x)
        out = np.zeros((chunks * chunk_size, *x.shape[1:]), x.dtype)
        out[:real] = x[order]
        return out.reshape(chunks, chunk_size, *x.shape[1:])

    return Cohort(
        ids=lay(np.asarray(ids, np.int32)),  # type: ignore[arg-type]
        present=lay(np.ones(real, bool)),  # type: ignore[arg-type]
        num_examples=lay(num_examples),  # type: ignore[arg-type]
        data=jax.tree.map(lay, data),
    )


def clipped_sum(
    client_fn: ClientFn,
    params: PyTree[Float[Array, "..."]],
    cohort: Cohort,
    key: Key[Array, ""] | None,
    *,
    max_norm: Scalar | None,
    estimate: Scalar | None = None,
    weigh_by_examples: bool = False,
    encode: EncodeFn | None = None,
) -> tuple[Any, CohortInfo]:
    """Sums the clients' updates, each clipped to `max_norm` by itself, and returns `(ClippedSum, info)`.

    Runs `client_fn(params, data, key) -> (update, metrics)` for every client: `update` is a pytree like `params`,
    `metrics` a pytree of scalars. Results do not depend on chunk size, order, padding or devices beyond 1e-6
    relative; to spread a chunk over devices, place the cohort's arrays with `sharding.place_cohort`.

    A client without examples, or whose update is not finite, contributes the zero vector and the bit -1/2; an
    absent place contributes nothing at all.

    Args:
      params: given to every client unchanged.
      key: of this round; a client's own is `keys.for_client(key, id)`, so shuffling a cohort changes nobody's
        randomness. None where `client_fn` draws nothing; it is then given None.
      max_norm: clip norm C; None sums unclipped updates, which has no sensitivity bound and serves no guarantee.
      estimate: the norm that the bits compare with (the current quantile estimate, not C); None: all bits are 0.
      weigh_by_examples: multiply each update by the client's number of examples. One client could then own
        nearly the whole sum, so it is refused together with `max_norm`.
      encode: `(client id, clipped update, centred bit) -> (message, facts)`, for secure aggregation: messages
        are summed in place of updates, those of present clients only, and an `EncodedSum` comes back.
    """
    if weigh_by_examples and max_norm is not None:
        raise ValueError(
            f"weigh_by_examples=True voids the bound of {max_norm=}: a client with many examples would count"
            " more than once; use equal weights, or max_norm=None without privacy"
        )
    num_chunks, width = cohort.present.shape

    def one(client_id, present, num_examples, data):
        own_key = None if key is None else keys.for_client(key, client_id)
        update, metrics = client_fn(params, data, own_key)
        if jax.tree.structure(update) != jax.tree.structure(params):
            raise ValueError("client_fn must return an update with the structure of params")
        if max_norm is None:
            # An infinite radius: nothing is clipped, non-finite updates still count as zero.
            update, clip = clipping.clip(update, jnp.float32(jnp.inf))
            outside = jnp.bool_(False)
        else:
            update, clip = clipping.clip(update, max_norm)
            outside = clip.norm > jnp.asarray(max_norm, jnp.float32) * jnp.float32(1 - clipping.MARGIN)
        empty = num_examples <= 0
        usable = present & ~empty & clip.finite
        weight = jnp.float32(1.0)
        if weigh_by_examples:
            weight = num_examples.astype(jnp.float32)
        update = jax.tree.map(lambda x: jnp.where(usable, x * weight, 0.0), update)
        bit = jnp.float32(0.0)
        if estimate is not None:
            bit = quantile.bits(jnp.where(usable, clip.norm, jnp.inf), present, estimate)
        info = CohortInfo(
            num_present=present.astype(jnp.int32),
            num_empty=(present & empty).astype(jnp.int32),
            num_non_finite=(present & ~empty & ~clip.finite).astype(jnp.int32),
            num_clipped=(usable & outside).astype(jnp.int32),
            num_examples=jnp.where(present, num_examples, 0).astype(jnp.int32),
            norm=jnp.where(usable, clip.norm, 0.0),
            metrics=jax.tree.map(lambda x: jnp.where(usable, jnp.asarray(x, jnp.float32), 0.0), metrics),
        )
        if encode is None:
            return ClippedSum(update, bit), info
        sent = encode(client_id, update, bit)
        message, facts = jax.tree.map(lambda x: jnp.where(present, x, jnp.zeros_like(x)), sent)
        return EncodedSum(message), info._replace(encoding=facts)

    def add_chunk(i, total):
        rows = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tuple(cohort))
        if width == 1:
            out = one(*jax.tree.map(lambda x: x[0], rows))
        else:
            out = jax.tree.map(lambda x: x.sum(0), jax.vmap(one)(*rows))
        return jax.tree.map(jnp.add, total, out)

    first = jax.tree.map(lambda x: x[0, 0], tuple(cohort))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, *first))
    # Chunks of absent places at the end cost nothing.
    used = jnp.max(jnp.where(cohort.present.any(1), jnp.arange(1, num_chunks + 1), 0))

    def add_group(g, total):
        start = g * _GROUP
        group = lax.fori_loop(start, jnp.minimum(start + _GROUP, used), add_chunk, zero)
        return jax.tree.map(jnp.add, total, group)

    if num_chunks <= _GROUP:
        return lax.fori_loop(0, used, add_chunk, zero)
    return lax.fori_loop(0, -(-used // _GROUP), add_group, zero)
