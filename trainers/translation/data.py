"""Parallel text for translation: pairs from files, the joint vocabulary, pieces."""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import sentencepiece

from trainers.translation.batches import Example
from trainers.translation.model import END, PAD, UNK


class Pair(NamedTuple):
    """One sentence and its translation, as the reader gave them."""

    source: str
    target: str


def read_jsonl(path, *, source_field="en", target_field="de", sub: Sequence[str] | None = None) -> list[Pair]:
    path = pathlib.Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    pairs = []
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if sub is None or row.get("sub") in sub:
                pairs.append(Pair(row[source_field], row[target_field]))
    return pairs


class Vocabulary:
    """SentencePiece pieces shared by both languages: PAD 0, UNK 1, END 2, bytes for characters never seen."""

    def __init__(self, model: bytes):
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def __len__(self) -> int:
        return self.processor.get_piece_size()

    def encode(self, texts: Iterable[str]) -> list[np.ndarray]:
        """Pieces of each text, without an end mark; a blank text has none."""
        return [np.asarray(p, np.int32) for p in self.processor.encode(list(texts))]

    def decode(self, sequences: Iterable[Sequence[int]]) -> list[str]:
        """Texts of piece sequences; END and PAD are dropped."""
        kept = [[int(p) for p in s if p not in (PAD, END)] for s in sequences]
        return [self.processor.decode(s) if s else "" for s in kept]

    def examples(self, pairs: Sequence[Pair]) -> list[Example]:
        """Both sides of every pair as pieces."""
        sources = self.encode(p.source for p in pairs)
        targets = self.encode(p.target for p in pairs)
        return [Example(s, t) for s, t in zip(sources, targets)]


def train_vocabulary(texts: Iterable[str], size: int) -> Vocabulary:
    """A BPE vocabulary of `size` pieces over both languages' public text, with byte fallback."""
    import io

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=out,
        vocab_size=size,
        model_type="bpe",
        character_coverage=0.9998,
        byte_fallback=True,
        normalization_rule_name="identity",
        pad_id=PAD,
        unk_id=UNK,
        eos_id=END,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return Vocabulary(out.getvalue())
