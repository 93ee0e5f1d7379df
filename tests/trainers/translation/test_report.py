"""The table of a comparison: what several trials and several calls come to."""

from trainers.cli import main
from trainers.translation import report


def record(method, trial, **bleu):
    cost = {"bytes_up": 0, "bytes_down": 0, "seconds": 1.0, "flops": 0.0, "tokens_per_second": 1.0}
    return {"setting": "non_iid", "method": method, "trial": trial, "bleu": bleu, "chrf": bleu, **cost}


def test_means_and_spreads_are_over_trials():
    """Values worked out by hand: (10 + 12 + 17) / 3 = 13, deviations -3, -1, 4, variance 26 / 2."""
    records = [record("ft", t, law=v) for t, v in enumerate((10.0, 12.0, 17.0))] + [
        record("p_nmt", 0, general=20.0, law=1.0)
    ]
    lines = report.table(records, "non_iid", "signature").splitlines()
    ft, p_nmt = (next(line for line in lines if line.startswith(f"| {n}")) for n in ("FT", "P-NMT"))
    assert "| 3 | 13.00 ± 3.61 (13.0) |" in ft
    assert "| 1 | 1.00 (1.0) | 20.00 (20.0) |" in p_nmt


def test_the_accountant_says_none_of_a_run(small_run, capsys):
    assert main(["account", "report", str(small_run)]) == 0
    said = capsys.readouterr().out
    reason = report.GUARANTEE["p_nmt"].removeprefix("epsilon: none (").removesuffix(")")
    assert f"(epsilon: none): p_nmt: {reason}." in said


def test_a_setting_that_was_not_run_has_no_table():
    assert report.table([record("ft", 0, law=1.0)], "iid", "signature") == ""


def test_scores_of_hardly_trained_models_are_said_to_mean_nothing():
    words = "the scores mean nothing"
    few, some = [record("p_nmt", 0, general=0.0, law=1.9)], [record("ft", 0, law=2.0)]
    assert words in report.table(few, "non_iid", "signature")
    assert words not in report.table(few + some, "non_iid", "signature")
