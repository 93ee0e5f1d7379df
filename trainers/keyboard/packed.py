"""One SGD step of the model on one packed batch, differentiated by hand: the fast path on a CPU.

The same numbers as `jax.grad(model.loss)` on the padded batch (a test says so), for a fraction of the work:

- only positions with a target are computed: the position-wise layers run on the packed positions, in the smallest of
  a few sizes that holds them, and the recurrence runs only as many steps as the longest example and, as
  shorter examples end, on 16, 8, then 4 rows;
- the weights' gradients are one matrix product each after the backward recurrence, not an accumulation inside it;
- products run on the operand orders that are fast (a transposed right side costs twice in the recurrence);
- loops write in place, into buffers that live as long as the client does.

Loop bounds are dynamic, so this does not map over clients: chunks wider than one client use `jax.grad` on padded
batches instead.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from trainers.keyboard.batches import Packed
from trainers.keyboard.model import PAD, Params, output_embedding, step_cell

# Sizes, as fractions of a full batch's positions, that the position-wise layers are compiled for.
_FRACTIONS = (0.05, 0.15, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0)
_FEWEST_ROWS = 4


class State(NamedTuple):
    """h and c of rows, or of every position before its step."""

    h: Float[Array, "rows hidden"]
    c: Float[Array, "rows hidden"]


class Scratch(NamedTuple):
    """Buffers that a client's steps write in place, by position; only what a step wrote itself is read again.

    gates: gate inputs. before: state before each position. out: h after it. d_gates: gradient by gate inputs.
    """

    gates: Float[Array, "positions gates"]
    before: State
    out: Float[Array, "positions hidden"]
    d_gates: Float[Array, "positions gates"]


def scratch(params: Params, store: Packed) -> Scratch:
    """Buffers for steps on batches of `store`."""
    sizes = _sizes(store.inputs.shape[-1])
    # A step of the recurrence touches `rows` positions from its start, and the gap to the next size is cleared.
    gap = max(b - a for a, b in zip([0, *sizes], sizes))
    length = store.inputs.shape[-1] + max(store.rows, gap)
    hidden, gates = params["recurrent_kernel"].shape
    wide, narrow = jnp.zeros((length, gates)), jnp.zeros((length, hidden))
    return Scratch(wide, State(narrow, narrow), narrow, wide)


def sgd_step(
    params: Params, space: Scratch, batch: Packed, *, learning_rate, cell: str
) -> tuple[Params, Scratch, Float[Array, ""]]:
    """`(params - learning_rate * gradient, space, loss)`; a batch without targets changes no parameter."""
    positions, rows = batch.inputs.shape[0], batch.rows
    sizes = _sizes(positions)
    total = batch.live.sum()
    smallest = jnp.sum(jnp.asarray(sizes) < total)
    wx, wh, out = params["input_kernel"], params["recurrent_kernel"], output_embedding(params)

    def at_size(function, *operands):
        """`function(n, *operands)` for the smallest size n that holds the batch."""
        return lax.switch(smallest, [lambda *x, n=n: function(n, *x) for n in sizes], *operands)

    def fill(x, length):
        return jnp.pad(x, ((0, length - x.shape[0]), (0, 0)))

    def gate_inputs(n, embedding, wx, bias, inputs):
        x = embedding.at[inputs[:n]].get(mode="promise_in_bounds")
        return fill(x, positions), fill(x @ wx + bias[None], space.gates.shape[0])

    def output_layer(n, h, projection, projection_bias, out, output_bias, targets):
        h, targets = h[:n], targets[:n]
        y = h @ projection + projection_bias[None]
        scores = y @ out.T + output_bias[None]
        scores = scores - scores.max(1, keepdims=True)
        real = targets != PAD
        weight = real / jnp.maximum(real.sum(), 1).astype(jnp.float32)
        picked = jnp.take_along_axis(scores, targets[:, None], 1)[:, 0]
        share = jnp.exp(scores)
        sums = share.sum(1)
        loss = jnp.sum(jnp.where(real, jnp.log(sums) - picked, 0.0) * weight)
        # d loss / d scores = weight (softmax - one-hot).
        d_scores = share * (weight / sums)[:, None]
        d_scores = d_scores.at[jnp.arange(n), targets].add(-weight, mode="promise_in_bounds")
        d_y = d_scores @ out
        d_out, d_projection = _transpose(y.T @ d_scores), h.T @ d_y
        d_h = fill(d_y @ projection.T, positions + rows)
        return loss, d_h, d_out, d_scores.sum(0), d_projection, d_y.sum(0)

    def recurrent_layer(n, dz, h_before, x, wx):
        dz = dz[:n]
        return x[:n].T @ dz, _transpose(h_before[:n]) @ dz, dz.sum(0), fill(dz @ wx.T, positions)

    x, z = at_size(gate_inputs, params["embedding"], wx, params["bias"], batch.inputs)
    space = _forward(z, wh, batch.live, rows, cell, space)
    loss, d_h, d_out, d_output_bias, d_projection, d_projection_bias = at_size(
        output_layer,
        space.out,
        params["projection"],
        params["projection_bias"],
        out,
        params["output_bias"],
        batch.targets,
    )
    space = _backward(d_h, wh, batch.live, rows, cell, space)
    d_wx, d_wh, d_bias, d_x = at_size(recurrent_layer, space.d_gates, space.before.h, x, wx)
    gradient = {
        "input_kernel": d_wx,
        "recurrent_kernel": d_wh,
        "bias": d_bias,
        "projection": d_projection,
        "projection_bias": d_projection_bias,
        "embedding" if "output_embedding" not in params else "output_embedding": d_out,
        "output_bias": d_output_bias,
    }
    new = {k: v - learning_rate * gradient[k] if k in gradient else v for k, v in params.items()}
    # Only the rows of tokens that were read; padding adds zeros to row 0.
    new["embedding"] = new["embedding"].at[batch.inputs].add(-learning_rate * d_x, mode="promise_in_bounds")
    return new, space, loss


def _sizes(positions):
    """Rounded up to 32, so that small batches do not compile many."""
    return sorted({min(positions, -(-int(positions * f) // 32) * 32) for f in _FRACTIONS})


def _transpose(x):
    """`x.T` as an array of its own, not as a way of reading x."""
    return lax.optimization_barrier(x.T)


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


def _forward(z, wh, live, rows, cell, space):
    """Fills `gates`, `before` and `out` of the live positions; z are the inputs' part of the gates."""
    starts = jnp.cumsum(live) - live
    hidden = wh.shape[0]
    state = State(jnp.zeros((rows, hidden), z.dtype), jnp.zeros((rows, hidden), z.dtype))
    for size, begin, end in _phases(live, rows):

        def step(t, carry, size=size):
            space, state = carry
            at = (starts[t], 0)
            zt = lax.dynamic_slice(z, at, (size, z.shape[1])) + state.h @ wh
            h, c = step_cell(cell, zt, state.c)
            # Rows from live[t] on are dead. What they leave lies in the places of the next step, which
            # overwrites it.
            put = lambda buffer, value: lax.dynamic_update_slice(buffer, value, at)
            before = State(put(space.before.h, state.h), put(space.before.c, state.c))
            space = space._replace(gates=put(space.gates, zt), before=before, out=put(space.out, h))
            return space, State(h, c)

        state = State(state.h[:size], state.c[:size])
        space, state = lax.fori_loop(begin, end, step, (space, state))
    return space


def _backward(d_h, wh, live, rows, cell, space):
    """Fills `d_gates`: the gradient of live positions, zeros up to the next size; d_h is by `out`."""
    starts = jnp.cumsum(live) - live
    hidden, gates = wh.shape
    back = _transpose(wh)
    state = State(jnp.zeros((0, hidden), d_h.dtype), jnp.zeros((0, hidden), d_h.dtype))
    clear = jnp.zeros((space.d_gates.shape[0] - d_h.shape[0] + rows, gates), d_h.dtype)
    out = lax.dynamic_update_slice(space.d_gates, clear, (live.sum(), 0))
    for size, begin, end in reversed(_phases(live, rows)):

        def step(i, carry, size=size, end=end, begin=begin):
            out, grad = carry
            t = begin + end - 1 - i
            at = (starts[t], 0)
            take = lambda buffer: lax.dynamic_slice(buffer, at, (size, buffer.shape[1]))
            _, pull = jax.vjp(lambda z, c: step_cell(cell, z, c), take(space.gates), take(space.before.c))
            dz, dc = pull((grad.h + take(d_h), grad.c))
            alive = jnp.arange(size)[:, None] < live[t]
            dz, dc = jnp.where(alive, dz, 0.0), jnp.where(alive, dc, 0.0)
            # The places of dead rows hold what the next step left there.
            out = lax.dynamic_update_slice(out, jnp.where(alive, dz, take(out)), at)
            return out, State(dz @ back, dc)

        grow = ((0, size - state.h.shape[0]), (0, 0))
        state = State(jnp.pad(state.h, grow), jnp.pad(state.c, grow))
        out, state = lax.fori_loop(begin, end, step, (out, state))
    return space._replace(d_gates=out)
