"""Reads client data and public text: parquet, JSON lines, CSV, LEAF, TFF SQLite, Hugging Face by name.

A record has a client id and a text (a string, or a list of strings: that client's examples). A `tokens`
column, if present, is split at blanks; else the text goes through `trainers.common.tokenizer`. One client may
have many records, in any order: they are merged, since it is the client that the guarantee is about.
"""

# pyarrow.compute makes its functions at import, where a type checker does not see them.
# pyright: reportAttributeAccessIssue=false

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainers.common import hugging_face, leaf, tables, tff_sqlite
from trainers.common.errors import InputError
from trainers.common.examples import (
    BadRecord,
    Collector,
    Fields,
    Raw,
    clean,
    fields_of,
    group,
    no_record,
    skip_or_stop,
    tokenized,
)
from trainers.common.files import PathLike, digest_of, existing_file
from trainers.common.packed import ClientData, PackedTokens, ReadReport
from trainers.common.tables import Row

MAX_EXAMPLES_PER_CLIENT = 256  # the cap of TFF's DP-FTRL experiments on Stack Overflow
MAX_TOKENS_PER_EXAMPLE = 256

_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


class Texts(NamedTuple):
    """Public text: one token list an example.

    tokens: packed token lists. texts: as written. digest: SHA-256 of the tokens. report: what reading met.
    """

    tokens: PackedTokens
    texts: pa.Array
    digest: str
    report: ReadReport


class Splits(NamedTuple):
    """Client data by use.

    origin: where the division comes from, in words.
    shared_clients: how many clients stand in more than one part (0 for an evaluation on unseen devices).
    """

    train: ClientData
    validation: ClientData
    test: ClientData
    origin: str
    shared_clients: int


def read_clients(
    source: PathLike,
    *,
    text_field: str = "text",
    client_field: str = "client_id",
    hour_field: str = "hour",
    split: str | None = None,
    max_examples_per_client: int = MAX_EXAMPLES_PER_CLIENT,
    max_tokens_per_example: int = MAX_TOKENS_PER_EXAMPLE,
    skip_bad: bool | None = None,
) -> ClientData:
    """Reads client data; the order of clients is that of their first record.

    Args:
      source: a file (.parquet, .jsonl, .csv, .tsv, LEAF .json, TFF .sqlite) or a Hugging Face name.
      split: "train", "validation" or "test": rows of a `split` column with that value (val and valid mean
        validation), else the file beside a `train` file; None takes every row.
      max_examples_per_client: later examples of a client are left out, and counted in the report.
      skip_bad: leave bad records out and count them, rather than stop at the first; None where the user has no
        option for it, so that none is advised.

    Raises:
      InputError: one line that names the file, the line or row, and what to do.
    """
    if max_examples_per_client < 1 or max_tokens_per_example < 1:
        raise ValueError(
            f"the caps must be at least 1, got {max_examples_per_client=}, {max_tokens_per_example=}"
        )
    fields = Fields(text_field, client_field, hour_field, skip_bad)
    return group(_read(source, fields, split), max_examples_per_client, max_tokens_per_example)


def read_splits(source: PathLike, *, holdout: float = 0.1, **options: Any) -> Splits:
    """Reads train, validation and test clients; `options` are those of `read_clients`.

    By a `split` column, by files beside a `train` file, or, where neither gives a test part, by a hash of the
    client id: a share of `holdout` for validation and for test each.
    """
    if "split" in options:
        raise ValueError("read_splits reads every split; read_clients reads one")
    if not 0 < holdout < 0.5:
        raise ValueError(f"holdout must be in (0, 0.5), got {holdout=}")
    available = split_names(source)
    if {"train", "test"} <= available.keys():
        parts = {name: read_clients(source, split=name, **options) for name in available}
        origin = "splits given by the data"
        if "validation" not in parts:
            parts["train"], parts["validation"] = hash_split(parts["train"], (1 - holdout, holdout))
            origin += f", {holdout:.0%} of the train clients taken for validation"
    else:
        whole = read_clients(source, split=next(iter(available), None), **options)
        parts = dict(zip(_SPLITS, hash_split(whole, (1 - 2 * holdout, holdout, holdout))))
        origin = f"clients divided by a hash of their id, {holdout:.0%} each for validation and for test"
    ids = [set(parts[name].ids) for name in _SPLITS]
    shared = len((ids[0] & ids[1]) | (ids[0] & ids[2]) | (ids[1] & ids[2]))
    return Splits(parts["train"], parts["validation"], parts["test"], origin, shared)


def read_texts(
    source: PathLike,
    *,
    text_field: str = "text",
    split: str | None = None,
    max_tokens_per_example: int = MAX_TOKENS_PER_EXAMPLE,
    skip_bad: bool | None = None,
) -> Texts:
    """Reads public text, which has no clients: every record is one example, or a list of them.

    Besides the formats of `read_clients`, plain .txt: every line that is not blank is an example.
    """
    if tables.file_kind(source) == "txt":
        text_field = "text"
    raw = _read(source, Fields(text_field, None, None, skip_bad), split)
    tokens, texts, _ = tokenized(raw, np.arange(len(raw.owners)), max_tokens_per_example)
    return public_texts(tokens, texts, raw.report)


def public_texts(tokens: PackedTokens, texts: pa.Array, report: ReadReport | None = None) -> Texts:
    """Puts public text together and computes its digest."""
    digest = digest_of("\n".join(tokens.words), tokens.ids.tobytes(), tokens.starts.tobytes())
    return Texts(tokens, texts, digest, report or ReadReport())


def read_records(
    source: PathLike,
    fields: Sequence[str],
    *,
    optional: Sequence[str] = (),
    split: str | None = None,
    skip_bad: bool | None = None,
) -> tuple[list[dict[str, Any]], ReadReport]:
    """Reads whole records with at least these fields (documents with labels, sentence pairs) as dicts.

    Values are as they are in the file, NUL characters removed from strings; null counts as absent. Fields of
    `optional` are None where absent.
    """
    report = ReadReport()
    records: list[dict[str, Any]] = []
    names: list[str] = []
    source, split = locate(source, split)
    for row in rows(source, split):
        try:
            record = fields_of(row)
            if not names:
                names = list(record)
                missing = next((name for name in fields if name not in record), None)
                if missing is not None:
                    raise tables.missing_column(source, missing, names)
            missing = next((name for name in fields if record.get(name) is None), None)
            if missing is not None:
                raise BadRecord(f"no {missing!r}")
            records.append({name: clean(record.get(name), report) for name in (*fields, *optional)})
        except BadRecord as bad:
            skip_or_stop(source, row.where, str(bad), skip_bad, report)
    if not records:
        raise no_record(source)
    return records, report


def split_names(source: PathLike) -> dict[str, str]:
    """The splits that a source has: fixed name ("train", ...) to the path of its file, or to the source.

    Empty when it has neither a `split` column nor files beside it.
    """
    path = Path(source)
    if not path.exists() and hugging_face.is_name(str(source)):
        found = hugging_face.split_names(str(source))
        return {name: str(source) for name in _SPLITS if any(_split_name(f) == name for f in found)}
    path = existing_file(path, "data file")
    beside = siblings(path)
    if len(beside) > 1:
        return {name: str(file) for name, file in beside.items()}
    values = {_split_name(value) for value in _split_values(path)}
    return {name: str(path) for name in _SPLITS if name in values}


def siblings(path: PathLike) -> dict[str, Path]:
    """A train file and the validation and test files beside it; empty for a file of another name.

    The name holds `train` between `.`, `_` or `-` (or at an end): it.train.jsonl.gz finds it.valid.jsonl.gz.
    """
    path = Path(path)
    match = re.search(r"(?:^|(?<=[._-]))train(?=[._-]|$)", path.name)
    if match is None:
        return {}
    found = {"train": path}
    for name in ("validation", "test"):
        for word in _SPLITS[name]:
            beside = path.with_name(path.name[: match.start()] + word + path.name[match.end() :])
            if beside.is_file():
                found[name] = beside
                break
    return found


def _read(source: PathLike, fields: Fields, split: str | None) -> Raw:
    source, split = locate(source, split)
    if tables.file_kind(source) == "parquet" and Path(source).is_file():
        raw = _read_flat_parquet(source, fields, split)
        if raw is not None:
            return raw
    collector = Collector(source, fields)
    for row in rows(source, split):
        collector.add(row)
    return collector.finish()


def locate(source: PathLike, split: str | None) -> tuple[PathLike, str | None]:
    """The file to read for a split, and the split to choose inside it (None: all of it)."""
    if split is None:
        return source, None
    if split not in _SPLITS:
        raise ValueError(f"split must be one of {', '.join(_SPLITS)} or None, got {split=}")
    beside = siblings(source)
    if len(beside) > 1 and split in beside:
        return beside[split], None
    return source, split


def rows(source: PathLike, split: str | None) -> Iterator[Row]:
    """Records of any source; of the split only, which must occur."""
    path = Path(source)
    if not path.exists() and hugging_face.is_name(str(source)):
        name = split
        if split is not None:
            found = hugging_face.split_names(str(source))
            name = next((f for f in found if _split_name(f) == split), None)
            if name is None:
                raise InputError(f"data set {source} has no {split} split; it has: {', '.join(found)}")
        yield from hugging_face.rows(str(source), name)
        return
    existing_file(path, "data file")
    kind = tables.file_kind(path)
    if kind == "sqlite":
        records = tff_sqlite.rows(path)
    elif kind == "json" and leaf.is_leaf(path):
        records = leaf.rows(path)
    else:
        records = tables.rows(path)
    found = set()
    for row in records:
        if split is None or row.fields is None:
            yield row
            continue
        found.add(str(row.fields.get("split")))
        if _split_name(row.fields.get("split")) == split:
            yield row
    if split is not None and split not in map(_split_name, found):
        raise _no_split(source, split, found)


def _read_flat_parquet(source: PathLike, fields: Fields, split: str | None) -> Raw | None:
    """The fast path, no python object a row; None where a column needs the careful one (lists, nulls)."""
    names = [n for n in (fields.client, fields.text, "tokens", fields.hour, "split") if n is not None]
    table = tables.parquet_table(source, names)
    if split is not None:
        if "split" not in table.column_names:
            raise _no_split(source, split, ())
        values = tables.plain(table["split"])
        wanted = [v for v in values.unique().to_pylist() if _split_name(v) == split]
        if not wanted:
            raise _no_split(source, split, values.unique().to_pylist())
        table = table.filter(pc.is_in(values, pa.array(wanted, values.type)))
    columns: dict[str, pa.Array] = {}
    for role, name in (
        ("client", fields.client),
        ("text", fields.text),
        ("tokens", "tokens"),
        ("hour", fields.hour),
    ):
        if (
            name is None
            or name not in table.column_names
            or (role == "tokens" and not fields.may_have_tokens)
        ):
            continue
        column = tables.plain(table[name])
        kinds = {"client": (pa.int64(), pa.large_string()), "hour": (pa.int64(),)}.get(
            role, (pa.large_string(),)
        )
        if column.null_count or column.type not in kinds:
            return None
        columns[role] = column
    if table.num_rows == 0 or (fields.client is not None and "client" not in columns):
        return None
    text = columns.get("text", columns.get("tokens"))
    hours = None
    if text is None:
        return None
    if "hour" in columns:
        values = columns["hour"].to_numpy()
        if values.min() < 0 or values.max() > 23:
            return None
        hours = values.astype(np.int8)
    report = ReadReport()
    spaced = columns.get("tokens")
    texts = _without_nul(text, report)
    if spaced is not None:
        spaced = texts if spaced is text else _without_nul(spaced, report)
    ids, owners = [], np.zeros(table.num_rows, np.int64)
    if fields.client is not None:
        coded = columns["client"].dictionary_encode()
        ids = coded.dictionary.to_pylist()
        owners = coded.indices.to_numpy().astype(np.int64)
        if "" in ids:
            return None
    return Raw(str(source), ids, owners, texts, spaced, hours, report)


def _without_nul(texts: pa.Array, report: ReadReport) -> pa.Array:
    count = pc.sum(pc.count_substring(texts, "\0")).as_py() or 0
    report.nul_characters += count
    return pc.replace_substring(texts, "\0", "") if count else texts


def hash_split(data: ClientData, shares: Sequence[float]) -> list[ClientData]:
    """Divides clients by a hash of their id: the same client always falls in the same part."""
    position = np.array([unit_hash(f"{i}") for i in data.ids])
    part = np.searchsorted(np.cumsum(shares)[:-1], position, side="right")
    return [data.select(np.flatnonzero(part == p)) for p in range(len(shares))]


def unit_hash(name: str) -> float:
    """A number in [0, 1) that depends on the name only."""
    return int(digest_of(name)[:12], 16) / 16**12


def _split_values(path: Path) -> set[str]:
    """The values of a file's `split` column; empty where its first record has none."""
    if tables.file_kind(path) == "parquet":
        table = tables.parquet_table(path, ["split"])
        return (
            {str(v) for v in table["split"].unique().to_pylist()} if "split" in table.column_names else set()
        )
    values: set[str] = set()
    for row in rows(path, None):
        if row.fields is not None:
            if "split" not in row.fields:
                return values
            values.add(str(row.fields["split"]))
    return values


def _split_name(value: Any) -> str:
    text = str(value).strip().lower()
    return next((name for name, words in _SPLITS.items() if text in words), text)


def use_of(record: dict[str, Any]) -> str:
    """What a record is for by its `split`: "train", "validation", "test", another word, or "" where it says nothing."""
    value = record.get("split")
    return "" if value is None else _split_name(value)


def _no_split(source: PathLike, split: str, found: Any) -> InputError:
    listed = ", ".join(sorted(map(str, found))) or "no `split` column"
    return InputError(f"{source} has no {split} split (it has: {listed}) and no file beside it is named so")
