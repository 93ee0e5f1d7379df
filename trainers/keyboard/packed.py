"""Loss and gradients of the model on one packed batch, by hand: the fast path on a CPU.

The same numbers as `jax.grad(model.loss)` on the padded batch (a test says so), for a fraction of the work:

- only positions with a target are computed: the position-wise layers run on the packed positions, in the smallest of
  a few sizes that holds them, and the recurrence runs only as many steps as the longest example and, as
  shorter examples end, on 16, 8, then 4 rows;
- the weights' gradients are one matrix product each after the backward recurrence, not an accumulation inside it;
- the softmax is turned into its own gradient in place.

Everything here has dynamic loop bounds, so it does not map over clients: chunks wider than one client use
`jax.grad` on padded batches instead.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from trainers.keyboard.batches import Packed
from trainers.keyboard.model import PAD, Params, output_embedding, step_cell

# Sizes, as fractions of a full batch's positions, that the token-wise layers are compiled for.
_FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
_FEWEST_ROWS = 4


class Gradients(NamedTuple):
    """Gradients of the loss.

    dense: by every parameter, except that of the input embedding when it has a table of its own.
    embedding: by the embedded inputs, position by position; add it to the rows of the tokens read there.
    """

    dense: Params
    embedding: Float[Array, "positions embed"]


def sgd_step(params: Params, batch: Packed, *, learning_rate, cell: str) -> tuple[Params, Float[Array, ""]]:
    """`(params - learning_rate * gradient, loss)` on one batch; a batch without targets changes nothing."""
    gradients, loss = value_and_grad(params, batch, cell=cell)
    new = {
        name: value - learning_rate * gradients.dense[name] if name in gradients.dense else value
        for name, value in params.items()
    }
    step = -learning_rate * gradients.embedding
    new["embedding"] = new["embedding"].at[batch.inputs].add(step, mode="promise_in_bounds")
    return new, loss


def value_and_grad(params: Params, batch: Packed, *, cell: str) -> tuple[Gradients, Float[Array, ""]]:
    """`(gradients, loss)` of `model.loss` on one packed batch."""
    positions, rows = batch.inputs.shape[0], batch.rows
    wx, wh, out = params["input_kernel"], params["recurrent_kernel"], output_embedding(params)
    sizes = sorted({min(positions, -(-int(positions * f) // 8) * 8) for f in _FRACTIONS})
    smallest = jnp.searchsorted(jnp.asarray(sizes), batch.live.sum())

    def at_size(function, *operands):
        """`function(n, *operands)` for the smallest size n that holds the batch."""
        return lax.switch(smallest, [lambda *x, n=n: function(n, *x) for n in sizes], *operands)

    def fill(x, more=0):
        return jnp.pad(x, ((0, positions + more - x.shape[0]), (0, 0)))

    def gate_inputs(n, embedding, wx, bias, inputs):
        x = embedding.at[inputs[:n]].get(mode="promise_in_bounds")
        # A step reads `rows` positions from where it starts: room for the last one to read past the end.
        return fill(x @ wx + bias[None], rows)

    def output_layer(n, h, projection, projection_bias, out, output_bias, targets):
        h, targets = h[:n], targets[:n]
        y = h @ projection + projection_bias[None]
        scores = y @ out.T + output_bias[None]
        scores = scores - scores.max(1, keepdims=True)
        log_sum = jnp.log(jnp.exp(scores).sum(1))
        real = targets != PAD
        weight = real / jnp.maximum(real.sum(), 1).astype(jnp.float32)
        picked = jnp.take_along_axis(scores, targets[:, None], 1)[:, 0]
        loss = jnp.sum(jnp.where(real, log_sum - picked, 0.0) * weight)
        # d loss / d scores = weight (softmax - one-hot).
        hit = jnp.arange(out.shape[0])[None] == targets[:, None]
        d_scores = weight[:, None] * (jnp.exp(scores - log_sum[:, None]) - hit)
        d_y = d_scores @ out
        d_out, d_projection = d_scores.T @ y, h.T @ d_y
        d_h = fill(d_y @ projection.T, rows)
        return loss, d_h, d_out, d_scores.sum(0), d_projection, d_y.sum(0)

    def recurrent_layer(n, dz, h_before, embedding, wx, inputs):
        # Positions past the last live one still hold their forward values.
        dz = jnp.where(jnp.arange(n)[:, None] < batch.live.sum(), dz[:n], 0.0)
        x = embedding.at[inputs[:n]].get(mode="promise_in_bounds")
        return x.T @ dz, h_before[:n].T @ dz, dz.sum(0), fill(dz @ wx.T)

    z = at_size(gate_inputs, params["embedding"], wx, params["bias"], batch.inputs)
    z, before, h = _forward(z, wh, batch.live, rows, cell)
    loss, d_h, d_out, d_output_bias, d_projection, d_projection_bias = at_size(
        output_layer,
        h,
        params["projection"],
        params["projection_bias"],
        out,
        params["output_bias"],
        batch.targets,
    )
    dz = _backward(z, before.c, d_h, wh, batch.live, rows, cell)
    d_wx, d_wh, d_bias, d_x = at_size(recurrent_layer, dz, before.h, params["embedding"], wx, batch.inputs)
    dense = {
        "input_kernel": d_wx,
        "recurrent_kernel": d_wh,
        "bias": d_bias,
        "projection": d_projection,
        "projection_bias": d_projection_bias,
        "embedding" if "output_embedding" not in params else "output_embedding": d_out,
        "output_bias": d_output_bias,
    }
    return Gradients(dense, d_x), loss


class _State(NamedTuple):
    """h and c of rows, or of every position before its step."""

    h: Float[Array, "rows hidden"]
    c: Float[Array, "rows hidden"]


def _phases(live, rows):
    """[(rows computed, first step, end step)]: fewer rows as examples end."""
    sizes = [rows]
    while sizes[-1] // 2 >= _FEWEST_ROWS:
        sizes.append(sizes[-1] // 2)
    begin, out = jnp.int32(0), []
    for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
        end = jnp.sum(live > smaller).astype(jnp.int32)
        out.append((size, begin, end))
        begin = end
    return out


def _forward(z, wh, live, rows, cell):
    """(gate inputs, state before each position, outputs of each position)."""
    starts = jnp.cumsum(live) - live
    hidden = wh.shape[0]
    buffer = jnp.zeros((z.shape[0], hidden), z.dtype)
    state = _State(jnp.zeros((rows, hidden), z.dtype), jnp.zeros((rows, hidden), z.dtype))
    carry = (z, _State(buffer, buffer), buffer)
    for size, begin, end in _phases(live, rows):

        def step(t, carry, size=size):
            (z, before, out), state = carry
            at = (starts[t], 0)
            old = lax.dynamic_slice(z, at, (size, z.shape[1]))
            zt = old + state.h @ wh
            h, c = step_cell(cell, zt, state.c)
            # Rows beyond live[t] are dead; their places belong to the next step, whose z is still to be read.
            zt = jnp.where(jnp.arange(size)[:, None] < live[t], zt, old)
            put = lambda buffer, value: lax.dynamic_update_slice(buffer, value, at)
            # The other buffers are written in order, so what dead rows leave there is overwritten.
            before = _State(put(before.h, state.h), put(before.c, state.c))
            return (put(z, zt), before, put(out, h)), _State(h, c)

        state = _State(state.h[:size], state.c[:size])
        carry, state = lax.fori_loop(begin, end, step, (carry, state))
    return carry


def _backward(z, c_before, d_h, wh, live, rows, cell):
    """d loss / d gate inputs of each live position, in the place of the gate inputs."""
    starts = jnp.cumsum(live) - live
    hidden = wh.shape[0]
    state = _State(jnp.zeros((0, hidden), z.dtype), jnp.zeros((0, hidden), z.dtype))
    for size, begin, end in reversed(_phases(live, rows)):

        def step(i, carry, size=size, end=end, begin=begin):
            z, grad = carry
            t = begin + end - 1 - i
            at = (starts[t], 0)
            take = lambda buffer: lax.dynamic_slice(buffer, at, (size, buffer.shape[1]))
            zt = take(z)
            _, pull = jax.vjp(lambda z, c: step_cell(cell, z, c), zt, take(c_before))
            dz, dc = pull((grad.h + take(d_h), grad.c))
            alive = jnp.arange(size)[:, None] < live[t]
            dz, dc = jnp.where(alive, dz, 0.0), jnp.where(alive, dc, 0.0)
            z = lax.dynamic_update_slice(z, jnp.where(alive, dz, zt), at)
            return z, _State(dz @ wh.T, dc)

        grow = ((0, size - state.h.shape[0]), (0, 0))
        state = _State(jnp.pad(state.h, grow), jnp.pad(state.c, grow))
        z, state = lax.fori_loop(begin, end, step, (z, state))
    return z
