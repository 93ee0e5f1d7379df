"""The sacreBLEU wrapper on empty lines, transposed references and odd spaces."""

import numpy as np
import pytest
import sacrebleu

from trainers.translation import scoring

LETTERS = ["A B C D", "B C D E", "C D E F"]
PLAIN = "the cat sat on the mat ."


def test_empty_hypotheses_are_kept():
    """All precisions 100, brevity penalty exp(1 - 11/7): 56.47; nothing said at all is 0 (AC53)."""
    references = ["the cat sat on the mat .", "a dog ran ."]
    found = scoring.score([references[0], ""], references).bleu
    assert found == pytest.approx(56.47, abs=0.005)
    assert found == pytest.approx(100 * np.exp(1 - 11 / 7))
    assert scoring.score(["", ""], references).bleu == 0.0


def test_references_are_one_flat_list(monkeypatch):
    """The right shape has 100 over 12 tokens; its transpose is refused, which sacreBLEU reads as 4 (AC54)."""
    computed, plain = [], sacrebleu.BLEU.corpus_score
    monkeypatch.setattr(sacrebleu.BLEU, "corpus_score", lambda *a: computed.append(plain(*a)) or computed[-1])
    assert scoring.score(LETTERS, LETTERS).bleu == pytest.approx(100)
    (one,) = computed
    assert (one.sys_len, one.ref_len) == (12, 12)
    for hypotheses, references in (
        (LETTERS, [[line] for line in LETTERS]),
        (LETTERS, [LETTERS]),
        ([LETTERS], [LETTERS]),
        ("A B C D", LETTERS),
    ):
        with pytest.raises(ValueError, match="flat list"):
            scoring.score(hypotheses, references)
    assert len(computed) == 1


@pytest.mark.parametrize("odd", [f"{PLAIN}\r", f"{PLAIN}\n", PLAIN.replace("on the", "on\u00a0the")])
def test_line_ends_and_no_break_spaces(odd):
    """On either side, or both (AC55)."""
    for hypothesis, reference in ((odd, PLAIN), (PLAIN, odd), (odd, odd)):
        assert scoring.score([hypothesis], [reference]).bleu == pytest.approx(100)


def test_a_reference_of_a_form_feed():
    """0.00, and no division by zero (AC55)."""
    assert scoring.score([PLAIN], ["\f"]).bleu == 0.0


def test_signature_and_refusals():
    out = scoring.score(LETTERS, LETTERS)
    assert "version:" in out.bleu_signature
    assert "tok:13a" in out.bleu_signature
    assert out.chrf == pytest.approx(100)
    with pytest.raises(ValueError, match="3 hypotheses but 2 references"):
        scoring.score(LETTERS, LETTERS[:2])
    with pytest.raises(ValueError, match="no sentence"):
        scoring.score([], [])
