"""Slow, obvious nearest-neighbour translation in float64: reads like the papers."""

import numpy as np


def search(keys, values, queries, k):
    """Lists of (squared distance, value, row) for every query, by (distance, row)."""
    found = []
    for query in np.asarray(queries, np.float64):
        distances = [float(((key - query) ** 2).sum()) for key in np.asarray(keys, np.float64)]
        order = sorted(range(len(distances)), key=lambda i: (distances[i], i))[:k]
        found.append([(distances[i], int(values[i]), i) for i in order])
    return found


def knn_probs(neighbours, vocab_size, temperature):
    """p_kNN for one list of (distance, value, row); all zero without neighbours."""
    probs = np.zeros(vocab_size)
    if not neighbours:
        return probs
    nearest = min(d for d, _, _ in neighbours)
    for distance, value, _ in neighbours:
        probs[value] += np.exp(-(distance - nearest) / temperature)
    return probs / probs.sum()


def adaptive_probs(nmt, neighbours, choice, sizes, temperature):
    """p(0) p_NMT + sum over k of p(k) p_kNN_k; p_NMT without neighbours."""
    if not neighbours:
        return np.asarray(nmt, np.float64)
    total = choice[0] * np.asarray(nmt, np.float64)
    for weight, size in zip(choice[1:], sizes[1:]):
        total = total + weight * knn_probs(neighbours[:size], len(nmt), temperature)
    return total


def distinct_counts(values):
    return [len(set(values[: i + 1])) for i in range(len(values))]


def pq_encode(centroids, vectors):
    """Index of the nearest centroid, subspace by subspace."""
    centroids, vectors = np.asarray(centroids, np.float64), np.asarray(vectors, np.float64)
    parts = vectors.reshape(len(vectors), len(centroids), -1)
    return np.array(
        [
            [int(((table - part) ** 2).sum(-1).argmin()) for table, part in zip(centroids, row)]
            for row in parts
        ]
    )


def pq_decode(centroids, codes):
    return np.array([np.concatenate([table[c] for table, c in zip(centroids, row)]) for row in codes])


def lloyd(points, centroids, iterations):
    """Plain k-means; an empty cluster keeps its centroid."""
    points, centroids = np.asarray(points, np.float64), np.array(centroids, np.float64)
    for _ in range(iterations):
        index = ((points[:, None] - centroids[None]) ** 2).sum(-1).argmin(1)
        for c in range(len(centroids)):
            if (index == c).any():
                centroids[c] = points[index == c].mean(0)
    return centroids, ((points[:, None] - centroids[None]) ** 2).sum(-1).min(1).mean()
