"""Reads sentence pairs: JSON lines, CSV, parquet, TMX, gettext catalogues, Moses' line-aligned files, or by name."""

import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainers.common import hugging_face, po_catalogs, readers, tables
from trainers.common.errors import InputError
from trainers.common.examples import BadRecord, clean, fields_of, skip_or_stop
from trainers.common.files import PathLike, existing_file
from trainers.common.packed import ReadReport
from trainers.common.pairs import MAX_WORDS, Pair, PairSplits, clean_pair, divide

_CODE_IN_TMX = {"bpt", "ept", "it", "ph", "ut"}  # markup of the translated program: no text


@dataclass
class PairReport:
    """What reading met. It depends on the data: for the operator's log."""

    dropped: int = 0
    skipped: int = 0

    def lines(self) -> list[str]:
        lines = []
        if self.dropped:
            lines.append(f"{self.dropped} pairs with a blank side, or over {MAX_WORDS} words, were left out")
        if self.skipped:
            lines.append(f"{self.skipped} bad records were skipped")
        return lines


def read_pairs(
    source: PathLike,
    *,
    source_field: str = "en",
    target_field: str = "de",
    sub: Sequence[str] | None = None,
    sub_field: str = "sub",
    split: str | None = None,
    skip_bad: bool | None = None,
    may_be_empty: bool = False,
) -> tuple[list[Pair], PairReport]:
    """Reads pairs, cleaned (`pairs.clean`), in the order of the file; blank and endless ones are counted.

    Args:
      source: .jsonl, .csv, .tsv, .parquet with the two fields (or a `translation` object that holds them), .tmx,
        .po, .mo; one of two line-aligned files (corpus.en beside corpus.de, also .gz) or their common name
        (corpus); or a Hugging Face data set's name.
      source_field, target_field: the fields' names; for .tmx and line-aligned files, the languages.
      sub: keep only records whose `sub_field` is one of these.
      split, skip_bad: as in `readers.read_clients`.
      may_be_empty: a source without a usable pair is no error.

    Raises:
      InputError: what `readers.read_clients` refuses; line-aligned files of unequal length.
    """
    source, split = readers.locate(source, split)
    report = PairReport()
    pairs: list[Pair] = []
    for left, right, part in _raw_pairs(
        source, source_field, target_field, sub_field, split, skip_bad, report
    ):
        if sub is not None and part not in sub:
            continue
        pair = clean_pair(left, right, part)
        if pair is None:
            report.dropped += 1
        else:
            pairs.append(pair)
    if not pairs and not may_be_empty:
        chosen = f" with {sub_field} in {', '.join(sub)}" if sub is not None else ""
        raise InputError(f"{source} holds no usable pair{chosen}; give a file with sentence pairs")
    return pairs, report


def read_pair_splits(source: PathLike, **options) -> tuple[PairSplits, list[str]]:
    """Reads train, validation and test pairs, and says in lines where they come from and what was left out.

    By files beside a `train` file or a `split` column; a part that is not given is taken from train, without leaks
    (`pairs.divide`). `options` are those of `read_pairs`.
    """
    available = given_splits(source)
    notes: list[str] = []
    parts: dict[str, list[Pair]] = {}
    for name in available or [None]:
        parts[name or "train"], report = read_pairs(source, split=name, **options)
        notes += [f"{name or 'all'}: {line}" for line in report.lines()]
    missing = [name for name in ("validation", "test") if name not in parts]
    if missing:
        shares = (0.05 * ("validation" in missing), 0.1 * ("test" in missing))
        taken = divide({"all": parts["train"]}, shares=shares)["all"]
        parts |= {name: getattr(taken, name) for name in ("train", *missing)}
        notes.append(f"{' and '.join(missing)} taken from the train pairs by a hash of the sentence")
    return PairSplits(parts["train"], parts["validation"], parts["test"]), notes


def read_train(source: PathLike, **options) -> tuple[list[Pair], list[str]]:
    """Reads the train pairs of a source, or all of one that is not divided, and says in lines what was left out.

    Whether a pair is among them depends on that pair alone. No pair at all is no error: whether there is one
    would be told. `options` are those of `read_pairs`.

    Raises:
      InputError: some records have a `split` and others none, so that one record would decide about the others.
    """
    available = given_splits(source)
    if _is_table(source):
        has_split = {"split" in row.fields for row in readers.rows(source, None) if row.fields is not None}
        if len(has_split) > 1:
            raise InputError(
                f"{source}: some records have a split and others have none; give it to all or to none"
            )
    pairs, report = read_pairs(source, split="train" if available else None, may_be_empty=True, **options)
    return pairs, report.lines()


def given_splits(source: PathLike) -> list[str]:
    """The parts that a source gives; none for what is one whole (a catalogue, line-aligned text without a train file).

    Raises:
      InputError: it gives parts, but no train part.
    """
    beside = readers.siblings(source)
    is_name = not Path(source).exists() and hugging_face.is_name(str(source))
    found = list(beside) if len(beside) > 1 else []
    if not found and (_is_table(source) or is_name):
        found = list(readers.split_names(source))
    if found and "train" not in found:
        raise InputError(f"{source} has no train split; give the file that holds it")
    return found


def _is_table(source: PathLike) -> bool:
    return tables.file_kind(source) in ("jsonl", "json", "csv", "tsv", "parquet")


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


def _raw_pairs(
    source: PathLike,
    left: str,
    right: str,
    sub_field: str,
    split: str | None,
    skip_bad: bool | None,
    report: PairReport,
) -> Iterator[tuple[str, str, str]]:
    kind = tables.file_kind(source)
    aligned = _aligned_files(Path(source), left, right)
    if aligned is not None:
        yield from _line_aligned(*aligned)
    elif kind == "tmx":
        yield from _tmx(existing_file(source, "data file"), left, right)
    elif kind in ("po", "mo"):
        yield from ((*pair, "") for pair in po_catalogs.read_catalogue(source))
    else:
        yield from _records(source, left, right, sub_field, split, skip_bad, report)


def _records(
    source: PathLike,
    left: str,
    right: str,
    sub_field: str,
    split: str | None,
    skip_bad: bool | None,
    report: PairReport,
) -> Iterator[tuple[str, str, str]]:
    met = ReadReport()
    first = True
    for row in readers.rows(source, split):
        try:
            record = fields_of(row)
            inner = record.get("translation")
            sides = inner if isinstance(inner, dict) else record
            if first:
                first = False
                for name in (left, right):
                    if name not in sides:
                        raise tables.missing_column(
                            source, name, list(sides), "--source-field, --target-field"
                        )
            texts = [clean(sides.get(name), met) for name in (left, right)]
            if not all(isinstance(text, str) for text in texts):
                raise BadRecord(f"{left!r} and {right!r} are not both strings")
        except BadRecord as bad:
            skip_or_stop(source, row.where, str(bad), skip_bad, met)
            report.skipped += 1
            continue
        yield texts[0], texts[1], str(record.get(sub_field) or "")


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


def _line_aligned(left: Path, right: Path) -> Iterator[tuple[str, str, str]]:
    sides = [read_lines(left), read_lines(right)]
    if len(sides[0]) != len(sides[1]):
        raise InputError(
            f"{left} has {len(sides[0])} lines, {right} has {len(sides[1])}: line-aligned files need as many; "
            "align them anew"
        )
    for source, target in zip(*sides):
        yield source, target, ""


def _tmx(path: Path, left: str, right: str) -> Iterator[tuple[str, str, str]]:
    """Translation units that hold both languages; en also reads en-GB."""
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
                    yield sides[left.lower()], sides[right.lower()], ""
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
        raise InputError(
            f"{path} has no unit with {left!r} and {right!r}; its languages: {listed}; choose with "
            "--source-field, --target-field"
        )


def _segment_text(element: ElementTree.Element) -> str:
    parts = [element.text or ""]
    for inner in element:
        if _local(inner.tag) not in _CODE_IN_TMX:
            parts.append(_segment_text(inner))
        parts.append(inner.tail or "")
    return "".join(parts)


def _local(name: str) -> str:
    return name.rpartition("}")[2]
