"""Reads records from JSON lines, CSV and parquet, and says which line is bad and why."""

import contextlib
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from trainers.common.errors import InputError
from trainers.common.files import PathLike, existing_file


class Row(NamedTuple):
    """One record, or why there is none.

    where: "line 7", "lines 7 to 9" or "row 7", counted from 1.
    fields: the record, or None.
    problem: what is wrong with it, empty for a good one.
    """

    where: str
    fields: dict[str, Any] | None
    problem: str = ""


def rows(path: PathLike) -> Iterator[Row]:
    """Yields the records of a .jsonl, .json, .csv, .tsv, .parquet or .txt file (the text ones also as .gz).

    A line of plain text is a record with the one field `text`.

    Raises:
      InputError: the file is absent, empty, a folder, or of no known kind.
    """
    file = existing_file(path, "data file")
    kind = file_kind(file)
    if kind == "parquet":
        yield from _parquet_rows(file)
    elif kind in ("csv", "tsv"):
        yield from _table_rows(file, "\t" if kind == "tsv" else ",")
    elif kind in ("jsonl", "json"):
        yield from _json_rows(file)
    elif kind == "txt":
        yield from _plain_rows(file)
    else:
        raise InputError(
            f"{file}: cannot tell the format from the name; "
            "give .parquet, .jsonl, .json, .csv, .tsv, .txt (also .gz), .sqlite"
        )


def file_kind(path: PathLike) -> str:
    """The format by the name's ending, without `.gz`: "jsonl" for both a.jsonl and a.ndjson.gz."""
    suffixes = [s.lower().removeprefix(".") for s in Path(path).suffixes]
    if suffixes and suffixes[-1] == "gz":
        suffixes.pop()
    kind = suffixes[-1] if suffixes else ""
    return {
        "ndjson": "jsonl",
        "jsonlines": "jsonl",
        "pq": "parquet",
        "db": "sqlite",
        "sqlite3": "sqlite",
    }.get(kind, kind)


def lines(path: PathLike) -> Iterator[tuple[int, str | None, str]]:
    """Yields `(number, text, problem)` of each line of UTF-8, without its end and without a byte order mark.

    Only LF and CR LF end a line: U+2028, form feed and their like are text. A line that is not UTF-8 comes as
    None with the problem.
    """
    number = 0
    try:
        with opened(Path(path)) as file:
            for number, raw in enumerate(file, 1):
                if number == 1:
                    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                        raise InputError(f"{path} is UTF-16, not UTF-8; save it as UTF-8")
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                raw = raw.removesuffix(b"\n").removesuffix(b"\r")
                try:
                    yield number, raw.decode("utf-8"), ""
                except UnicodeDecodeError as error:
                    yield number, None, f"not UTF-8 (byte 0x{raw[error.start]:02x} at {error.start + 1})"
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: damaged gzip file after line {number} ({error}); copy it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def parquet_table(path: PathLike, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads these columns (those that exist) of a parquet file.

    Raises:
      InputError: not a whole parquet file; a footer's claim is checked before anything is allocated.
    """
    file = existing_file(path, "data file")
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(4)
        stream.seek(max(0, size - 8))
        tail = stream.read()
    if head != b"PAR1":
        raise InputError(f"{file} is not a parquet file (it does not begin with PAR1); check its name")
    if size < 12 or tail[4:] != b"PAR1":
        raise InputError(f"{file} is a parquet file cut off at its end; copy it again")
    footer = int.from_bytes(tail[:4], "little")
    if footer > size - 12:
        raise InputError(f"{file}: damaged parquet footer (claims {footer} bytes of {size}); copy it again")
    try:
        with pq.ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            table = parquet.read(columns=None if columns is None else [n for n in names if n in columns])
            table.validate(full=True)
            return table
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file}: damaged parquet file ({_first_line(error)}); copy it again") from error


def plain(column: pa.ChunkedArray) -> pa.Array:
    """A column as one chunk, dictionaries resolved, integers as int64, strings as large_string."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
        column = column.cast(kind)
    if pa.types.is_integer(kind):
        kind = pa.int64()
    elif pa.types.is_string(kind) or pa.types.is_string_view(kind):
        kind = pa.large_string()
    try:
        return column.cast(kind).combine_chunks()
    except pa.ArrowInvalid:  # unsigned beyond 63 bits: left to whoever looks at single values
        return column.combine_chunks()


def missing_column(path: PathLike, name: str, present: Sequence[str], option: str = "") -> InputError:
    """The error for a column that is not there. Names are cut short: without a header they are somebody's text."""
    says = f"{path} has no column {name!r}; it has: {_listed(present)}"
    if mark := _SEPARATORS.get(file_kind(path)):
        says += " (the first line of a table names its columns)"
        other = [one for one in (";", "\t", ",", "|") if one != mark and one in "".join(present)]
        if len(present) == 1 and other:
            name_it = ", or name it .tsv" if other[0] == TAB else ""
            return InputError(
                f"{says}, all in one: cells are separated by {_named(mark)} in a .{file_kind(path)} file, and by "
                f"{_named(other[0])} in this one; save it with {_named(mark)}{name_it}"
            )
    return InputError(says + (f"; choose one with {option}" if option else ""))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{name:.20}{'...' if len(name) > 20 else ''}" for name in map(str, names)) or "none"


TAB = "\t"
_SEPARATORS = {"csv": ",", "tsv": TAB}


def _named(mark: str) -> str:
    return "tabs" if mark == TAB else f"'{mark}'"


def _parquet_rows(path: Path) -> Iterator[Row]:
    number = 0
    for batch in parquet_table(path).to_batches(max_chunksize=10_000):
        for record in batch.to_pylist():
            number += 1
            yield Row(f"row {number}", record)


def _json_rows(path: Path) -> Iterator[Row]:
    for number, text, problem in lines(path):
        where = f"line {number}"
        if text is None:
            yield Row(where, None, problem)
            continue
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            yield Row(where, None, f"not valid JSON ({error.msg} at {error.colno})")
        except RecursionError:
            yield Row(where, None, "not usable JSON (nested too deeply)")
        except ValueError as error:  # an integer of thousands of digits
            yield Row(where, None, f"not usable JSON ({_first_line(error)})")
        else:
            if isinstance(record, dict):
                yield Row(where, record)
            else:
                yield Row(where, None, f"a JSON {type(record).__name__}, not an object with named fields")


def _plain_rows(path: Path) -> Iterator[Row]:
    for number, text, problem in lines(path):
        if text is None:
            yield Row(f"line {number}", None, problem)
        elif text.strip():
            yield Row(f"line {number}", {"text": text})


def _table_rows(path: Path, delimiter: str) -> Iterator[Row]:
    header: list[str] | None = None
    for where, cells, problem in (_tab_cells if delimiter == TAB else _csv_cells)(path):
        if header is None:
            if problem:
                raise InputError(f"{path}, line 1: {problem}; it names the columns, in UTF-8")
            header = [name.strip() for name in cells]
            if len(set(header)) < len(header):
                raise InputError(f"{path}, line 1: a column name occurs twice: {_listed(header)}")
        elif problem:
            yield Row(where, None, problem)
        elif not cells:
            continue
        elif len(cells) != len(header):
            yield Row(where, None, f"{len(cells)} cells, but the header names {len(header)} columns")
        else:
            yield Row(where, dict(zip(header, cells)))


_Cells = tuple[str, list[str], str]  # where, the cells, what is wrong


def _tab_cells(path: Path) -> Iterator[_Cells]:
    """One line is one record, whatever quotes it holds: no line decides about another. A line with more cells than the
    first may have tabs inside quotes, as spreadsheets write them.
    """
    columns = 0
    for number, line, problem in lines(path):
        if line is not None and "\0" in line:
            problem = "holds a NUL byte"
        cells = [_unquoted(cell) for cell in line.split(TAB)] if line else []
        columns = columns or len(cells)
        if line and len(cells) > columns and '"' in line:
            with contextlib.suppress(csv.Error):
                quoted = next(csv.reader([line], delimiter=TAB, strict=True))
                cells = quoted if len(quoted) == columns else cells
        yield f"line {number}", cells, problem


def _unquoted(cell: str) -> str:
    """A cell without the quotes that spreadsheets put around one; other quotes are text."""
    quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")
    return cell[1:-1].replace('""', '"') if quoted else cell


def _csv_cells(path: Path) -> Iterator[_Cells]:
    problems: dict[int, str] = {}

    def text() -> Iterator[str]:
        for number, line, problem in lines(path):
            if line is None:
                problems[number] = problem
            elif "\0" in line:
                problems[number] = "holds a NUL byte"
            yield ("" if line is None else line.replace("\0", "")) + "\n"

    # The module's limit on a field's length (128 kB) is shared by the whole process: raised, then put back.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        reader = csv.reader(text(), strict=True)
        while True:
            begin = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if reader.line_num > begin:  # skipped, it would take the lines between along
                    raise InputError(
                        f"{path}, lines {begin} to {reader.line_num}: not valid CSV ({error}): a quote without its "
                        "pair; quotes in a quoted cell are doubled"
                    ) from error
                yield f"line {begin}", [], f"not valid CSV ({error})"
                continue
            bad = next((problems[n] for n in range(begin, reader.line_num + 1) if n in problems), "")
            last = reader.line_num
            yield f"line {begin}" if last == begin else f"lines {begin} to {last}", cells, bad
    finally:
        csv.field_size_limit(limit)


def opened(path: Path) -> io.BufferedIOBase:
    """The file's bytes, unpacked where its name ends in .gz."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
