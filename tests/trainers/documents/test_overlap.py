"""Documents that the fit calls public are told by their sentences; what a release leaves to know is said."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.trainers.documents.conftest import make_document
from tests.trainers.documents.test_commands import run
from trainers.documents import data, overlap


@pytest.fixture
def release(capsys, fitted, tmp_path):
    """Releases these texts; status, result or standard error, and what is said."""

    def call(texts, *more):
        rows = [{"id": f"n{i}", "text": text} for i, text in enumerate(texts)]
        (tmp_path / "private.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        status, lines, err = run(
            capsys, "release", "--run-dir", fitted, "--data", tmp_path / "private.jsonl", "--epsilon", 10,
            "--output", tmp_path / "o.parquet", "--ledger", tmp_path / "ledger.json", "--method", "bounded_sum",
            "--json", *more,
        )  # fmt: skip
        return status, json.loads(lines[-1]) if status == 0 else None, err

    return call


@pytest.fixture(scope="module")
def public(toy_data):
    return [json.loads(line)["text"] for line in toy_data.read_text().splitlines()]


@pytest.fixture(scope="module")
def private():
    rng = np.random.default_rng(9)
    return [make_document(rng, "sea", 6) for _ in range(10)]


@pytest.mark.parametrize(
    "change",
    [
        lambda public, private: public,
        lambda public, private: [text.upper().replace(" ", "\n") for text in reversed(public)],
        lambda public, private: [
            text for i, text in enumerate(public) if i % 40 >= 24
        ],  # beyond --max-documents
        lambda public, private: public[:9] + private[:6],
        lambda public, private: public + private * 3 + [f"Number {n} of it." for n in range(2000)],
    ],
    ids=["file", "copy", "unused", "most", "public are some of these"],
)
def test_documents_that_the_fit_calls_public_are_refused(release, public, private, tmp_path, change):
    status, _, err = release(change(public, private), "--allow-repeats")
    assert status == 2
    assert "was fitted with as public: what is private cannot be public too" in err
    assert len(err.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["private.jsonl"]


def test_a_few_public_documents_are_told_to_the_operator_alone(release, public, private, tmp_path):
    status, result, err = release(private)
    assert (status, result["shared"]["sentences"], result["shared"]["documents"]) == (0, 0, [])
    assert "For you alone" not in err
    notes = result["guarantee"]["notes"]
    assert any("fit calls public have no guarantee" in note for note in notes)
    (tmp_path / "ledger.json").unlink()
    status, result, err = release([public[0], *private[1:]])
    assert (status, result["shared"]["documents"]) == (0, ["n0"])
    assert result["shared"]["sentences"] > 0
    assert "Mostly in those texts: 1 document (n0)." in err
    same = lambda note: "(the longest here)" not in note  # which speaks of the number of sentences
    assert [*filter(same, result["guarantee"]["notes"])] == [*filter(same, notes)]


def test_greetings_are_anybodys():
    texts = [
        "Dear Sir or Madam. Thank you very much.",
        "Dear Sir or Madam. Thank you very much. 船は港を出た。",
    ]
    public = overlap.digests([*texts, "The winter was long and hard in the north."], splitter="sentencex")
    assert len(public) == 1
    found = overlap.require_private(
        data.Documents(["a", "b"], texts, ["", ""]), public, splitter="sentencex", what=""
    )
    assert found == (0, 0, [])


def test_documents_without_a_sentence_are_named_and_look_like_nothing(release, private, tmp_path):
    status, result, err = release([*private[:2], "", "---"])
    assert (status, result["ids_without_sentences"]) == (0, ["n2", "n3"])
    assert "2 documents without a sentence (n2, n3)" in err
    rows = pq.read_table(tmp_path / "o.parquet").to_pylist()
    assert [row["nearest_candidate"] is None for row in rows] == [False, False, True, True]
    assert [any(row["embedding"]) for row in rows] == [True, True, False, False]


def test_what_another_ledger_counts_is_spoken_of(release, private, tmp_path):
    _, result, err = release(private[:1])
    assert f"Counted in {tmp_path / 'ledger.json'}." in err
    assert "share one with --ledger" in err
    assert any("in another one add their epsilons" in note for note in result["guarantee"]["notes"])


def test_sentences_that_differ_in_numbers_are_different():
    """Records of a form have the same words; a copy has the same numbers too."""
    text = lambda first: " ".join(f"The patient has taken {n} pills of it." for n in range(first, first + 9))
    known = overlap.digests([text(0)], splitter="sentencex")
    assert len(known) == 9
    assert not len(np.intersect1d(known, overlap.digests([text(20)], splitter="sentencex")))
    assert len(np.intersect1d(known, overlap.digests([text(4).upper()], splitter="sentencex"))) == 5
