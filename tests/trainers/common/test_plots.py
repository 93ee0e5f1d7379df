"""Pictures are drawn whatever a run came to."""

import numpy as np
import pytest

from trainers.common import plots


@pytest.mark.parametrize("log_y", [False, True])
def test_values_that_cannot_be_drawn_leave_a_gap(tmp_path, log_y):
    made, (axis,) = plots.figure()
    y = [3.0, None, float("inf"), 1e300, float("nan"), 2.0]
    plots.curves(axis, {"a": (range(6), y)}, xlabel="round", ylabel="perplexity", log_y=log_y)
    drawn = axis.lines[0].get_ydata()
    np.testing.assert_array_equal(np.isnan(drawn), [False, True, True, True, True, False])
    plots.save(made, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
