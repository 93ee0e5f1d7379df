"""Reads sentence pairs: JSON lines, CSV, parquet, TMX, gettext catalogues, Moses' line-aligned files, or by name."""

import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainers.common import hugging_face, po_catalogs, readers, tables
from trainers.common.errors import InputError
from trainers.common.examples import BadRecord, clean, fields_of, skip_or_stop
from trainers.common.files import PathLike, existing_file
from trainers.common.packed import ReadReport
from trainers.common.pairs import (
    MAX_CHARACTERS,
    MAX_WORDS,
    Pair,
    PairSplits,
    clean_pair,
    divide,
    sides_of,
    without,
)

_USES = ("train", "validation", "test")
_CODE_IN_TMX = {"bpt", "ept", "it", "ph", "ut"}  # markup of the translated program: no text


@dataclass
class PairReport:
    """What reading met. It depends on the data: for the operator's log."""

    dropped: int = 0
    skipped: int = 0
    elsewhere: int = 0
    missing: InputError | None = None

    def lines(self) -> list[str]:
        lines = []
        if self.dropped:
            most = f"over {MAX_WORDS} words or {MAX_CHARACTERS} characters"
            lines.append(f"{self.dropped} pairs with a blank side, or {most}, were left out")
        if self.skipped:
            lines.append(f"{self.skipped} bad records were skipped")
        if self.elsewhere:
            lines.append(f"{self.elsewhere} records whose `split` is for something else were left out")
        return lines


class _Texts(NamedTuple):
    """A pair as written. sub: its part of the set. use: "train", "validation", "test", or "" where it says none."""

    left: str
    right: str
    sub: str = ""
    use: str = ""


@dataclass(frozen=True)
class _Source:
    """Where pairs are and how to read them; see `read_pairs`.

    uses: take only records that name one of these in their `split`; None does not look at it. one_by_one: no record
    may decide about others, not even by a quote without its pair.
    """

    path: PathLike
    left: str
    right: str
    sub_field: str
    split: str | None
    skip_bad: bool | None
    uses: Collection[str] | None
    one_by_one: bool


def read_pairs(source: PathLike, **options) -> tuple[list[Pair], PairReport]:
    """Reads pairs, cleaned (`pairs.clean`), in the order of the file; blank and endless ones are counted.

    Args:
      source: .jsonl, .csv, .tsv, .parquet with the two fields (or a `translation` object that holds them), .tmx,
        .po, .mo; one of two line-aligned files (corpus.en beside corpus.de, also .gz) or their common name
        (corpus); or a Hugging Face data set's name.
      source_field, target_field: the fields' names; for .tmx and line-aligned files, the languages.
      sub: keep only records whose `sub_field` is one of these.
      split, skip_bad: as in `readers.read_clients`.

    Raises:
      InputError: what `readers.read_clients` refuses; line-aligned files of unequal length; no usable pair.
    """
    pairs, report = _read(source, **options)
    return [pair for pair, _ in pairs], report


def _read(
    source: PathLike,
    *,
    source_field: str = "en",
    target_field: str = "de",
    sub: Sequence[str] | None = None,
    sub_field: str = "sub",
    split: str | None = None,
    skip_bad: bool | None = None,
    uses: Collection[str] | None = None,
    may_be_empty: bool = False,
) -> tuple[list[tuple[Pair, str]], PairReport]:
    """Reads pairs with what each is for."""
    path, split = readers.locate(source, split)
    report = PairReport()
    if may_be_empty and _is_blank(path, source_field, target_field):
        return [], report
    pairs: list[tuple[Pair, str]] = []
    for text in _raw_pairs(
        _Source(path, source_field, target_field, sub_field, split, skip_bad, uses, may_be_empty), report
    ):
        if sub is not None and text.sub not in sub:
            continue
        pair = clean_pair(text.left, text.right, text.sub)
        if pair is None:
            report.dropped += 1
        else:
            pairs.append((pair, text.use))
    if not pairs and not may_be_empty:
        chosen = f" with {sub_field} in {', '.join(sub)}" if sub is not None else ""
        raise report.missing or InputError(
            f"{path} holds no usable pair{chosen}; give a file with sentence pairs"
        )
    return pairs, report


def read_pair_splits(source: PathLike, **options) -> tuple[PairSplits, list[str]]:
    """Reads train, validation and test pairs, and says in lines where they come from and what was left out.

    Where there are files beside a `train` file (or a data set by name has such parts), each is one part, and one that
    is not there is taken from train, without leaks (`pairs.divide`). Else every record is for what its `split` says,
    those that say nothing are divided, and those that say something else are left out. So what is in the train part
    depends on each pair alone. `options` are those of `read_pairs`.
    """
    notes: list[str] = []
    parts: dict[str, list[Pair]] = {name: [] for name in _USES}
    apart = parts_apart(source, **options)
    for name in apart:
        parts[name], report = read_pairs(source, split=name, **options)
        notes += [f"{name}: {line}" for line in report.lines()]
    if apart:
        missing = [name for name in _USES if name not in apart]
        undivided, parts["train"] = (parts["train"], []) if missing else ([], parts["train"])
    else:
        missing = ["validation", "test"]
        pairs, report = _read(source, uses=("", *_USES), **options)
        notes += [f"all: {line}" for line in report.lines()]
        for name in _USES:
            parts[name] = [pair for pair, use in pairs if use == name]
        undivided = [pair for pair, use in pairs if not use]
    if undivided:
        shares = (0.05 * ("validation" in missing), 0.1 * ("test" in missing))
        taken = divide({"all": undivided}, shares=shares)["all"]
        seen = sides_of(parts["train"] + ([] if apart else parts["test"]))
        parts = {
            "train": parts["train"] + taken.train,
            "validation": parts["validation"] + without(taken.validation, seen),
            "test": parts["test"] + without(taken.test, seen),
        }
        notes.append(f"{' and '.join(missing)} taken from the train pairs by a hash of the sentence")
    return PairSplits(parts["train"], parts["validation"], parts["test"]), notes


def read_train(source: PathLike, *, may_be_empty: bool = True, **options) -> tuple[list[Pair], list[str]]:
    """Reads the pairs of a source that are for training, and says in lines what was left out.

    That is the train file of several, or every record whose `split` says train or nothing: whether a pair is among
    them depends on that pair alone. No pair at all is no error, if `may_be_empty`: whether there is one would be
    told. A record that is damaged stops the reading (without `skip_bad`), and nothing is told but that. `options` are
    those of `read_pairs`.
    """
    how: dict[str, Any] = {"split": "train"} if parts_apart(source, **options) else {"uses": ("train", "")}
    pairs, report = _read(source, may_be_empty=may_be_empty, **how, **options)
    lines = report.lines()
    if not pairs:
        lines.append(f"no pair was read{f' ({report.missing})' if report.missing else ''}")
    return [pair for pair, _ in pairs], lines


def parts_apart(
    source: PathLike, *, source_field: str = "en", target_field: str = "de", **_: Any
) -> list[str]:
    """The parts of a source that are files of their own, or that a data set by name has; none for one whole file.

    Options are those of `read_pairs`; the two fields tell a line-aligned corpus.

    Raises:
      InputError: a data set that has parts, but no train part.
    """
    aligned = _aligned_files(
        Path(source), source_field, target_field
    )  # a common name is not one of a data set
    if aligned is None and not Path(source).exists() and hugging_face.is_name(str(source)):
        found = list(readers.split_names(source))
        if found and "train" not in found:
            raise InputError(f"{source} has no train split; give the file that holds it")
        return found
    beside = readers.siblings(source)
    return list(beside) if len(beside) > 1 else []


def load_default() -> dict[str, PairSplits]:
    """Returns the embedded default: English-German program messages, `general` for the server first."""
    return divide(po_catalogs.load_default_sets())


def read_lines(path: PathLike) -> list[str]:
    """Returns the lines of a text to translate; blank ones stay, so that line n of the output answers line n."""
    file = existing_file(path, "text file")
    texts = []
    for number, line, problem in tables.lines(file):
        if line is None:
            raise InputError(f"{file}, line {number}: {problem}; save the file as UTF-8")
        texts.append(line.replace("\0", ""))
    return texts


def _is_blank(path: PathLike, left: str, right: str) -> bool:
    """Whether a file, or both of two line-aligned ones, exist and hold not one byte: not one record."""
    files = _aligned_files(Path(path), left, right) or (Path(path),)
    return all(file.is_file() and file.stat().st_size == 0 for file in files)


def _raw_pairs(source: _Source, report: PairReport) -> Iterator[_Texts]:
    kind = tables.file_kind(source.path)
    aligned = _aligned_files(Path(source.path), source.left, source.right)
    if aligned is not None:
        yield from _line_aligned(*aligned)
    elif kind == "tmx":
        yield from _tmx(existing_file(source.path, "data file"), source.left, source.right, report)
    elif kind in ("po", "mo"):
        yield from (_Texts(*pair) for pair in po_catalogs.read_catalogue(source.path))
    else:
        yield from _records(source, report)


def _records(source: _Source, report: PairReport) -> Iterator[_Texts]:
    met = ReadReport()
    names, path = (source.left, source.right), source.path
    first, csv = True, tables.file_kind(path) == "csv"
    for row in readers.rows(path, source.split):
        try:
            record = fields_of(row)
            cells = record if source.one_by_one else names  # a comment of several lines is nobody's sentence
            if csv and any("\n" in str(record.get(name, "")).strip() for name in cells):
                raise InputError(
                    f"{path}, {row.where}: a cell of several lines, which is no sentence: a quote without its pair "
                    "joins all lines up to the next; double it, or give JSON lines"
                )
            use = readers.use_of(record)
            if source.uses is not None and use not in source.uses:
                report.elsewhere += 1
                continue
            inner = record.get("translation")
            sides = inner if isinstance(inner, dict) else record
            if first:
                first = False
                absent = next((name for name in names if name not in sides), None)
                if absent is not None:
                    report.missing = tables.missing_column(
                        path, absent, list(sides), "--source-field, --target-field"
                    )
                    if not source.skip_bad:
                        raise report.missing
            texts = [clean(sides.get(name), met) for name in names]
            if not all(isinstance(text, str) for text in texts):
                raise BadRecord(f"{source.left!r} and {source.right!r} are not both strings")
        except BadRecord as bad:
            skip_or_stop(path, row.where, str(bad), source.skip_bad, met)
            report.skipped += 1
            continue
        yield _Texts(texts[0], texts[1], str(record.get(source.sub_field) or ""), use)


def _aligned_files(path: Path, left: str, right: str) -> tuple[Path, Path] | None:
    """The two files of a line-aligned corpus, given either of them or their name without the language."""
    for end in ("", ".gz"):
        for language in (left, right):
            tail = f".{language}{end}"
            if path.name.endswith(tail) and path.is_file():
                stem = path.name[: -len(tail)]
                other = path.with_name(f"{stem}.{right if language == left else left}{end}")
                if not other.is_file():
                    raise InputError(f"{path} is one side of line-aligned text; {other} is not beside it")
                return (path, other) if language == left else (other, path)
        both = path.with_name(f"{path.name}.{left}{end}"), path.with_name(f"{path.name}.{right}{end}")
        if not path.exists() and both[0].is_file() and both[1].is_file():
            return both
    return None


def _line_aligned(left: Path, right: Path) -> Iterator[_Texts]:
    sides = [read_lines(left), read_lines(right)]
    if len(sides[0]) != len(sides[1]):
        raise InputError(
            f"{left} has {len(sides[0])} lines, {right} has {len(sides[1])}: line-aligned files need as many; "
            "align them anew"
        )
    for source, target in zip(*sides):
        yield _Texts(source, target)


def _tmx(path: Path, left: str, right: str, report: PairReport) -> Iterator[_Texts]:
    """Translation units that hold both languages; en also reads en-GB. If there is none, `report` says so."""
    languages: set[str] = set()
    found = False
    try:
        with tables.opened(path) as file:
            for _, unit in ElementTree.iterparse(file):
                if _local(unit.tag) != "tu":
                    continue
                sides: dict[str, str] = {}
                for variant in unit:
                    if _local(variant.tag) != "tuv":
                        continue
                    language = next((v for k, v in variant.attrib.items() if _local(k) == "lang"), "").lower()
                    languages.add(language)
                    segment = next((e for e in variant if _local(e.tag) == "seg"), None)
                    if segment is not None:
                        for name in {language, language.partition("-")[0].partition("_")[0]}:
                            sides.setdefault(name, _segment_text(segment))
                unit.clear()
                if left.lower() in sides and right.lower() in sides:
                    found = True
                    yield _Texts(sides[left.lower()], sides[right.lower()])
    except ElementTree.ParseError as error:
        line = error.position[0]
        raise InputError(f"{path}, line {line}: not valid TMX ({error.msg}); mend it") from error
    except (
        LookupError,
        ValueError,
    ) as error:  # of the parser: an encoding that it does not know, or many-byte
        raise InputError(f"{path}: its encoding cannot be read ({error}); save it as UTF-8") from error
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy it again") from error
    if not found:
        listed = ", ".join(sorted(filter(None, languages))) or "none"
        report.missing = InputError(
            f"{path} has no unit with {left!r} and {right!r}; its languages: {listed}; choose with "
            "--source-field, --target-field"
        )


def _segment_text(segment: ElementTree.Element) -> str:
    """The text of a segment and of what is marked in it, however deeply; markup of the translated program is none."""
    parts: list[str] = []
    rest: list[ElementTree.Element | str | None] = [segment]
    while rest:
        item = rest.pop()
        if item is None or isinstance(item, str):
            parts.append(item or "")
            continue
        for inner in reversed(item):
            rest += [inner.tail] if _local(inner.tag) in _CODE_IN_TMX else [inner.tail, inner]
        parts.append(item.text or "")
    return "".join(parts)


def _local(name: str) -> str:
    return name.rpartition("}")[2]
