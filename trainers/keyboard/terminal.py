"""Typing in the terminal with suggestions under the line."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from trainers.common.errors import InputError
from trainers.keyboard.suggest import Suggester, being_typed

HELP = "Tab or 1-3 takes a word, right arrow the completion, Enter begins anew, Ctrl-D ends."
_BACKSPACE, _END, _RIGHT = ("\x7f", "\b"), ("\x04", ""), "\x1b[C"


def edit(text: str, key: str, suggestions: list[str], completion: list[str]) -> str | None:
    """The text after a key; None ends. Taking a word replaces the letters typed so far and adds a blank."""
    typed = being_typed(text)
    if key in _END:
        return None
    if key in ("\r", "\n"):
        return ""
    if key in _BACKSPACE:
        return text[:-1]
    if key == _RIGHT:
        kept = text[: len(text) - len(typed)] if completion else text
        return kept + "".join(word + " " for word in completion)
    choice = 0 if key == "\t" else int(key) - 1 if key.isdecimal() and key != "0" else None
    if choice is not None and choice < len(suggestions):
        return text[: len(text) - len(typed)] + suggestions[choice] + " "
    return text + key if key.isprintable() else text


def type_with(
    suggester: Suggester, offer: Callable[[str], list[str]], complete: Callable[[str], list[str]]
) -> None:
    """Reads keys until Ctrl-D and shows, under the text, the words offered, and the completion behind it.

    Args:
      offer, complete: words for the letters of the word being typed, "" before its first.
    """
    out = sys.stdout
    out.write(HELP + "\n\n")
    text: str | None = ""
    with _single_keys() as keys:
        while text is not None:
            letters = suggester.read(text)
            suggestions = offer(letters)
            completion = complete(letters) if text else []
            numbered = "   ".join(f"{i} {word}" for i, word in enumerate(suggestions, 1))
            ahead = " ".join(completion)[len(letters) :]
            grey = f"\x1b[90m{ahead}\x1b[0m" if ahead else ""
            # Back to the text's line, both lines cleared and written, the cursor left after the text.
            out.write(
                f"\r\x1b[J{text}{grey}\n  \x1b[36m{numbered}\x1b[0m\x1b[A\r\x1b[{len(text)}C"
                if text
                else f"\r\x1b[J\n  \x1b[36m{numbered}\x1b[0m\x1b[A\r"
            )
            out.flush()
            text = edit(text, next(keys), suggestions, completion)
    out.write("\x1b[J\n")


@contextlib.contextmanager
def _single_keys() -> Iterator[Iterator[str]]:
    """Keys as they are pressed, unechoed; the terminal is put back whatever happens."""
    try:
        import termios
        import tty
    except ImportError:
        raise InputError("this terminal cannot be read key by key; give --text or pipe lines in") from None
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def keys() -> Iterator[str]:
        while True:
            pressed = os.read(number, 8).decode("utf-8", "ignore")
            if pressed.startswith("\x1b"):
                yield pressed
            else:
                yield from pressed or [""]

    try:
        tty.setcbreak(number)
        yield keys()
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
