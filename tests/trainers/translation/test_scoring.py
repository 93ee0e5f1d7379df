"""The sacreBLEU wrapper on empty lines, transposed references and odd spaces."""

import numpy as np
import pytest

from trainers.translation import scoring

LETTERS = ["A B C D", "B C D E", "C D E F"]


def test_empty_hypotheses_are_kept():
    references = ["the cat sat on the mat .", "a dog ran ."]
    assert scoring.score([references[0], ""], references).bleu == pytest.approx(
        100 * np.exp(1 - 11 / 7), abs=0.005
    )
    assert scoring.score(["", ""], references).bleu == 0.0


def test_references_are_one_flat_list():
    assert scoring.score(LETTERS, LETTERS).bleu == pytest.approx(100)
    with pytest.raises(ValueError, match="flat list"):
        scoring.score(LETTERS, [[line] for line in LETTERS])
    with pytest.raises(ValueError, match="flat list"):
        scoring.score(LETTERS, [LETTERS])
    with pytest.raises(ValueError, match="flat list"):
        scoring.score("A B C D", LETTERS)


@pytest.mark.parametrize(
    "odd", ["the cat sat on the mat .\r", "the cat sat on the mat .\n", "the cat sat on\u00a0the mat ."]
)
def test_line_ends_and_no_break_spaces(odd):
    assert scoring.score([odd], ["the cat sat on the mat ."]).bleu == pytest.approx(100)


def test_a_reference_of_a_form_feed():
    assert scoring.score(["the cat sat on the mat ."], ["\f"]).bleu == 0.0


def test_signature_and_refusals():
    out = scoring.score(LETTERS, LETTERS)
    assert "version:" in out.bleu_signature
    assert "tok:13a" in out.bleu_signature
    assert out.chrf == pytest.approx(100)
    with pytest.raises(ValueError, match="3 hypotheses but 2 references"):
        scoring.score(LETTERS, LETTERS[:2])
    with pytest.raises(ValueError, match="no sentence"):
        scoring.score([], [])
