"""Slow twins of depth and selection that read like the paper's algorithm, in float64."""

import itertools
import math

import numpy as np


def depth(sentences, candidates, directions, *, closed=False):
    """Algorithm 1 by loops: the least one-dimensional depth over the directions."""
    k = len(sentences)
    result = []
    for f in candidates:
        least = k
        for v in directions:
            above = sum(1 for s in sentences if s @ v > f @ v)
            at_or_above = sum(1 for s in sentences if s @ v >= f @ v)
            least = min(least, at_or_above if closed else above, k - above)
        result.append(least)
    return np.array(result)


def exponential_law(utilities, epsilon, sensitivity):
    """P[i] proportional to exp(epsilon u_i / (2 sensitivity))."""
    weights = [math.exp(epsilon * (u - max(utilities)) / (2 * sensitivity)) for u in utilities]
    return np.array(weights) / sum(weights)


def permute_and_flip_law(utilities, epsilon, sensitivity):
    """Every order of visiting, every candidate accepted with probability q: for a handful of candidates."""
    q = [math.exp(epsilon * (u - max(utilities)) / (2 * sensitivity)) for u in utilities]
    law = np.zeros(len(q))
    orders = list(itertools.permutations(range(len(q))))
    for order in orders:
        reached = 1.0
        for i in order:
            law[i] += reached * q[i] / len(orders)
            reached *= 1 - q[i]
    return law
