"""From records to a client's examples: checks each record, merges a client's records, caps, tokenizes."""

# pyarrow.compute makes its functions at import, where a type checker does not see them.
# pyright: reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainers.common import tables
from trainers.common.errors import InputError
from trainers.common.files import PathLike
from trainers.common.packed import ClientData, PackedTokens, ReadReport, client_data, offsets
from trainers.common.tables import Row

_MOST_CHARACTERS_A_TOKEN = 64  # a longer text is cut before it is tokenized, so that memory stays flat
_SKIPPED_SHOWN = 5


class Fields(NamedTuple):
    """Where a record keeps what. `client` and `hour` are None where text has no clients, `skip_bad` as below."""

    text: str
    client: str | None
    hour: str | None
    skip_bad: bool | None

    @property
    def may_have_tokens(self) -> bool:
        """Whether a `tokens` column speaks about this text."""
        return self.text in ("text", "tokens")


class Raw(NamedTuple):
    """Examples as they stand in the source, in its order.

    owners: int64 [examples], index into `ids`. spaced: tokens joined by blanks, or None. hours: int8 or None.
    """

    source: str
    ids: list
    owners: np.ndarray
    texts: pa.Array
    spaced: pa.Array | None
    hours: np.ndarray | None
    report: ReadReport


class BadRecord(Exception):
    """A record that cannot be used, and why."""


class Collector:
    """Turns records into flat examples, one at a time, so that a bad one can be named or skipped."""

    def __init__(self, source: PathLike, fields: Fields):
        self.source, self.fields = source, fields
        self.report = ReadReport()
        self.index: dict[Any, int] = {}
        self.owners: list[int] = []
        self.texts: list[str] = []
        self.spaced: list[str] | None = None
        self.hours: list[int] = []
        self.records = 0
        self.first: dict[str, Any] | None = None

    def add(self, row: Row) -> None:
        try:
            record = fields_of(row)
            if self.first is None:
                self._start(record)
            client = None if self.fields.client is None else self._client(record, self.fields.client)
            texts, spaced = self._examples(record)
            hours = self._hours(record, len(texts))
        except BadRecord as bad:
            skip_or_stop(self.source, row.where, str(bad), self.fields.skip_bad, self.report)
            return
        self.records += 1
        self.report.long_records += row.where.startswith("lines ")
        if client in self.index and isinstance(record.get(self.fields.text), list):
            self.report.merged_records += 1
        owner = 0 if client is None else self.index.setdefault(client, len(self.index))
        self.owners.extend([owner] * len(texts))
        self.texts.extend(texts)
        if self.spaced is not None and spaced is not None:
            self.spaced.extend(spaced)
        self.hours.extend(hours)

    def finish(self) -> Raw:
        if self.records == 0:
            raise no_record(self.source)
        return Raw(
            str(self.source),
            list(self.index),
            np.asarray(self.owners, np.int64),
            pa.array(self.texts, pa.large_string()),
            None if self.spaced is None else pa.array(self.spaced, pa.large_string()),
            np.asarray(self.hours, np.int8) if self.hours else None,
            self.report,
        )

    def _start(self, record: dict[str, Any]) -> None:
        """The first whole record decides which columns there are."""
        fields = self.fields
        if fields.client is not None and fields.client not in record:
            raise tables.missing_column(self.source, fields.client, list(record), "--client-field")
        has_tokens = fields.may_have_tokens and record.get("tokens") is not None
        if fields.text not in record and not has_tokens:
            raise tables.missing_column(self.source, fields.text, list(record), "--text-field")
        self.spaced = [] if has_tokens else None
        self.first = record

    def _client(self, record: dict[str, Any], name: str) -> str | int:
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise BadRecord(f"{name!r} is {_kind(value)}, not a string or a whole number")
        if value == "":
            raise BadRecord(f"{name!r} is empty")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise BadRecord(f"{name!r} is beyond 64 bits")
        value = clean(value, self.report)
        known = next(iter(self.index), value)
        if type(known) is not type(value):  # 1 and "1" may be one client or two: only the owner can tell
            raise BadRecord(f"{name!r} is {_kind(value)} here and {_kind(known)} in earlier records")
        return value

    def _examples(self, record: dict[str, Any]) -> tuple[list[str], list[str] | None]:
        """The record's texts, and its tokens joined by blanks where it has them."""
        name = self.fields.text
        tokens = record.get("tokens") if self.fields.may_have_tokens else None
        if (tokens is not None) != (self.spaced is not None):
            raise BadRecord("'tokens' is in some records only")
        text = _spaced(tokens) if name == "tokens" or record.get(name) is None else record[name]
        if text is None:
            raise BadRecord(f"{name!r} is null" if name in record else f"no {name!r}")
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            raise BadRecord(f"{name!r} is {_kind(text)}, not a string or a list of strings")
        if tokens is None:
            return [clean(t, self.report) for t in texts], None
        spaced = [_spaced(tokens)] if isinstance(text, str) else [_spaced(t) for t in tokens]
        if len(spaced) != len(texts) or not all(isinstance(s, str) for s in spaced):
            raise BadRecord("'tokens' does not match the text: one entry an example, split at blanks")
        return [clean(t, self.report) for t in texts], [clean(s, self.report) for s in spaced]

    def _hours(self, record: dict[str, Any], count: int) -> list[int]:
        name = self.fields.hour
        if name is None or self.first is None:
            return []
        value = record.get(name)
        if self.first.get(name) is None:  # the first whole record decides, as for tokens
            if value is not None:
                raise BadRecord(f"{name!r} is in some records only")
            return []
        given: list[Any] = value if isinstance(value, list) else [value] * count
        try:
            hours = [int(hour) for hour in given]
        except (TypeError, ValueError):
            hours = []
        whole = all(not isinstance(hour, float) or hour.is_integer() for hour in given)
        if len(hours) != count or not whole or not all(0 <= hour <= 23 for hour in hours):
            raise BadRecord(f"{name!r} is not one whole number from 0 to 23 for each example")
        return hours


def group(raw: Raw, max_examples: int, max_tokens: int) -> ClientData:
    """Puts each client's examples together, drops blank ones, applies the caps."""
    written = raw.texts if raw.spaced is None else raw.spaced
    blank = pc.equal(pc.utf8_trim_whitespace(written), "").to_numpy(zero_copy_only=False)
    raw.report.blank_examples += int(blank.sum())
    order = np.flatnonzero(~blank)
    order = order[np.argsort(raw.owners[order], kind="stable")]
    order = _cap(raw, order, max_examples)
    tokens, texts, kept = tokenized(raw, order, max_tokens)
    counts = np.bincount(raw.owners[kept], minlength=len(raw.ids)).astype(np.int64)
    raw.report.empty_clients = int((counts == 0).sum())
    hours = None if raw.hours is None else raw.hours[kept]
    return client_data(ids=raw.ids, counts=counts, tokens=tokens, texts=texts, hours=hours, report=raw.report)


def tokenized(raw: Raw, order: np.ndarray, max_tokens: int) -> tuple[PackedTokens, pa.Array, np.ndarray]:
    """Tokens and texts of the examples in `order` that have a token at all, and which these are."""
    limit = max_tokens * _MOST_CHARACTERS_A_TOKEN
    whole = raw.texts.take(pa.array(order))
    texts = pc.utf8_slice_codeunits(whole, 0, limit)
    if raw.spaced is None:
        tokens = PackedTokens.from_texts(texts.to_pylist())
    else:
        tokens = PackedTokens.from_spaced(raw.spaced.take(pa.array(order)))
    too_long = pc.greater(pc.utf8_length(whole), limit).to_numpy(zero_copy_only=False)
    kept = np.flatnonzero(tokens.lengths > 0)
    raw.report.cut_examples += int((too_long | (tokens.lengths > max_tokens)).sum())
    raw.report.blank_examples += len(order) - len(kept)  # such as control characters only
    return tokens.take(kept, max_tokens), texts.take(pa.array(kept)), order[kept]


def _cap(raw: Raw, order: np.ndarray, most: int) -> np.ndarray:
    """The first `most` examples of each client; `order` has each client's together."""
    counts = np.bincount(raw.owners[order], minlength=len(raw.ids))
    rank = np.arange(len(order)) - np.repeat(offsets(counts)[:-1], counts)
    raw.report.capped_clients = int((counts > most).sum())
    raw.report.capped_examples = int((rank >= most).sum())
    return order[rank < most]


def fields_of(row: Row) -> dict[str, Any]:
    """The row's record; raises BadRecord where there is none."""
    if row.fields is None:
        raise BadRecord(row.problem)
    return row.fields


def skip_or_stop(
    source: PathLike, where: str, problem: str, skip_bad: bool | None, report: ReadReport
) -> None:
    """Counts a bad record, or stops with an error that names it; `skip_bad` is None where no option is for it."""
    if not skip_bad:
        advice = "mend it" if skip_bad is None else "mend it, or leave bad records out with --skip-bad"
        raise InputError(f"{source}, {where}: {problem}; {advice}")
    report.skipped_records += 1
    if len(report.skipped_reasons) < _SKIPPED_SHOWN:
        report.skipped_reasons.append(f"{where}: {problem}")


def clean(value: Any, report: ReadReport) -> Any:
    """A string without NUL; half of a surrogate pair makes the record bad. Other values pass."""
    if not isinstance(value, str):
        return value
    if "\0" in value:
        report.nul_characters += value.count("\0")
        value = value.replace("\0", "")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise BadRecord("holds half of a surrogate pair, which is no valid text") from None
    return value


def no_record(source: PathLike) -> InputError:
    return InputError(f"{source} holds no usable record; give a file with data")


def _spaced(tokens: Any) -> Any:
    """A list of tokens joined by blanks; anything else as it is, for the caller to judge."""
    if isinstance(tokens, list) and all(isinstance(token, str) for token in tokens):
        return " ".join(tokens)
    return tokens


def _kind(value: Any) -> str:
    names: dict[type, str] = {bool: "true or false", int: "a number", float: "a fraction", str: "a string"}
    names |= {list: "a list of other things", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)
