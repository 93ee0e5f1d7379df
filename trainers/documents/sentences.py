"""Documents to sentences, the same way for public and private text.

`k`, the number of sentences, is public under SentDP, so what counts as one is fixed here and reported:
pieces of the splitter after Unicode NFC, runs of white space made one space, that hold at least one letter,
digit or pictograph (Unicode categories L, N, So). A row of dashes is no sentence; one of emoji is.
"""

import re
import unicodedata
from collections.abc import Callable

from trainers.common.errors import InputError


def _sentencex(text: str) -> list[str]:
    from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue] (a Rust module)

    return list(segment("en", text))


def _lines(text: str) -> list[str]:
    return text.splitlines()


# sentencex: rules of Wikimedia for some 240 languages; CJK full stops and the danda end sentences.
# lines: one sentence a line, for text that is split already.
SPLITTERS: dict[str, Callable[[str], list[str]]] = {"sentencex": _sentencex, "lines": _lines}


def split(text: str, *, splitter: str) -> list[str]:
    """The sentences of a document, in order; an empty or blank document has none.

    Raises:
      InputError: `splitter` is not one of SPLITTERS.
    """
    if splitter not in SPLITTERS:
        raise InputError(f"unknown splitter {splitter!r}; choose one of {', '.join(SPLITTERS)}")
    pieces = SPLITTERS[splitter](unicodedata.normalize("NFC", text))
    sentences = (re.sub(r"\s+", " ", piece).strip() for piece in pieces)
    return [s for s in sentences if _is_sentence(s)]


def _is_sentence(text: str) -> bool:
    return any(c.isalnum() or unicodedata.category(c) == "So" for c in text)
