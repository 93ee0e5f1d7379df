"""Small random clients for the tests of the keyboard trainer."""

import numpy as np

WORDS = 20
WIDTH = 8  # begin, up to 6 words, end


def sentence(rng, length=None):
    """begin, words (some out of vocabulary), end if there is room, zeros."""
    length = int(rng.integers(0, 7)) if length is None else length
    row = np.zeros(WIDTH, np.int32)
    row[0] = WORDS + 2
    row[1 : 1 + length] = rng.integers(1, WORDS + 2, length)
    if length < 6:
        row[1 + length] = WORDS + 3
    return row


def clients(seed=0, sizes=(5, 1, 0, 9, 4, 2)):
    rng = np.random.default_rng(seed)
    return [np.array([sentence(rng) for _ in range(n)], np.int32).reshape(n, WIDTH) for n in sizes]
