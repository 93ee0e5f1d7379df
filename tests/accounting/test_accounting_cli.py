"""`jaxpriv account`: every command, JSON as the last line, pictures, one line and status 2 for bad input."""

import json
import math
import os
import re
import subprocess
import sys

import pytest

import accounting
from accounting import cli, record
from tests.accounting_runs import facts, schedule, write

SPANISH = ["--rounds", "2000", "--rounds-between", "313", "--max-participations", "6"]
WHERE = ["--adjacency", "zero-out", "--delta", "1e-10"]
KEYS = {"rho", "epsilon", "delta", "squared_sensitivity", "adjacency", "statement"}


@pytest.fixture
def call(capsys):
    def run(*argv):
        code = cli.main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def answer(call):
    def run(*argv):
        code, out, err = call(*argv, "--json")
        assert code == 0, err
        result = json.loads(out.splitlines()[-1], parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
        assert len(out.splitlines()) == 1
        assert set(result) >= KEYS
        return result

    return run


def test_tree(answer, tmp_path):
    picture = tmp_path / "tree.png"
    found = answer("tree", "--noise-multiplier", 7, *SPANISH, *WHERE, "--plot", picture)
    assert found["squared_sensitivity"] == 79
    assert found["rho"] == pytest.approx(79 / 98, rel=1e-12)
    assert found["epsilon"] == pytest.approx(8.526093443391, rel=1e-9)
    assert found["statement"]["sentence"].startswith("Each device has (8.5261, 1e-10)-differential privacy")
    assert picture.read_bytes().startswith(b"\x89PNG")
    more = answer(
        "tree", "--noise-multiplier", 7, *SPANISH, *WHERE, "--restarts", 128, 1152, "--count-stddev", 325,
        "--group-size", 2, "--method", "cks", "--completion",
    )  # fmt: skip
    assert more["statement"]["mechanisms"][0]["restarts"] == [128, 1152]
    assert more["group"]["rho"] == pytest.approx(4 * more["rho"])
    assert more["method"] == "cks"
    assert answer("tree", "--noise-multiplier", 0, *SPANISH, *WHERE)["epsilon"] == "inf"
    assert answer("tree", "--noise-multiplier", "inf", *SPANISH, *WHERE)["epsilon"] == 0


def test_matrix(answer, tmp_path):
    for name in ("independent", "banded_square_root", "square_root", "blt_closed_form", "prefix"):
        found = answer("matrix", "--noise-multiplier", 7, *SPANISH, *WHERE, "--strategy", name)
        assert found["rho"] > 0
        assert found["max_error"] >= found["rms_error"] > 0
    small = ["--rounds", "30", "--min-separation", "6", *WHERE, "--noise-multiplier", "2"]
    for name in ("blt", "bandmf", "banded_inverse_square_root"):
        assert answer("matrix", *small, "--strategy", name)["squared_sensitivity"] > 0
    path = tmp_path / "mine.json"
    for data in (
        {"coefficients": [1.0, 0.5], "name": "mine"},
        {"theta": [0.9], "omega": [0.3]},
        {"matrix": [[1.0 if i >= j else 0.0 for j in range(30)] for i in range(30)]},
    ):
        path.write_text(json.dumps(data))
        assert answer("matrix", *small, "--strategy", path)["squared_sensitivity"] > 0
    for restarts in ((10,), (10, 11)):
        assert answer("matrix", *small, "--strategy", "bandmf", "--restarts", *restarts)["rho"] > 0


def test_convert(answer, call):
    exact = answer("convert", "--rho", 1.86, "--delta", 1e-10, "--known", "gaussian", "--peers")
    assert exact["epsilon"] == pytest.approx(13.688307591, rel=1e-9)
    assert exact["peers"]["pld"] == pytest.approx(13.69, abs=0.01)
    bare = answer("convert", "--rho", 1.86, "--delta", 1e-10, "--known", "zcdp", "--adjacency", "zero-out")
    assert bare["epsilon"] > exact["epsilon"]
    assert bare["adjacency"] == "zero-out"
    pure = answer("convert", "--pure-epsilon", 2, "--delta", 1e-5, "--known", "zcdp", "--bounded-range")
    assert (pure["rho"], pure["epsilon"]) == (0.5, 2)
    assert answer("convert", "--rho", 0.5, "--delta", 0, "--known", "gaussian")["epsilon"] == "inf"
    code, out, _ = call("convert", "--rho", 0.25, "--delta", 1e-10, "--known", "gaussian")
    assert code == 0
    assert "4.4923" in out
    code, _, err = call("convert", "--rho", 0.25, "--delta", 1e-10, "--known", "zcdp", "--peers")
    assert code == 2
    assert "--known gaussian" in err


def test_calibrate(answer):
    found = answer("calibrate", "--epsilon", 8, *SPANISH, *WHERE)
    assert found["value"] == pytest.approx(7.41266, abs=1e-4)
    assert found["epsilon"] <= 8
    rest = ["--noise-multiplier", 7, "--epsilon", 8, *WHERE]
    rounds = answer(
        "calibrate", "--knob", "num_rounds", "--rounds-between", 313, "--max-participations", 6, *rest
    )
    assert rounds["value"] == 1570
    assert answer("calibrate", "--knob", "min_separation", "--rounds", 2000, *rest)["value"] == 384
    blt = answer(
        "calibrate", "--rho", 0.5, "--strategy", "blt", "--rounds", 40, "--min-separation", 8, *WHERE
    )
    assert blt["rho"] == pytest.approx(0.5)


def test_plan(answer, tmp_path):
    picture = tmp_path / "plan.svg"
    found = answer(
        "plan", "--population", 5000, "--report-goal", 50, 100, "--rounds", 100, "--epsilon", 8, *WHERE,
        "--noise-multiplier", 7, "--mechanism", "tree", "BLT", "--plot", picture,
    )  # fmt: skip
    assert len(found["options"]) == 8
    assert found["epsilon"] <= 8
    assert b"<svg" in picture.read_bytes()


def test_compare(answer, tmp_path):
    picture = tmp_path / "compare.pdf"
    mine = tmp_path / "mine.json"
    mine.write_text('{"coefficients": [1.0, 0.3]}')
    found = answer(
        "compare", *SPANISH, *WHERE, "--noise-multiplier", 7, "--strategy", mine, "--closed-forms-only",
        "--plot", picture,
    )  # fmt: skip
    assert "mine.json" in {row["mechanism"] for row in found["mechanisms"]}
    assert found["squared_sensitivity"] == 79
    assert picture.read_bytes().startswith(b"%PDF")


def test_report(answer, call, tmp_path):
    write(tmp_path, facts(deployment={}))
    picture = tmp_path / "report.png"
    found = answer("report", tmp_path, "--plot", picture, "--population", 65000)
    assert found["rho"] == accounting.report(tmp_path).data["rho"]
    assert found["statement"]["deployment"]["population"] == 65000
    assert picture.exists()
    assert answer("report", tmp_path, "--observed")["rho"] <= found["rho"]
    code, _, err = call("report", tmp_path, "--min-separation", 9)
    assert code == 2
    assert "cannot state min_separation 9" in err
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", facts(noise_multiplier=4.0))
    both = answer("report", tmp_path, tmp_path / "other")
    assert both["rho"] == pytest.approx(found["rho"] * 1.25)
    assert both["squared_sensitivity"] is None
    log = record.ParticipationLog(tmp_path)
    log.append(12, schedule(11))
    log.close()
    code, out, err = call("report", tmp_path, "--json")
    assert (code, out) == (2, "")
    assert "--observed" in err
    none = facts(mechanism="none", noise_multiplier=0.0)
    assert answer("report", write(tmp_path, none))["epsilon"] is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tree", "--noise-multiplier", "nan", *SPANISH, *WHERE], "noise_multiplier must be"),
        (["tree", "--noise-multiplier", "-1", *SPANISH, *WHERE], "noise_multiplier must be"),
        (["tree", "--noise-multiplier", "x", *SPANISH, *WHERE], "noise-multiplier"),
        (["tree", "--noise-multiplier", "7", *SPANISH, "--delta", "1e-10"], "adjacency"),
        (["tree", "--noise-multiplier", "7", *SPANISH, "--adjacency", "zero-out"], "delta"),
        (["tree", "--noise-multiplier", "7", *SPANISH, *WHERE, "--min-separation", "3"], "exactly one of"),
        (["tree", "--noise-multiplier", "7", "--rounds", "5", *WHERE], "exactly one of"),
        (["tree", "--noise-multiplier", "7", "--rounds", "5.5", *WHERE], "rounds"),
        (
            ["tree", "--noise-multiplier", "7", *SPANISH, *WHERE, "--restarts", "2000"],
            "restarts must be below",
        ),
        (
            ["tree", "--noise-multiplier", "7", "--rounds", "100000000000", "--min-separation", "9", *WHERE],
            "num_rounds must be at most 1,000,000,000",
        ),
        (["tree", "--noise-multiplier", "7", *SPANISH, *WHERE, "--plot", "x.gif"], "must end in one of"),
        (["tree", "--noise-multiplier", "7", *SPANISH, *WHERE, "--plot", "no/such/x.png"], "does not exist"),
        (["tree", "--noise-multiplier", "7", *SPANISH, *WHERE, "--count-stddev", "3"], "count_stddev"),
        (["tree", "--noise-multiplier", "7", *SPANISH, *WHERE, "--nosuch"], "nosuch"),
        (
            ["matrix", "--noise-multiplier", "7", *SPANISH, *WHERE, "--strategy", "nosuch"],
            "neither a file nor",
        ),
        (["matrix", "--noise-multiplier", "7", *SPANISH, *WHERE, "--strategy", "."], "directory"),
        (["convert", "--rho", "-1", "--delta", "1e-5", "--known", "zcdp"], "rho must be"),
        (["convert", "--rho", "1", "--delta", "1", "--known", "zcdp"], "delta must be below 1"),
        (["convert", "--rho", "1", "--delta", "1e-5"], "known"),
        (["convert", "--delta", "1e-5", "--known", "zcdp"], "exactly one of --rho and --pure-epsilon"),
        (["convert", "--pure-epsilon", "1", "--delta", "1e-5", "--known", "gaussian"], "not Gaussian"),
        (
            ["convert", "--rho", "1", "--delta", "1e-5", "--known", "zcdp", "--bounded-range"],
            "--pure-epsilon",
        ),
        (["calibrate", *SPANISH, *WHERE], "exactly one target"),
        (["calibrate", "--epsilon", "8", "--min-separation", "9", *WHERE], "needs --rounds of at least 1"),
        (
            ["calibrate", "--epsilon", "8", "--min-separation", "9", "--rounds", "0", *WHERE],
            "at least 1, got 0",
        ),
        (["calibrate", "--epsilon", "2", *SPANISH, *WHERE, "--method", "cks"], "leave --method out"),
        (["tree", "--noise-multiplier", "7", *SPANISH, *WHERE, "--group-size", "0"], "--group-size must be"),
        (["calibrate", "--epsilon", "2", *SPANISH, *WHERE, "--group-size", "-1"], "--group-size must be"),
        (
            ["plan", "--population", "10", "--report-goal", "--rounds", "9", "--epsilon", "8", *WHERE],
            "report",
        ),
        (
            [
                "plan",
                "--population",
                "10",
                "--report-goal",
                "5",
                "--rounds",
                "9",
                "--epsilon",
                "8",
                *WHERE,
                "--mechanism",
            ],
            "mechanism",
        ),
        (["calibrate", "--knob", "num_rounds", "--epsilon", "8", "--min-separation", "9", *WHERE], "noise"),
        (
            ["plan", "--population", "10", "--report-goal", "50", "--rounds", "9", "--epsilon", "8", *WHERE],
            "population",
        ),
        (
            ["compare", "--rounds", "0", "--min-separation", "1", "--noise-multiplier", "7", *WHERE],
            "num_rounds",
        ),
        (["report", "/no/such/folder"], "mechanism.json: no such file"),
        (["report"], "folder"),
        (["nosuch"], "unknown command 'nosuch'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(call, argv, message):
    code, out, err = call(*argv)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("jaxpriv account")
    assert message in err


@pytest.mark.parametrize("letters", ["utf-8", "ascii"])
def test_missing_and_unknown_options_are_listed_by_name(letters):
    """Also where a terminal has no lines to draw boxes with."""
    ran = subprocess.run(
        [sys.executable, "-m", "accounting", "tree", "--rounds", "5", "--roundz", "6"],
        env=os.environ | {"PYTHONIOENCODING": letters},
        capture_output=True,
        text=True,
        check=False,
    )
    missing = r"Missing from .*: --adjacency \S*, --delta FLOAT, --noise-multiplier FLOAT"
    assert re.fullmatch(
        rf"jaxpriv account tree: {missing}; Unrecognized options: .*--roundz.*; see --help\n", ran.stderr
    )
    assert "Which two" not in ran.stderr
    assert "---" not in ran.stderr


def test_a_mechanism_may_be_called_as_any_command_calls_it(answer, tmp_path, monkeypatch):
    small = ["--rounds", "30", "--min-separation", "6", *WHERE]
    noise = ["--noise-multiplier", "2"]
    for names in (
        ("bandmf", "banded", "BandMF"),
        ("blt", "BLT"),
        ("banded_square_root", "banded square root", "banded-square-root"),
        ("blt_closed_form", "BLT (closed form)"),
    ):
        found = [answer("matrix", *small, *noise, "--strategy", name) for name in names]
        found += [answer("matrix", *small, *noise, f"--strategy={names[-1]}")]
        assert len({one["max_error"] for one in found}) == 1
    goal = ["--epsilon", 8, *small]
    for names in (("tree", "Tree"), ("bandmf", "BandMF"), ("independent", "Independent")):
        assert len({answer("calibrate", *goal, "--strategy", name)["value"] for name in names}) == 1
    found = answer(
        "plan", "--population", 60, "--report-goal", 10, "--rounds", 30, "--epsilon", 8, *WHERE,
        "--mechanism", "banded", "banded_square_root", "blt", "--plot", tmp_path / "p.png",
    )  # fmt: skip
    assert {one["mechanism"] for one in found["options"]} == {"BandMF", "banded square root", "BLT"}
    monkeypatch.chdir(tmp_path)  # a file's name stays what it is
    (tmp_path / "BandMF").write_text('{"coefficients": [1.0]}')
    alone = answer("matrix", *small, *noise, "--strategy", "BandMF")
    assert (
        alone["squared_sensitivity"]
        == answer("matrix", *small, *noise, "--strategy", "independent")["squared_sensitivity"]
    )


def test_a_strategy_file_that_is_wrong_is_named(call, tmp_path):
    path = tmp_path / "bad.json"
    for text, message in (
        ("{", "not JSON"),
        ("[1]", "must hold"),
        ('{"theta": [0.5]}', "must hold"),
        ('{"coefficients": [0]}', "bad.json: coefficients must begin"),
        ('{"coefficients": [NaN]}', "bad.json: coefficients must be"),
        ('{"coefficients": [1, 1e308, 1e308]}', "overflows: scale it down"),
        ("[" * 100_000, "bad.json: not a strategy (nested too deeply)"),
        ('{"matrix": [[1.0]]}', "fewer than num_rounds"),
    ):
        path.write_text(text)
        code, _, err = call("matrix", "--noise-multiplier", 7, *SPANISH, *WHERE, "--strategy", path)
        assert code == 2
        assert len(err.splitlines()) == 1
        assert message in err


def test_a_log_line_nested_without_end_is_one_line(call, tmp_path):
    write(tmp_path, facts(), rounds=2)
    with (tmp_path / "participation.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    code, out, err = call("report", tmp_path)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "participation.jsonl, line 3" in err


def test_a_warning_is_one_clean_line(call):
    code, out, err = call("tree", "--noise-multiplier", 7, *SPANISH, *WHERE, "--count-stddev", 3.6)
    assert code == 0
    assert out
    assert len(err.splitlines()) == 1
    assert err.startswith("jaxpriv account tree: warning: count_stddev 3.6 is so close")


def test_too_little_memory_says_what_to_do(call, monkeypatch):
    def out_of_memory(*_, **__):
        raise MemoryError

    monkeypatch.setattr(accounting, "statement", out_of_memory)
    code, _, err = call("tree", "--noise-multiplier", 7, *SPANISH, *WHERE)
    assert code == 2
    assert "need more memory than there is" in err


def test_a_calibrated_separation_has_the_strategy_made_for_it(answer):
    """The same mechanism as when that separation is asked for, and one less would not do."""
    common = ("--rho", 1.0, "--rounds", 40, "--noise-multiplier", 2, *WHERE)
    for strategy in ("blt", "bandmf", "banded_square_root"):
        options = ("--strategy", strategy)
        found = answer("calibrate", "--knob", "min_separation", *common, *options)
        b = found["value"]
        assert 1 < b < 40
        assert any("made anew for every separation" in note for note in found["statement"]["notes"])
        rhos = [
            answer(
                "matrix", *options, "--rounds", 40, "--noise-multiplier", 2, "--min-separation", s, *WHERE
            )["rho"]
            for s in (b, b - 1)
        ]
        assert rhos[0] == pytest.approx(found["rho"])
        assert rhos[0] <= 1.0 < rhos[1]


def test_calibrated_rounds_keep_the_bands_and_the_restarts(answer):
    common = ["--min-separation", 8, "--noise-multiplier", 7, "--epsilon", 8, *WHERE]
    banded = ["--strategy", "banded_square_root"]
    found = answer("calibrate", "--knob", "num_rounds", *common, *banded)
    assert found["statement"]["mechanisms"][0]["bands"] == 8
    kept = answer("calibrate", "--knob", "num_rounds", *common, "--restarts", 5)
    assert kept["statement"]["mechanisms"][0]["restarts"] == [5]


def test_help_and_usage(call, capsys):
    code, out, _ = call()
    assert code == 0
    assert "report" in out
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "--help"])
        assert stop.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_the_command_runs_without_jax_matplotlib_or_dp_accounting():
    code = (
        "import sys; from accounting.cli import main;"
        f"assert main(['tree', '--noise-multiplier', '7', *{SPANISH + WHERE!r}]) == 0;"
        "print([m for m in ('jax', 'matplotlib', 'dp_accounting', 'trainers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"
    as_module = [
        sys.executable,
        "-m",
        "accounting",
        "convert",
        "--rho",
        "nan",
        "--delta",
        "0.1",
        "--known",
        "zcdp",
    ]
    out = subprocess.run(as_module, capture_output=True, text=True, check=False)
    assert out.returncode == 2
    assert "Traceback" not in out.stderr


def test_infinite_results_stay_json(answer):
    found = answer("convert", "--rho", "inf", "--delta", 1e-5, "--known", "zcdp")
    assert (found["rho"], found["epsilon"]) == ("inf", "inf")
    assert math.inf == float(found["epsilon"])
