"""The encoding's arithmetic done slowly: a dense Hadamard matrix, Python integers."""

import numpy as np
from scipy import linalg


def rotate(vector: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Signs, then the orthonormal Hadamard matrix, in float64."""
    size = len(signs)
    padded = np.zeros(size)
    padded[: len(vector)] = vector
    return linalg.hadamard(size) @ (signs * padded) / np.sqrt(size)


def exact_norm(integers: np.ndarray) -> float:
    """L2 norm of integers, squared and summed without rounding."""
    return float(sum(int(v) ** 2 for v in integers)) ** 0.5
