"""Runs drawn beside each other: one line a mechanism over rho, whatever order they come in."""

import numpy as np
import pytest

from trainers.common import plots
from trainers.keyboard import pictures


def fake(mechanism, z, rho, top1, rounds=300):
    row = {"round": rounds - 1, "evaluation": {"top1_words": top1}, "rho": rho}
    config = {"mechanism": mechanism, "noise_multiplier": z, "report_goal": 100, "rounds": rounds}
    return {"rows": [row], "config": config}


@pytest.fixture
def drawn(monkeypatch):
    made = []
    monkeypatch.setattr(plots, "save", lambda figure, path: made.append(figure))
    return made


def lines(axis):
    return {line.get_label(): line.get_xydata() for line in axis.get_lines()}


def test_accuracy_over_rho_has_a_line_a_mechanism(drawn, tmp_path):
    runs = {
        "b": fake("blt", 0.7, 10.0, 15.0),
        "a": fake("blt", 2.1, 1.0, 8.0),
        "t": fake("tree", 3.6, 1.0, 3.0),
        "n": fake("none", 0.1, None, 16.0),
    }
    pictures.compare(runs, tmp_path / "x.png", ngram={"top1_words": 19.0})
    by_round, over_noise, over_rho = drawn[0].get_axes()
    assert set(runs) <= set(lines(by_round))
    assert set(lines(over_rho)) == {"blt", "tree", "no noise, 300 rounds", "5-gram, test clients"}
    np.testing.assert_allclose(lines(over_rho)["blt"], [[1.0, 8.0], [10.0, 15.0]])
    np.testing.assert_allclose(lines(over_noise)["blt"], [[0.007, 15.0], [0.021, 8.0]])
    np.testing.assert_allclose(lines(over_rho)["no noise, 300 rounds"][:, 1], 16.0)


def test_the_ngram_line_is_of_the_clients_that_the_curves_are_of(drawn, tmp_path):
    runs = {"r": fake("tree", 1.0, 1.0, 5.0), "b": fake("blt", 1.0, 0.5, 5.0)}
    ngram = {"top1_words": 19.0, "during_training": {"top1_words": 17.5}}
    pictures.compare(runs, tmp_path / "x.png", ngram=ngram)
    by_round = lines(drawn[0].get_axes()[0])
    assert "5-gram, test clients" not in by_round
    np.testing.assert_array_equal(by_round["5-gram, same clients"][:, 1], 17.5)


def test_one_mechanism_at_two_lengths_has_a_line_a_length(drawn, tmp_path):
    runs = {f"r{n}": fake("tree", n / 100, n / 50, 5.0, rounds=n) for n in (100, 200)}
    pictures.compare(runs, tmp_path / "x.png", ngram=None)
    assert set(lines(drawn[0].get_axes()[-1])) == {"100 rounds", "200 rounds"}


def test_too_many_runs_are_not_drawn_by_round(drawn, tmp_path):
    runs = {f"r{i}": fake("tree", 1.0 + i, 2.0, 5.0) for i in range(pictures.MOST_CURVES + 1)}
    pictures.compare(runs, tmp_path / "x.png", ngram=None)
    assert len(drawn[0].get_axes()) == 2
