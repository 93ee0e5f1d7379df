"""The trained model one word at a time: a state that remembers the text so far, and what may come next.

Committing a word costs one LSTM step and one output layer, however long the text is. Rows are independent texts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from trainers.keyboard import model
from trainers.keyboard.model import Params


class State(NamedTuple):
    """The text so far. hidden: the LSTM's output. cell: its memory."""

    hidden: Float[Array, "rows hidden"]
    cell: Float[Array, "rows hidden"]


def start(params: Params, rows: int) -> State:
    """The state before the begin token."""
    zeros = jnp.zeros((rows, params["recurrent_kernel"].shape[0]))
    return State(zeros, zeros)


def _step(params: Params, state: State, tokens: Int[Array, " rows"], cell: str) -> State:
    z = params["embedding"][tokens] @ params["input_kernel"] + params["bias"][None]
    return State(*model.step_cell(cell, z + state.hidden @ params["recurrent_kernel"], state.cell))


@functools.partial(jax.jit, static_argnames="cell")
def advance(
    params: Params, state: State, tokens: Int[Array, " rows"], *, cell: str
) -> tuple[State, Float[Array, "rows tokens"]]:
    """Appends one token to each text; also the log probability (nats) of every token that may follow."""
    state = _step(params, state, tokens, cell)
    return state, jax.nn.log_softmax(model.output_logits(params, state.hidden))


@functools.partial(jax.jit, static_argnames="cell")
def states(params: Params, inputs: Int[Array, "time rows"], *, cell: str) -> State:
    """The states after each input, time first: fields `[time, rows, hidden]`."""

    def step(state, tokens):
        state = _step(params, state, tokens, cell)
        return state, state

    return lax.scan(step, start(params, inputs.shape[1]), inputs)[1]


@functools.partial(jax.jit, static_argnames=("cell", "length"))
def continuations(
    params: Params, state: State, *, cell: str, length: int
) -> tuple[Int[Array, "rows length"], Float[Array, "rows length"]]:
    """The most probable next word, again and again (greedy), after each text.

    Returns:
      words: token ids; 0 from where the most probable token was the end (specials but the end are never offered).
      confidence: for each length, the probability (0 to 1) of the words so far, in one piece; 0 after the end.
    """
    num_tokens = model.output_embedding(params).shape[0]
    token = jnp.arange(num_tokens)
    offered = (token > model.PAD) & (token <= num_tokens - model.NUM_SPECIAL) | (token == num_tokens - 1)

    def step(carry, _):
        state, log_confidence, running = carry
        log_prob = jax.nn.log_softmax(model.output_logits(params, state.hidden))
        best = jnp.argmax(jnp.where(offered[None], log_prob, -jnp.inf), -1)
        running = running & (best < num_tokens - 1)
        own = jnp.take_along_axis(log_prob, best[:, None], 1)[:, 0]
        log_confidence = jnp.where(running, log_confidence + own, -jnp.inf)
        word = jnp.where(running, best, model.PAD)
        return (_step(params, state, word, cell), log_confidence, running), (word, jnp.exp(log_confidence))

    rows = state.hidden.shape[0]
    carry = (state, jnp.zeros(rows), jnp.ones(rows, bool))
    words, confidence = lax.scan(step, carry, None, length=length)[1]
    return words.T, confidence.T
