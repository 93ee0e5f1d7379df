"""The noisy histogram and its filter, written as loops over sentences."""

import itertools
from collections import Counter


def histogram(sentences, choose, max_buckets):
    """sentences: lists of buckets. choose: orders a set of buckets. Each sentence counts once a bucket."""
    counts = Counter()
    for buckets in sentences:
        for bucket in choose(sorted(set(buckets)))[:max_buckets]:
            counts[bucket] += 1
    return counts


def squared_distance(one, other):
    return sum((one[b] - other[b]) ** 2 for b in set(one) | set(other))


def all_sentences(buckets, longest):
    """Every set of buckets up to a size: all that a sentence can be for the histogram."""
    for size in range(longest + 1):
        yield from itertools.combinations(buckets, size)
