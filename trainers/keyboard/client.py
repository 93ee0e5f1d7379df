"""What a device does: plain SGD over its own batches, from the model it was sent."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from trainers.keyboard import batches, model, packed
from trainers.keyboard.batches import Packed, Span
from trainers.keyboard.model import Params


def local_sgd(
    params: Params,
    store: Packed,
    span: Span,
    *,
    learning_rate,
    epochs: int,
    cell: str,
    one_at_a_time: bool,
) -> tuple[Params, dict[str, Float[Array, ""]]]:
    """`(local model - params, metrics)` after `epochs` passes of SGD over the batches `span` of `store`.

    No batch: a zero update. The metrics are sums for the operator: `loss` over batches (nats a target, before
    each step) and `batches`.

    Args:
      learning_rate: of the mean loss of each batch.
      one_at_a_time: True where the function runs on one client, not mapped over several: then the packed
        gradients, which skip every padded position, are used. It changes speed, and results by rounding.
    """

    def step(i, carry):
        local, space, total = carry
        at = span.first + i % jnp.maximum(span.count, 1)
        batch = Packed(*(lax.dynamic_index_in_dim(x, at, keepdims=False) for x in store))
        if one_at_a_time:
            local, space, loss = packed.sgd_step(local, space, batch, learning_rate=learning_rate, cell=cell)
        else:
            inputs, targets = batches.unpack(batch)
            loss, grads = jax.value_and_grad(model.loss)(local, inputs, targets, cell=cell)
            local = jax.tree.map(lambda p, g: p - learning_rate * g, local, grads)
        return local, space, total + loss

    steps = epochs * span.count
    space = packed.scratch(params, store) if one_at_a_time else ()
    local, _, total = lax.fori_loop(0, steps, step, (params, space, jnp.float32(0.0)))
    update = jax.tree.map(jnp.subtract, local, params)
    return update, {"loss": total, "batches": steps.astype(jnp.float32)}
