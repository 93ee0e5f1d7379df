"""Baselines by exchange of models: federated averaging (McMahan et al. 2017), local fine-tuning, its
ensemble.

No noise and no clipping: these stand for the comparison of the paper, and their guarantee is "epsilon: none".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import cohort
from trainers.translation.batches import Example

Params = Any


class Client(NamedTuple):
    """Who takes part. weight: number of pairs, the client's weight in an average."""

    name: str
    examples: Sequence[Example]
    weight: int


@jax.jit
def _weighted_sum(params: Params, members: cohort.Cohort) -> Params:
    def message(base, local, key):
        del key
        return jax.tree.map(jnp.subtract, local, base), {}

    out, _ = cohort.clipped_sum(message, params, members, None, max_norm=None, weigh_by_examples=True)
    return out.update


def average(models: Sequence[Params], weights: Sequence[int]) -> Params:
    """The mean of models weighted by their owners' numbers of pairs, as a cohort's sum over the public total.

    Raises:
      ValueError: nobody has a pair, so that there is nothing to average.
    """
    if len(models) != len(weights):
        raise ValueError(f"{len(models)} models but {len(weights)} weights: give one weight a model")
    total = sum(weights)
    if total <= 0:
        raise ValueError(f"all of {len(weights)} clients have no pairs: nothing to average")
    stacked = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *models)
    # The first model with pairs is the base, so that a client without any cannot shift the sum's digits.
    base = models[next(i for i, w in enumerate(weights) if w > 0)]
    members = cohort.arrange(range(len(models)), weights, stacked, chunk_size=1)
    summed = _weighted_sum(jax.tree.map(jnp.asarray, base), members)
    return jax.tree.map(lambda b, s: b + s / total, jax.tree.map(jnp.asarray, base), summed)


def stack(models: Sequence[Params]) -> Params:
    """Models with a leading models axis, as `decode.ensemble` takes them."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
