"""Training of the translation model: one step, one loop."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from trainers.translation import model as models
from trainers.translation.batches import Batch

Params = Any


class TrainState(NamedTuple):
    """All that a resumed run needs.

    params: the model being trained.
    average: exponential moving average of `params`; what is evaluated and kept.
    optimizer: optax state.
    step: updates made so far.
    """

    params: Params
    average: Params
    optimizer: Any
    step: Int[Array, ""]


def smoothed_loss(
    logits: Float[Array, "rows length pieces"],
    targets: Int[Array, "rows length"],
    smoothing: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum over real positions of the label-smoothed cross-entropy in nats, and their number.

    `(1 - smoothing) * -log p(y) + smoothing * mean over pieces of -log p`.
    """
    real = targets != models.PAD
    normalizer = jax.nn.logsumexp(logits, -1)
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    loss = normalizer - (1 - smoothing) * picked - smoothing * logits.mean(-1)
    return jnp.where(real, loss, 0.0).sum(), real.sum().astype(jnp.float32)


def loss_fn(
    graphdef: nnx.GraphDef, params: Params, batch: Batch, key: Key[Array, ""] | None, *, smoothing: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Summed loss of a batch and its number of target pieces; dropout only with a key."""
    model = models.merge(graphdef, params)
    encoder_key, decoder_key = (None, None) if key is None else jax.random.split(key)
    memory = model.encode(batch.source, encoder_key)
    hidden, _ = model.decode(memory, batch.source != models.PAD, batch.inputs, decoder_key)
    return smoothed_loss(model.logits(hidden), jnp.asarray(batch.targets), smoothing)


def make_optimizer(*, learning_rate: float, warmup: int) -> optax.GradientTransformation:
    """Adam (0.9, 0.98), norm of the mean gradient clipped at 1, linear warm-up then inverse square root."""

    def rate(count):
        count = count.astype(jnp.float32) + 1
        return learning_rate * jnp.minimum(count / warmup, jnp.sqrt(warmup / count))

    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b1=0.9, b2=0.98, eps=1e-9))


def init(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """A state at step 0 whose average is the start itself."""
    return TrainState(params, params, optimizer.init(params), jnp.int32(0))


def make_step(graphdef, optimizer, *, smoothing: float = 0.1, average: float = 0.999):
    """A jitted `(state, batch, key) -> (state, (loss_sum, tokens))`; the state is donated.

    The dropout key of a step is `fold_in(key, step)`, so a resumed run draws what the unbroken one would
    have.
    """

    def step(state: TrainState, batch: Batch, key):
        def mean_loss(params):
            total, count = loss_fn(
                graphdef, params, batch, jax.random.fold_in(key, state.step), smoothing=smoothing
            )
            return total / jnp.maximum(count, 1.0), (total, count)

        grads, info = jax.grad(mean_loss, has_aux=True)(state.params)
        updates, opt = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        # Early on the average follows closely, or it would remember the random start.
        decay = jnp.minimum(average, (state.step + 1.0) / (state.step + 10.0))
        mean = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, params)
        return TrainState(params, mean, opt, state.step + 1), info

    return jax.jit(step, donate_argnums=0)
