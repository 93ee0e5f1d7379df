"""Slow twins of the vector mechanisms' deterministic parts, in float64."""

import numpy as np


def nearest(points, vocabulary):
    return np.array([np.argmin([np.linalg.norm(p - v) for v in vocabulary]) for p in points])


def truncated_mean(sentences, low, high):
    return np.mean([np.minimum(np.maximum(s, low), high) for s in sentences], axis=0)


def clipped_mean(sentences, axes, max_norm):
    total = np.zeros(len(axes))
    for s in sentences:
        x = axes @ s
        total += x * min(1.0, max_norm / np.linalg.norm(x)) if np.linalg.norm(x) > 0 else 0 * x
    return total / len(sentences)
