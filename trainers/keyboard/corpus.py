"""What a run trains and is measured on: clients, public text, vocabulary, all as token ids."""

import dataclasses
import os
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt64

from trainers.common import docstrings, files, readers
from trainers.common.errors import InputError
from trainers.common.packed import ReadReport
from trainers.common.vocabulary import Vocabulary
from trainers.keyboard import overlap
from trainers.keyboard.config import Config

EMBEDDED = "docstrings"
_NO_CAP = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Encoded text.

    train: one int32 [examples, sequence_length + 1] array a client (begin, words, end, zeros).
    ids: the clients' ids as in the source, in the order of `train`.
    hours: for each client its hours of activity, int8, or None where the data have none.
    validation, test: examples of clients never trained on, int32 [examples, sequence_length + 1].
    public: the same of the public text, or None.
    digests: SHA-256 of data and vocabulary; a resumed run must find them unchanged.
    notes: how many clients came from where, and what reading met; for the operator's log only (it depends on
      clients' data).
    seen: of all clients, as `overlap.words_of` makes it, to tell whether other text is theirs.
    shared: what public text has in common with it, in words, for the operator only.
    """

    vocabulary: Vocabulary
    train: list[Int[np.ndarray, "examples width"]]
    ids: list[str] | list[int]
    hours: list[np.ndarray] | None
    validation: Int[np.ndarray, "examples width"]
    test: Int[np.ndarray, "examples width"]
    public: Int[np.ndarray, "examples width"] | None
    digests: dict[str, str]
    notes: list[str]
    seen: overlap.Words
    shared: list[str]

    @property
    def num_clients(self) -> int:
        return len(self.train)

    @property
    def held_out(self) -> Int[np.ndarray, "examples width"]:
        """What is scored during training: validation clients, or the test clients where there are none."""
        return self.validation if len(self.validation) else self.test


def load(config: Config) -> Corpus:
    """Reads and encodes everything that `config` names.

    Raises:
      InputError: a file cannot be used, or nothing usable is in it.
    """
    public = None
    remedy = "or --public none with --vocabulary FILE"
    _require_public(config, "--public", config.public, remedy)
    splits = None if config.data == EMBEDDED else _splits(config.data, config)
    if EMBEDDED in (config.data, config.public):
        embedded = docstrings.load_default(max_examples_per_client=config.max_examples)
    if splits is None:
        splits = embedded.clients
    if config.public == EMBEDDED:
        public = embedded.public
    elif config.public != "none":
        public = readers.read_texts(config.public, text_field=config.text_field, skip_bad=config.skip_bad)

    if config.vocabulary != "public":
        vocabulary = Vocabulary.from_tsv(config.vocabulary, config.vocabulary_size)
        if len(vocabulary) < config.vocabulary_size:
            raise InputError(
                f"vocabulary {config.vocabulary} holds {len(vocabulary)} usable words, fewer than "
                f"--vocabulary-size {config.vocabulary_size}; lower the size or give a longer list"
            )
    elif public is None:
        raise InputError("--vocabulary public needs public text; give --public FILE or --vocabulary FILE")
    else:
        vocabulary = Vocabulary.from_public_texts(public.tokens, config.vocabulary_size)

    length = config.sequence_length
    if splits.shared_clients:
        raise InputError(
            f"{splits.shared_clients} clients of {config.data} stand in more than one split; evaluation must "
            "be on clients never trained on: give each client one split"
        )
    train, test = splits.train, splits.test
    seen, shared = _seen(splits, config), []
    if public is not None:
        given = overlap.words_of(public.tokens)
        shared = overlap.require_public("--public", config.public, given, seen, remedy)
    if not test.num_examples or not train.num_examples:
        raise InputError(f"{config.data} has no usable example to train or to test on; check its text field")
    encoded = vocabulary.encode(train.tokens, length)
    return Corpus(
        vocabulary=vocabulary,
        train=np.split(encoded, train.starts[1:-1]),
        ids=train.ids,
        hours=None if train.hours is None else np.split(train.hours, train.starts[1:-1]),
        validation=vocabulary.encode(splits.validation.tokens, length),
        test=vocabulary.encode(test.tokens, length),
        public=None if public is None else vocabulary.encode(public.tokens, length),
        digests={
            "data": files.digest_of(*(part.digest for part in (train, splits.validation, test))),
            "vocabulary": vocabulary.digest,
        },
        notes=_notes(splits, None if public is None else public.report),
        seen=seen,
        shared=shared,
    )


def share(data: Corpus, process: int, num_processes: int) -> Corpus:
    """The same with the training text of one process's own clients only, every `num_processes`-th of them, and
    nothing of the others' words."""
    none = data.train[0][:0].copy()
    own = [rows.copy() if i % num_processes == process else none for i, rows in enumerate(data.train)]
    return dataclasses.replace(data, train=own, seen=overlap.NOTHING)


def test_examples(source: str, vocabulary: Vocabulary, config: Config) -> Int[np.ndarray, "examples width"]:
    """The test clients' examples of another file, encoded as the run encodes its own.

    Raises:
      InputError: the file cannot be used, or has no test client.
    """
    splits = _splits(source, config)
    if not splits.test.num_examples:
        raise InputError(f"{source} has no usable example of a test client; check its split and text columns")
    return vocabulary.encode(splits.test.tokens, config.sequence_length)


class PublicText(NamedTuple):
    """Text to pretrain on. examples: encoded. sketch: what it can be told by later (`overlap.sketch`). shared: as in
    `Corpus`.
    """

    examples: Int[np.ndarray, "examples width"]
    digest: str
    sketch: UInt64[np.ndarray, "runs"]
    shared: list[str]


def pretraining_text(config: Config, data: Corpus) -> PublicText:
    """The public text of `--pretrain-data`.

    Raises:
      InputError: it cannot be used, or it is the clients' own data.
    """
    remedy = "or --pretrain-data none"
    _require_public(config, "--pretrain-data", config.pretrain_data, remedy)
    if config.pretrain_data == EMBEDDED:
        text = docstrings.load_default(max_examples_per_client=config.max_examples).public
    else:
        text = readers.read_texts(
            config.pretrain_data, text_field=config.text_field, skip_bad=config.skip_bad
        )
    words = overlap.words_of(text.tokens)
    shared = overlap.require_public("--pretrain-data", config.pretrain_data, words, data.seen, remedy)
    examples = data.vocabulary.encode(text.tokens, config.sequence_length)
    return PublicText(examples, text.digest, overlap.sketch(words), shared)


def _require_public(config: Config, option: str, source: str, remedy: str) -> None:
    if config.data == source != EMBEDDED or _same_file(config.data, source):
        raise InputError(
            f"{option} {source} is the clients' own data; public text is text whose use costs nobody privacy: "
            f"give another file, {remedy}"
        )


def _seen(splits: readers.Splits, config: Config) -> overlap.Words:
    """What the clients' text is told by, with what the run leaves out of it; nothing where no other text is given."""
    if config.public == config.pretrain_data == config.initial_model == "none":
        return overlap.NOTHING
    parts = (splits.train, splits.validation, splits.test)
    reports = [part.report for part in parts]
    if config.data != EMBEDDED and any(r.capped_examples or r.cut_examples for r in reports):
        whole = _splits(config.data, config, max_examples_per_client=_NO_CAP, max_tokens_per_example=_NO_CAP)
        parts = (whole.train, whole.validation, whole.test)
    return overlap.words_of(*(part.tokens for part in parts))


def _splits(source: str, config: Config, **caps: int) -> readers.Splits:
    options: dict[str, Any] = {"text_field": config.text_field, "client_field": config.client_field}
    options |= {"max_examples_per_client": config.max_examples, "skip_bad": config.skip_bad}
    return readers.read_splits(source, **(options | caps))


def _same_file(a: str, b: str) -> bool:
    """Whether both are one file, or a copy of it."""
    if not (os.path.isfile(a) and os.path.isfile(b)):
        return False
    return os.path.samefile(a, b) or (
        os.path.getsize(a) == os.path.getsize(b) and files.digest(a) == files.digest(b)
    )


def _notes(splits: readers.Splits, public: ReadReport | None) -> list[str]:
    train = splits.train
    notes = [
        f"{train.num_clients} clients, {train.num_examples} examples; {splits.origin}",
        *train.report.lines(),
    ]
    for name, report in (
        ("validation", splits.validation.report),
        ("test", splits.test.report),
        ("public text", public),
    ):
        if report is not None and report is not train.report:  # where one reading was divided, it is the same
            notes += [f"{name}: {line}" for line in report.lines()]
    return notes
