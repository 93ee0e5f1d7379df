"""What command lines share: the names of noise mechanisms, whichever spelling was typed, and refusals on one line."""

import os
import re
from collections.abc import Mapping, Sequence

# One mechanism, whatever a paper, a picture or another command calls it: as `_plain` writes names.
_ALSO_CALLED = {
    "bandmf": "banded",
    "band_mf": "banded",
    "banded_mf": "banded",
    "banded_toeplitz": "banded",
    "buffered_linear_toeplitz": "blt",
    "tree_aggregation": "tree",
    "honaker": "tree_reduced",
    "tree_reduced_honaker": "tree_reduced",
    "dp_sgd": "independent",
}


def spelled(name: str, listed: Sequence[str]) -> str:
    """The name among `listed` that is meant: "BandMF", "bandmf" and "banded" are one; one that is not there stays.

    >>> spelled("BandMF", ("tree", "banded")), spelled("banded_square_root", ("banded square root",))
    ('banded', 'banded square root')
    """
    if name in listed:
        return name
    return next((one for one in listed if _plain(one) == _plain(name)), name)


def _plain(name: str) -> str:
    text = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return _ALSO_CALLED.get(text, text)


def with_names(argv: Sequence[str], listed: Mapping[str, Sequence[str]]) -> list[str]:
    """The words of a command line, the values of some options (option: its names) spelled as listed; files stay."""

    def value(word: str, option: str) -> str:
        return word if os.path.exists(word) else spelled(word, listed[option])

    found, option = [], ""
    for word in argv:
        name, equals, text = word.partition("=")
        if word.startswith("--"):
            option = name if name in listed else ""
            found.append(f"{name}={value(text, option)}" if option and equals else word)
        else:
            found.append(value(word, option) if option else word)
    return found


def one_line(box: str) -> str:
    """What tyro's boxed message says, on one line: without its title, and of the options that it lists the names."""
    lines = [re.sub(r"^│ ?|\s*│?$", "", line) for line in box.splitlines() if line[:1] not in "╭╰"]
    sections = re.split(r"^ *[─-]{9,} *$", "\n".join(lines), flags=re.MULTILINE)
    if "╭" not in box:  # where letters are ASCII there are rules alone, and the title is a section
        sections = sections[1:] or sections
    parts = []
    for section in sections:
        first, *rest = section.strip().splitlines() or [""]
        if first.startswith("For full helptext"):
            continue
        options = [line.strip() for line in rest if re.match(r"\s+--\S", line)]
        if first.startswith("Argument helptext"):
            parts.append(" ".join(line.strip() for line in rest))
        elif first.endswith(":") and options:
            parts.append(f"{first} {', '.join(options)}")
        else:
            parts.append(" ".join(line.strip() for line in (first, *rest)).rstrip("."))
    return "; ".join([*(filter(None, parts) if any(parts) else ["the options cannot be read"]), "see --help"])
