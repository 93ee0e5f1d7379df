"""Finds the prose in a docstring: paragraphs without code, tables and markup, and their sentences."""

import inspect
import re
from collections.abc import Iterator

from trainers.common.tokenizer import is_placeholder, tokenize

_UNDERLINE = re.compile(r"^([=\-~^*#`+.:_'\"])\1{2,}$")
_CODE_LINE = re.compile(
    r"^(>>>|\.\.\.(\s|$)|\$ |% |\||\+[-=]|@\w|#!|[{}\[\]]|(In|Out)\s?\[|import |from \w+ import )"
)
_DIRECTIVE = re.compile(r"^\.\. ")
_SECTION = re.compile(r"^[A-Z][\w ]{1,30}:$")
_BULLET = re.compile(r"^([-*•+]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+")
_NUMPY_FIELD = re.compile(r"^[\w*\\`'., ]+ : ")
_FIELD = re.compile(r"^(:\w+[^:]*:|[\w*`]+(\s*\([^)]*\))?:)(\s+|$)")

_MARKUP = [
    (re.compile(r"https?://\S+|www\.\S+"), "_url_"),
    (re.compile(r"`([^`<]+?)\s*<[^>`]*>`__?"), r"\1"),  # a link's words
    (re.compile(r":math:`[^`]*`|\$\$?[^$]+\$\$?"), "_code_"),
    (re.compile(r"(?::[\w:+]+:)?``?([^`]+)``?_?"), lambda match: _code(match[1])),
    (re.compile(r"\[\w{1,12}\]_"), ""),  # a citation
    (re.compile(r"\*\*([^*]+)\*\*|(?<!\w)\*([^*\s][^*]*)\*"), lambda match: match[1] or match[2]),
    (re.compile(r"\b\w*[A-Za-z]\w*\([^()\s]*\)"), "_code_"),  # f(), f(x)
    (re.compile(r"\b[A-Za-z]\w+(?:\.[A-Za-z_]\w+)+\b"), "_code_"),  # numpy.linalg
    (re.compile(r"\b\w*[A-Za-z0-9]_\w+\b|(?<![\w_])__\w+__"), "_code_"),  # snake_case
    (re.compile(r"\b[a-z]+[A-Z]\w*\b"), "_code_"),  # camelCase
]
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]*[A-Z])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|al|Eqs?|Figs?|Sec|Refs?|No|resp|approx|Dr|St|[A-Z])\.$")


def paragraphs(docstring: str) -> list[str]:
    """The paragraphs of prose, each on one line, code spans as `_code_` unless they are a plain word."""
    return [text for block in _blocks(docstring) if (text := _plain(" ".join(block)))]


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph that read as prose: 4 to 60 tokens, most of them words."""
    return [sentence for sentence in split_sentences(paragraph) if _is_prose(sentence)]


def split_sentences(paragraph: str) -> list[str]:
    """Splits after `.!?` before a capital, not after usual abbreviations."""
    parts: list[str] = []
    begin = 0
    for match in _SENTENCE_END.finditer(paragraph):
        head = paragraph[begin : match.start()]
        if _ABBREVIATION.search(head):
            continue
        parts.append(paragraph[begin : match.end()].strip())
        begin = match.end()
    parts.append(paragraph[begin:].strip())
    return [part for part in parts if part]


def _blocks(docstring: str) -> Iterator[list[str]]:
    """Groups of lines that belong together; code, tables, directives and titles are left out."""
    block: list[str] = []
    indent = 0  # of the block's lines
    hanging = False  # whether the block began with `name: ...`, whose other lines are deeper
    skip_deeper: int | None = None  # inside a literal block or directive: deeper lines are not prose
    in_example = False
    for line in inspect.cleandoc(docstring).splitlines():
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        if not text:
            yield block
            block, in_example = [], False
            continue
        if skip_deeper is not None:
            if depth > skip_deeper:
                continue
            skip_deeper = None
        if _UNDERLINE.match(text):
            block = []  # what stands above it is a title
            continue
        if in_example or _CODE_LINE.match(text) or _DIRECTIVE.match(text):
            yield block
            block = []
            in_example = in_example or text.startswith(">>>")
            if _DIRECTIVE.match(text):
                skip_deeper = depth
            continue
        if _SECTION.match(text) or _NUMPY_FIELD.match(text):
            yield block
            block = []
            continue
        bullet, named = _BULLET.match(text), _FIELD.match(text)
        deeper = depth > indent if hanging else depth != indent
        if block and (bullet or named or (deeper and not (hanging and depth > indent))):
            yield block
            block = []
        if not block:
            indent, hanging = depth, bool(bullet or named)
        text = text[(bullet or named).end() :] if bullet or named else text  # type: ignore[union-attr]
        if text.endswith("::"):
            skip_deeper, text = depth, text[:-1]
        if text:
            block.append(text)
    yield block


def _plain(text: str) -> str:
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return re.sub(r"\s+", " ", text.replace("\\", " ").replace("\0", "")).strip()


def _code(content: str) -> str:
    """A code span: a plain lower-case word reads as itself."""
    word = content.strip().split(".")[-1].lstrip("~!")
    return word if re.fullmatch(r"[A-Za-z][a-z]+", content.strip()) else "_code_" if word else ""


def _is_prose(sentence: str) -> bool:
    tokens = tokenize(sentence)
    if not 4 <= len(tokens) <= 60:
        return False
    words = sum(token[0].isalpha() for token in tokens)
    codes = sum(map(is_placeholder, tokens))
    return words >= 3 and words >= 0.7 * len(tokens) and codes <= 0.2 * len(tokens)
