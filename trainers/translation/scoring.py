"""sacreBLEU and chrF of whole files of translations, in percent, with their signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Score(NamedTuple):
    """bleu, chrf: 0 to 100. bleu_signature, chrf_signature: how sacreBLEU computed them, to be quoted beside
    them.
    """

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def score(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Corpus BLEU and chrF2 of one hypothesis a line against one reference a line; an empty hypothesis is a
    line.

    Raises:
      ValueError: the two differ in length, are empty, or are not flat lists of strings. A list of lists is
        refused because sacreBLEU reads its transpose without a word and scores one sentence.
    """
    import sacrebleu  # brings in lxml and regular expressions by the thousand: only where scores are wanted

    for name, lines in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(lines, str) or not all(isinstance(line, str) for line in lines):
            raise ValueError(
                f"{name} must be a flat list of strings, one a sentence (one reference a sentence)"
            )
    if len(hypotheses) != len(references):
        raise ValueError(
            f"{len(hypotheses)} hypotheses but {len(references)} references: give one reference a hypothesis"
        )
    if not hypotheses:
        raise ValueError("no sentence to score: give at least one")
    # Line ends are no part of a sentence; sacreBLEU strips them on one side only in some versions.
    hypotheses = [line.rstrip("\r\n") for line in hypotheses]
    references = [line.rstrip("\r\n") for line in references]
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    b = bleu.corpus_score(hypotheses, [references])
    c = chrf.corpus_score(hypotheses, [references])
    return Score(float(b.score), float(c.score), str(bleu.get_signature()), str(chrf.get_signature()))
