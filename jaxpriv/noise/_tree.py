"""Noise of binary trees over the rounds (DP-FTRL; Kairouz et al. 2021, arXiv:2103.00039).

A node of level l covers 2^l rounds. After t rounds of a tree the released prefix carries the noise of the
nodes in the binary decomposition of t; a round's noise is the difference of two such prefixes. A restart
opens a new tree; what the old one released stays in the prefix, and nothing of it is used again. With
completion, the last round before a restart pads its tree with empty virtual leaves, so that one node's noise
stays.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxpriv import sampling
from jaxpriv.noise._base import Draw, Layout, NoiseMechanism, Restarts, block_diagonal, scale


class TreeState(NamedTuple):
    """Nothing but a key and counters: every node's noise is made again when it is wanted.

    key: secret. step: rounds so far. stddev: latched in the first round of the current tree.
    """

    key: Key[Array, ""]
    step: Int[Array, ""]
    stddev: Float[Array, ""]
    layout: Layout


def _begin(segments: Restarts, completion: bool, state, stddev):
    """A round's place, its segment's latched scale, and the tree's leaves before and after it (padded at its end)."""
    place = segments.place(state.step)
    stddev = jnp.where(place.before == 0, jnp.float32(stddev), state.stddev)
    new = place.before + 1
    if completion:
        new = jnp.where(place.is_last, _round_up(new), new)
    return place, stddev, place.before, new


def tree(
    restarts: Sequence[int] = (), completion: bool = False, *, draw: Draw = sampling.fused_normal_like
) -> NoiseMechanism:
    """The plain streaming tree, without any copy of the model in its state.

    A round adds the noise of the node that it completes and takes away that of the smaller ones inside it:
    two draws a round on average, at most log2(rounds) + 1; the work follows the nodes in question.

    Args:
      restarts: strictly increasing; a new tree starts after that many rounds.
      completion: pad each tree before its restart to a power of two.
      draw: `(key, like) -> standard normals`; tests put known numbers in its place.
    """
    segments = Restarts(restarts)

    def init(key: Key[Array, ""], like: PyTree) -> TreeState:
        return TreeState(key, jnp.int32(0), jnp.float32(0), Layout(like))

    def step(state: TreeState, *, stddev) -> tuple[TreeState, PyTree]:
        place, stddev, old, new = _begin(segments, completion, state, stddev)
        like = state.layout.structs()
        level = _lowest_bit(new)
        noise = draw(_node_key(state.key, place.segment, level, new >> level), like)

        def take_away(carry):
            left, noise = carry
            level = _lowest_bit(left)
            node = draw(_node_key(state.key, place.segment, level, old >> level), like)
            return left & (left - 1), jax.tree.map(jnp.subtract, noise, node)

        _, noise = lax.while_loop(lambda carry: carry[0] != 0, take_away, (old & ~new, noise))
        return TreeState(state.key, state.step + 1, stddev, state.layout), scale(noise, stddev)

    def matrix(num_rounds: int) -> np.ndarray:
        pairs = zip(segments.lengths(num_rounds), segments.completes(num_rounds))
        return block_diagonal([_tree_matrix(n, completion and ends) for n, ends in pairs])

    return NoiseMechanism(init, step, lambda state: segments.starts(state.step), matrix)


class ReducedTreeState(NamedTuple):
    """key: secret. step, stddev: as in `TreeState`.

    buffers: estimates of the finished nodes that the next rounds build on, one a level in front of each
      leaf's axes, in units of `stddev`.
    """

    key: Key[Array, ""]
    step: Int[Array, ""]
    stddev: Float[Array, ""]
    buffers: PyTree[Float[Array, "levels ..."]]
    layout: Layout


def tree_reduced(
    num_rounds: int,
    restarts: Sequence[int] = (),
    completion: bool = False,
    *,
    draw: Draw = sampling.fused_normal_like,
) -> NoiseMechanism:
    """The tree with Honaker's estimates: tending to half the variance of `tree`, for one model copy a level.

    A finished node's estimate combines its own noise with its two children's estimates by inverse variance;
    at level l its variance is 2^l / (2^(l + 1) - 1) of a node's (Honaker 2015, "Efficient use of
    differentially private binary trees", estimation from below). The same nodes are released as by `tree`,
    so the sensitivity is the same.

    Args:
      num_rounds: the longest run that the state has room for; the buffers follow the longest tree in it.
        Noise beyond is refused by `matrix` and silently wrong in `step` (a traced counter cannot be checked).
      restarts, completion, draw: as in `tree`.

    Raises:
      ValueError: `num_rounds` below 1.
    """
    if num_rounds < 1:
        raise ValueError(f"num_rounds must be at least 1, got {num_rounds=}")
    segments = Restarts(restarts)
    longest = max(segments.lengths(num_rounds))
    num_levels = longest.bit_length()  # a completed root above them is read by nobody, and dropped

    def init(key: Key[Array, ""], like: PyTree) -> ReducedTreeState:
        layout = Layout(like)
        return ReducedTreeState(key, jnp.int32(0), jnp.float32(0), layout.zeros(num_levels), layout)

    def step(state: ReducedTreeState, *, stddev) -> tuple[ReducedTreeState, PyTree]:
        place, stddev, old, new = _begin(segments, completion, state, stddev)
        like = state.layout.structs()
        top = _lowest_bit(new)
        leaf = draw(_node_key(state.key, place.segment, jnp.int32(0), old + 1), like)
        zeros = state.layout.zeros()

        def climb(carry):
            """From the estimate of a node at `level` to its parent's; a left sibling waits in the buffers."""
            level, variance, estimate, taken = carry
            has_sibling = (old >> level) & 1
            below = variance + has_sibling * _variance(level)
            own = below / (1 + below)  # inverse variance: the node's own noise has variance 1
            node = draw(_node_key(state.key, place.segment, level + 1, (old >> (level + 1)) + 1), like)
            sibling = jax.tree.map(lambda b: has_sibling * b[level], state.buffers)
            below_sum = jax.tree.map(jnp.add, estimate, sibling)
            # One product a sum, so that fusing them (or not) cannot round differently in another layout.
            estimate = jax.tree.map(lambda n, b: b + own * (n - b), node, below_sum)
            return level + 1, own, estimate, jax.tree.map(jnp.add, taken, sibling)

        _, _, estimate, taken = lax.while_loop(
            lambda carry: carry[0] < top, climb, (jnp.int32(0), jnp.float32(1), leaf, zeros)
        )
        buffers = jax.tree.map(lambda b, e: b.at[top].set(e, mode="drop"), state.buffers, estimate)
        noise = jax.tree.map(lambda e, taken: stddev * (e - taken), estimate, taken)
        return ReducedTreeState(state.key, state.step + 1, stddev, buffers, state.layout), noise

    def matrix(rounds: int) -> np.ndarray:
        if rounds > num_rounds:
            raise ValueError(
                f"this mechanism was made for {num_rounds} rounds, got {rounds}; raise num_rounds"
            )
        pairs = zip(segments.lengths(rounds), segments.completes(rounds))
        return block_diagonal([_reduced_matrix(n, completion and ends) for n, ends in pairs])

    return NoiseMechanism(init, step, lambda state: segments.starts(state.step), matrix)


def _node_key(key, tree_number, level, index):
    """The key of node `index` (from 1) of a level: by counters, so that it can be made again."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, tree_number), level), index)


def _lowest_bit(x):
    return lax.population_count((x & -x) - 1)


def _round_up(x):
    """The least power of two that is at least x >= 1."""
    return jnp.int32(1) << (32 - lax.clz(x - 1))


def _variance(level):
    """Of a finished node's estimate, 2^l / (2^(l + 1) - 1)."""
    return 1 / (2 - jnp.exp2(-jnp.float32(level)))


def _nodes(num_rounds, completion):
    """All nodes `(level, index from 1)` whose noise enters a tree of `num_rounds`."""
    levels = (num_rounds - 1).bit_length() if completion else num_rounds.bit_length() - 1
    count = 1 << levels if completion else num_rounds
    return [(level, i) for level in range(levels + 1) for i in range(1, (count >> level) + 1)]


def _decomposition(t, num_rounds, completion):
    """The nodes whose union is the first t rounds; on completion, the virtual ones after the last too."""
    if completion and t == num_rounds:
        t = 1 << (num_rounds - 1).bit_length()
    return [(level, t >> level) for level in range(t.bit_length()) if t >> level & 1]


def _tree_matrix(num_rounds, completion):
    column = {node: i for i, node in enumerate(_nodes(num_rounds, completion))}
    prefix = np.zeros((num_rounds + 1, len(column)))
    for t in range(1, num_rounds + 1):
        for node in _decomposition(t, num_rounds, completion):
            prefix[t, column[node]] = 1
    return np.diff(prefix, axis=0)


def _reduced_matrix(num_rounds, completion):
    nodes = _nodes(num_rounds, completion)
    column = {node: i for i, node in enumerate(nodes)}
    estimates = {}
    for level, index in nodes:  # level by level from the leaves
        own = np.zeros(len(nodes))
        own[column[level, index]] = 1
        if index - 1 << level >= num_rounds:
            continue  # all its leaves are virtual: nothing is released
        children = [c for c in ((level - 1, 2 * index - 1), (level - 1, 2 * index)) if c in estimates]
        if level and children:
            below = sum(estimates[c][0] for c in children)
            total = sum(estimates[c][1] for c in children)
            estimates[level, index] = below / (1 + below), (below * own + total) / (1 + below)
        else:
            estimates[level, index] = 1.0, own
    prefix = np.zeros((num_rounds + 1, len(nodes)))
    for t in range(1, num_rounds + 1):
        prefix[t] = sum(estimates[node][1] for node in _decomposition(t, num_rounds, completion))
    return np.diff(prefix, axis=0)
