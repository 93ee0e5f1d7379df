"""What every noise mechanism shares: the interface, the shapes, the segments between restarts."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxpriv import sampling
from jaxpriv._words import once

Draw = Callable[[Key[Array, ""], PyTree], PyTree[Float[Array, "..."]]]


class NoiseMechanism(NamedTuple):
    """Correlated noise for the sums of successive rounds, so that their running sum is a private prefix sum.

    init: `(key, like) -> state`; `like` gives the shapes (arrays or `jax.ShapeDtypeStruct`s); `key` is
      secret.
    step: `(state, *, stddev) -> (state, noise)`; `noise`, in float32, is ADDED TO THE SUM of this round's
      clipped updates. `stddev` is that of one underlying independent Gaussian, noise multiplier times clip
      norm; it is read in the first round of a segment (a tree, or the whole run without restarts) and
      latched, later values are ignored.
    starts_segment: `state -> bool array`, True if the next `step` latches its `stddev` (and its caller a
      clip norm).
    matrix: `num_rounds -> N` with the rounds' noises `N w`, `w` the independent Gaussians; float64, on the
      host.

    `step` is a `lax.scan` body but for its keyword. A state's leaves are arrays and typed keys; it must be
    kept as secret as the key.
    """

    init: Callable[..., Any]
    step: Callable[..., tuple[Any, PyTree[Float[Array, "..."]]]]
    starts_segment: Callable[[Any], Bool[Array, ""]]
    matrix: Callable[[int], Float[np.ndarray, "rounds gaussians"]]


@jax.tree_util.register_static
class Layout:
    """The shapes of a pytree, as part of a state's structure: no leaf, no memory."""

    def __init__(self, like: PyTree):
        leaves, self.treedef = jax.tree.flatten(like)
        self.shapes = tuple(tuple(leaf.shape) for leaf in leaves)

    def structs(self) -> PyTree:
        """Float32 `jax.ShapeDtypeStruct`s in these shapes."""
        return self.treedef.unflatten([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes])

    def zeros(self, *leading: int) -> PyTree[Float[Array, "..."]]:
        """Float32 zeros in these shapes, behind `leading` axes."""
        return self.treedef.unflatten([jnp.zeros((*leading, *shape), jnp.float32) for shape in self.shapes])

    def __eq__(self, other):
        return isinstance(other, Layout) and (self.treedef, self.shapes) == (other.treedef, other.shapes)

    def __hash__(self):
        return hash((self.treedef, self.shapes))


class Place(NamedTuple):
    """Where a round stands among its segments."""

    segment: Int[Array, ""]  # number of restarts so far
    before: Int[Array, ""]  # rounds of this segment before this one
    is_last: Bool[Array, ""]  # a restart follows


class Restarts:
    """A strictly increasing list of round counts; a new segment starts after each."""

    def __init__(self, restarts: Sequence[int]):
        self.rounds = tuple(int(r) for r in restarts)
        increasing = all(a < b for a, b in zip((0, *self.rounds), self.rounds))
        if not increasing or any(r != given for r, given in zip(self.rounds, restarts)):
            raise ValueError(
                f"restarts must be a strictly increasing list of positive round counts, got {list(restarts)}"
            )

    def place(self, step: Int[Array, ""]) -> Place:
        """Where round `step` (from 0) stands."""
        if not self.rounds:
            return Place(jnp.int32(0), step, jnp.bool_(False))
        bounds = jnp.asarray(self.rounds, jnp.int32)
        segment = (bounds <= step).sum().astype(jnp.int32)
        start = jnp.where(segment == 0, 0, bounds[jnp.maximum(segment - 1, 0)])
        return Place(segment, step - start, (bounds == step + 1).any())

    def starts(self, step: Int[Array, ""]) -> Bool[Array, ""]:
        """Whether round `step` is the first of a segment."""
        return self.place(step).before == 0

    def lengths(self, num_rounds: int) -> list[int]:
        """Rounds of each segment of a run of `num_rounds`."""
        bounds = [0, *(r for r in self.rounds if r < num_rounds), num_rounds]
        return [b - a for a, b in itertools.pairwise(bounds)]

    def completes(self, num_rounds: int) -> list[bool]:
        """Whether each segment of such a run ends in a restart; the last one only if one is due then."""
        return [True] * (len(self.lengths(num_rounds)) - 1) + [num_rounds in self.rounds]


def block_diagonal(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """The matrix with `blocks` along its diagonal."""
    out = np.zeros((sum(b.shape[0] for b in blocks), sum(b.shape[1] for b in blocks)))
    row = column = 0
    for block in blocks:
        out[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return out


def scale(noise: PyTree, stddev: Float[Array, ""]) -> PyTree:
    """`noise` times `stddev`."""
    return jax.tree.map(lambda leaf: stddev * leaf, noise)


def independent(*, draw: Draw = sampling.fused_normal_like) -> NoiseMechanism:
    """Fresh noise every round: DP-FedAvg without amplification; `stddev` counts in every round.

    Args:
      draw: `(key, like) -> standard normals`; tests put known numbers in its place.
    """

    def init(key: Key[Array, ""], like: PyTree) -> IndependentState:
        return IndependentState(key, jnp.int32(0), Layout(like))

    def step(state: IndependentState, *, stddev) -> tuple[IndependentState, PyTree]:
        key, stddev = jax.random.fold_in(state.key, state.step), jnp.float32(stddev)
        noise = once(state.step, lambda: scale(draw(key, state.layout.structs()), stddev))
        return state._replace(step=state.step + 1), noise

    return NoiseMechanism(init, step, lambda state: jnp.bool_(True), lambda num_rounds: np.eye(num_rounds))


class IndependentState(NamedTuple):
    """key: secret. step: rounds so far."""

    key: Key[Array, ""]
    step: Int[Array, ""]
    layout: Layout
