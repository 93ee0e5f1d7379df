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


class Continuations(NamedTuple):
    """What may be shown ahead of each text, for every number of words up to `length`.

    words: `words[row, n - 1, :n]` is the best continuation of n words; zeros behind it.
    confidence: its probability (0 to 1) in one piece, never rising with n; 0 where the text more probably ends before.
    """

    words: Int[Array, "rows length length"]
    confidence: Float[Array, "rows length"]


class _Hypotheses(NamedTuple):
    """Continuations of one text kept so far, best first. ended: those whose last token was the end."""

    state: State
    words: Int[Array, "beams length"]
    log_prob: Float[Array, " beams"]
    ended: Array


@functools.partial(jax.jit, static_argnames=("cell", "length", "beams"))
def continuations(
    params: Params,
    state: State,
    log_prob: Float[Array, "rows tokens"],
    *,
    cell: str,
    length: int,
    beams: int,
) -> Continuations:
    """The most probable continuations that a search with `beams` hypotheses finds; with 1 the greedy ones.

    Every hypothesis is extended by every word, or ended; the best `beams` of all are kept. The special tokens are never
    offered but for the end, which counts as a continuation: a longer one is shown only where it is more probable than
    that the text ends before.

    Args:
      state: after each text.
      log_prob: of the first token there, in nats (`advance` gives it); -inf forbids a token.
    """
    num_tokens = log_prob.shape[1]
    end, token = num_tokens - 1, jnp.arange(num_tokens)
    offered = (token > model.PAD) & (token <= num_tokens - model.NUM_SPECIAL) | (token == end)

    def best(scores: Float[Array, "hypotheses tokens"], kept: _Hypotheses, place) -> _Hypotheses:
        """The best `beams` extensions; one that has ended stays as it is, in the place of padding."""
        scores = jnp.where(offered[None] & ~kept.ended[:, None], kept.log_prob[:, None] + scores, -jnp.inf)
        scores = scores.at[:, model.PAD].set(jnp.where(kept.ended, kept.log_prob, -jnp.inf))
        # Behind the barrier XLA keeps its partial sort; else it may sort all extensions.
        found, at = lax.optimization_barrier(lax.top_k(scores.reshape(-1), min(beams, scores.size)))
        found = jnp.pad(found, (0, beams - len(found)), constant_values=-jnp.inf)
        at = jnp.pad(at, (0, beams - len(at)))
        parent, word = at // num_tokens, at % num_tokens
        ended = kept.ended[parent] | (word == end)
        words = kept.words[parent].at[:, place].set(jnp.where(ended, model.PAD, word))
        return _Hypotheses(jax.tree.map(lambda x: x[parent], kept.state), words, found, ended)

    def shown(kept: _Hypotheses):
        return kept.words[0], jnp.where(kept.ended[0], 0.0, jnp.exp(kept.log_prob[0]))

    def one_text(state: State, log_prob: Float[Array, " tokens"]):
        text = _Hypotheses(
            jax.tree.map(lambda x: x[None], state),
            jnp.zeros((1, length), jnp.int32),
            jnp.zeros(1),
            jnp.zeros(1, bool),
        )
        first = best(log_prob[None], text, 0)

        def step(kept, place):
            state = _step(params, kept.state, kept.words[:, place - 1], cell)
            scores = jax.nn.log_softmax(model.output_logits(params, state.hidden))
            kept = best(scores, kept._replace(state=state), place)
            return kept, shown(kept)

        _, rest = lax.scan(step, first, jnp.arange(1, length))
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), shown(first), rest)

    return Continuations(*jax.vmap(one_text)(state, log_prob))
