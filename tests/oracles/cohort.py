"""A cohort's sums, one client after the other in float64."""

import numpy as np


def clipped_sum(updates, num_examples, *, max_norm, estimate):
    """(sum of clipped updates, sum of centred bits, number empty, number non-finite) of flat update vectors."""
    total, bits, empty, bad = np.zeros(len(updates[0])), 0.0, 0, 0
    for update, n in zip(np.asarray(updates, np.float64), num_examples, strict=True):
        if n == 0:
            empty, bits = empty + 1, bits - 0.5
        elif not np.isfinite(update).all():
            bad, bits = bad + 1, bits - 0.5
        else:
            norm = np.sqrt((update**2).sum())
            total += update * min(1.0, max_norm / max(norm, 1e-300))
            bits += 0.5 if norm <= estimate else -0.5
    return total, bits, empty, bad
