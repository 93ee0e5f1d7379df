"""fit, release, evaluate from end to end on toy documents; bad input ends with one line and status 2."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.trainers.documents.conftest import AWKWARD, SMALL
from trainers import cli
from trainers.documents.config import METHODS

SAMPLERS = ("", "permute_and_flip", "exponential")


def run(capsys, *arguments):
    """Status, standard output's lines, standard error."""
    status = cli.main(["documents", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out.strip().splitlines(), err


@pytest.fixture
def letters(tmp_path):
    """Private documents: two real ones, an empty one, one of one sentence, one of emoji, a long one."""
    folder = tmp_path / "letters"
    folder.mkdir()
    texts = {
        "a.txt": "The ship was in the harbour. The captain and the storm. A wave for the deck. The tide.",
        "b.txt": "The judge was in the court. A verdict. The appeal for the witness.",
        "c_empty.txt": "",
        "d_one.txt": "Only one sentence here.",
        "e_emoji.txt": "😀😀! 🎉🎉!",
        "f_long.txt": "The oven was on. " * 10_000,
        "g_unknown.txt": "Пароход ушёл. Буря началась. 船は港を出た。嵐が来た。",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("method", ["bounded_sum", "deepcandidate", "low_rank"])
def test_release_writes_embeddings_statement_and_ledger(capsys, fitted, letters, tmp_path, method):
    output, ledger = tmp_path / "out.parquet", tmp_path / "ledger.json"
    arguments = ("release", "--run-dir", fitted, "--data", letters, "--method", method, "--ledger", ledger)
    status, lines, _ = run(capsys, *arguments, "--output", output, "--epsilon", 10, "--json")
    assert status == 0
    result = json.loads(lines[-1])
    assert result["guarantee"]["epsilon"] == 10
    assert result["guarantee"]["simulation"] is False
    assert (result["without_sentences"], result["one_sentence"]) == (1, 1)
    table = pq.read_table(output).to_pylist()
    assert [row["id"] for row in table] == sorted(p.name for p in letters.iterdir())
    assert [row["num_sentences"] for row in table][2:] == [0, 1, 2, 10_000, 4]
    assert all(np.isfinite(row["embedding"]).all() for row in table)
    by_variant = {}
    for row in table:
        by_variant[row["variant"]] = by_variant.get(row["variant"], 0) + 1
    assert by_variant == result["variants"]
    assert (tmp_path / "out.parquet.privacy.md").read_text().startswith("# Privacy statement")
    record = json.loads(ledger.read_text())
    for one in record.pop("documents"):  # digests, numbers and settings only
        assert all(re.fullmatch("[0-9a-f]{32}", name) for name in one["names"])
        assert all(
            row[:4] in ([10, method, sampler, False] for sampler in SAMPLERS) for row in one["releases"]
        )
        assert all(len(row) == 5 and re.fullmatch("[0-9a-f]{16}", row[4]) for row in one["releases"])
    assert record.keys() == {"salt"}
    assert ledger.stat().st_mode & 0o077 == 0

    assert result["chosen_at"] == 10
    statement = json.loads((tmp_path / "out.parquet.privacy.json").read_text())
    for path in (output, tmp_path / "out.parquet.privacy.json"):
        assert cli.main(["account", "report", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["statement"] == statement

    assert cli.main(["account", "report", str(fitted)]) == 2
    assert "is a fit on public documents" in capsys.readouterr().err

    again = tmp_path / "again.parquet"
    status, _, err = run(capsys, *arguments, "--output", again, "--epsilon", 5)
    assert status == 2
    assert "released before" in err
    assert not again.exists()
    status, lines, err = run(
        capsys, *arguments, "--output", again, "--epsilon", 5, "--allow-repeats", "--json"
    )
    assert status == 0
    assert json.loads(lines[-1])["guarantee"]["epsilon"] == 15
    assert json.loads(lines[-1])["chosen_at"] == 10
    assert "Epsilon 5 was not fitted" in err
    assert "chosen at 10" in err
    assert "7 documents by" in err


def test_a_release_of_the_awkward_files_has_a_row_for_each(capsys, fitted, tmp_path):
    """In order, each as when released alone; without a sentence, zeros and no candidate (AC40)."""
    (tmp_path / "in").mkdir()
    for name, text in AWKWARD.items():
        (tmp_path / "in" / name).write_text(text, encoding="utf-8", newline="")

    def released(source):
        output = tmp_path / f"{source.name}.parquet"
        status, lines, _ = run(
            capsys, "release", "--run-dir", fitted, "--data", source, "--method", "deepcandidate", "--epsilon", 10,
            "--output", output, "--ledger", tmp_path / f"{source.name}.json", "--insecure-noise-seed", 3, "--json",
        )  # fmt: skip
        assert status == 0
        return json.loads(lines[-1]), pq.read_table(output).to_pylist()

    result, table = released(tmp_path / "in")
    assert result["ids_without_sentences"] == ["doc_blank.txt", "doc_empty.txt"]
    assert (result["documents"], result["one_sentence"]) == (4, 1)
    assert [row["id"] for row in table] == sorted(AWKWARD)
    assert [row["num_sentences"] for row in table] == [0, 0, 1, 13]
    for row in table:
        assert np.isfinite(row["embedding"]).all()
        assert (
            np.any(row["embedding"]) == (row["nearest_candidate"] is not None) == (row["num_sentences"] > 0)
        )
    assert table[2]["embedding"] != table[3]["embedding"]
    for row in table[2:]:
        assert released(tmp_path / "in" / row["id"])[1] == [row]


@pytest.mark.parametrize(("epsilon", "words"), [("1e-300", "at least 1e-06"), ("0.01", "at least 0.0983")])
def test_an_epsilon_that_cannot_be_served_is_said_of_its_own_option(
    capsys, fitted, letters, tmp_path, epsilon, words
):
    """The second: 10,000 sentences have more score levels than a table holds; low_rank has no scores."""
    arguments = ("release", "--run-dir", fitted, "--data", letters, "--ledger", tmp_path / "l.json")
    arguments += ("--output", tmp_path / "o.parquet", "--epsilon", epsilon)
    status, _, err = run(capsys, *arguments, "--method", "bounded_sum")
    assert status == 2
    said = err.strip().splitlines()[-1]  # after a bar, which the second shows
    assert "--epsilon" in said
    assert words in said
    assert not (tmp_path / "l.json").exists()
    assert not (tmp_path / "o.parquet").exists()
    if epsilon == "0.01":
        assert "10000 sentences" in said
        assert run(capsys, *arguments, "--method", "low_rank")[0] == 0


def test_the_same_text_under_another_name_counts_as_released(capsys, fitted, tmp_path):
    text = "The ship was in the harbour. The captain."
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(text)
    shared = ("--run-dir", fitted, "--ledger", tmp_path / "ledger.json", "--epsilon", 10)
    status, _, _ = run(
        capsys, "release", *shared, "--data", tmp_path / "one.txt", "--output", tmp_path / "1.parquet"
    )
    assert status == 0
    status, _, err = run(
        capsys, "release", *shared, "--data", tmp_path / "two.txt", "--output", tmp_path / "2.parquet"
    )
    assert status == 2
    assert "two.txt" in err


def test_releases_differ_from_call_to_call(capsys, fitted, tmp_path):
    """Selection keys come from the system: equal documents, ids and budgets give different noise."""
    documents, rows = tmp_path / "x.jsonl", []
    documents.write_text("".join('{"text": "The ship was in the harbour. The judge."}\n' for _ in range(12)))
    for i in range(2):
        status, _, _ = run(
            capsys, "release", "--run-dir", fitted, "--data", documents, "--method", "bounded_sum", "--epsilon", 1,
            "--ledger", tmp_path / f"l{i}.json", "--output", tmp_path / f"{i}.parquet", "--allow-repeats",
        )  # fmt: skip
        assert status == 0
        rows.append(pq.read_table(tmp_path / f"{i}.parquet")["embedding"].to_pylist())
    assert rows[0] != rows[1]


@pytest.mark.parametrize("how", [("--selection", "exponential"), ("--devices", "2")])
def test_release_by_the_other_sampler_and_on_two_devices(capsys, fitted, letters, tmp_path, how):
    seen = []
    for name, options in (("one", ("--devices", "1")), ("other", how)):
        status, lines, _ = run(
            capsys, "release", "--run-dir", fitted, "--data", letters, "--method", "bounded_sum", "--epsilon", 10,
            "--output", tmp_path / name, "--ledger", tmp_path / f"{name}.json", "--insecure-noise-seed", 3, *options,
            "--json",
        )  # fmt: skip
        assert status == 0
        assert json.loads(lines[-1])["guarantee"]["simulation"] is True
        seen.append(pq.read_table(tmp_path / name).to_pylist())
    assert (seen[0] == seen[1]) == (how[0] == "--devices")  # devices change nothing, another sampler does


def test_nothing_of_a_private_text_is_written(capsys, fitted, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "secret.txt").write_text("Zqxzqx was in the harbour. The zqxzqx.")
    status, lines, err = run(
        capsys, "release", "--run-dir", fitted, "--data", tmp_path / "secret.txt", "--epsilon", 5,
        "--output", out / "x.parquet", "--ledger", out / "ledger.json", "--json",
    )  # fmt: skip
    assert status == 0
    written = b"".join(f.read_bytes() for f in out.iterdir()) + "".join([*lines, err]).encode()
    assert b"zqxzqx" not in written.lower()


@pytest.mark.slow
def test_evaluate_reports_every_method_and_resumes_to_the_same_result(
    capsys, toy_encoder, toy_data, tmp_path
):
    arguments = [
        "evaluate",
        *SMALL,
        "--data",
        toy_data,
        "--encoder",
        toy_encoder,
        "--run-dir",
        tmp_path / "run",
        "--candidates",
        "kmedoids",
    ]
    status, lines, err = run(capsys, *arguments, "--json", "--resume")  # killed before there was a folder
    assert status == 0
    assert "starting anew" in err
    assert "Each sentence has 10.0000-differential privacy" in err
    assert "does not cover deepest_candidate (no privacy) and word_mdp" in err
    assert "Measured on the first 4 test documents, so few that its scores mean nothing." in err
    result = json.loads(lines[-1])
    scores = result["macro_f1"]
    assert set(scores) == {"nonprivate", "random", *METHODS}
    assert scores["nonprivate"] > 95
    assert scores["random"] == pytest.approx(100 / 3)
    assert scores["bounded_sum"]["10"] > 80
    assert scores["deepest_candidate (no privacy)"]["inf"] >= scores["truncation"]["10"]
    assert result["guarantee"]["unit"] == "sentence"
    assert (tmp_path / "run" / "macro_f1.png").stat().st_size > 1000
    # Killed after the first records: the rest comes out as it would have.
    metrics = tmp_path / "run" / "metrics.jsonl"
    kept = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(kept[:2]) + kept[2][:20])
    status, lines, _ = run(capsys, *arguments, "--json", "--resume")
    assert status == 0
    assert json.loads(lines[-1])["macro_f1"] == scores


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("evaluate", "--epsilons", "0"), "epsilon must be positive"),
        (("evaluate", "--epsilons", "-1"), "epsilon must be positive"),
        (("fit", "--epsilons", "inf"), "epsilon must be positive"),
        (("fit", "--epsilons", "nan"), "epsilon must be positive"),
        (("fit", "--methods", "magic"), "unknown method"),
        (("fit", "--num-directions", "7"), "multiples of 5"),
        (("fit", "--trials", "0"), "--trials"),
        (("fit", "--seed", "-1"), "--seed"),
        (("fit", "--seed", str(2**64)), "--seed"),
        (("fit", "--devices", "0"), "--devices"),
        (("fit", "--devices", "999"), "--devices"),
        (("fit", "--selection", "gumbel"), "selection"),
        (("fit", "--candidates", "all"), "candidates"),
        (("fit", "--data", "EMPTY", "--run-dir", "RUN"), "empty"),
        (("fit", "--data", "FOLDER", "--run-dir", "RUN"), "folder"),
        (("fit", "--data", "absent_train.jsonl", "--run-dir", "RUN"), "does not exist"),
        (("fit", "--encoder", "absent", "--run-dir", "RUN"), "does not exist"),
        (("release", "--run-dir", "absent", "--data", "x", "--output", "y", "--epsilon", "10"), "fit"),
        (("release", "--run-dir", "absent", "--data", "x", "--output", "y", "--epsilon", "0"), "positive"),
        (("release", "--run-dir", "absent", "--data", "x", "--output", "y", "--epsilon", "-1"), "positive"),
        (("release", "--run-dir", "absent", "--data", "x", "--output", "y", "--epsilon", "inf"), "positive"),
        (("release", "--run-dir", "absent", "--data", "x", "--output", "y", "--epsilon", "nan"), "positive"),
        (("release", "--epsilon", "10"), "--run-dir STR, --data STR, --output STR"),
        (("publish",), "unknown command"),
        (("fit", "--no-such-option"), "no-such-option"),
    ],
)
def test_bad_settings_end_with_one_line_and_status_2(capsys, tmp_path, toy_encoder, arguments, words):
    (tmp_path / "empty_train.jsonl").touch()
    paths = {"RUN": tmp_path / "run", "EMPTY": tmp_path / "empty_train.jsonl", "FOLDER": tmp_path}
    arguments = [str(paths.get(a, a)) for a in arguments]
    if "--data" in arguments and "--encoder" not in arguments and arguments[0] == "fit":
        arguments += ["--encoder", str(toy_encoder)]
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def test_release_refuses_what_it_cannot_read(capsys, fitted, tmp_path):
    shared = ("release", "--run-dir", fitted, "--epsilon", 10, "--output", tmp_path / "o.parquet")
    empty = tmp_path / "empty"
    empty.mkdir()
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe\x00caf\xe9")
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n')
    for source, words in (
        (empty, "no .txt"),
        (bad, "UTF-8"),
        (twice, "twice"),
        (tmp_path / "no.txt", "exist"),
    ):
        status, _, err = run(capsys, *shared, "--data", source)
        assert status == 2
        assert words in err
    assert not (tmp_path / "o.parquet").exists()
