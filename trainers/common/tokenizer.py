"""Splits text into the lower-case words and signs that word models predict."""

import re

# What scrubbed text holds instead of things that could identify a person. They are tokens, never words.
PLACEHOLDERS = frozenset({"_name_", "_url_", "_email_", "_ip_", "_path_", "_num_", "_code_"})

# A run of one sign reads as one sign, also inside a word ("so--then" is "so-then"); two dots and more are
# an ellipsis.
_RUN = re.compile(r"([^\w\s])\1+")
# A word is letters and digits of any script, joined by inner apostrophes or hyphens. The underscore
# separates words like a blank; control characters are dropped.
_TOKEN = re.compile(
    "|".join(sorted(PLACEHOLDERS)) + r"|[^\W_]+(?:['-][^\W_]+)*" + r"|\.\.\.|[^\w\s\x00-\x1f\x7f]"
)


def is_placeholder(token: str) -> bool:
    """Whether a token stands for scrubbed text, such as `_url_`, by whatever scrubber it was made."""
    return len(token) > 2 and token[0] == "_" == token[-1]


def tokenize(text: str) -> list[str]:
    """Returns the tokens of a text: words in lower case, and each punctuation sign by itself.

    Runs of one sign become one sign, two dots or more become `...`, placeholders such as `_url_` stay whole.

    >>> tokenize("It's a checksums.md5 file: see _url_ ..!!")
    ["it's", 'a', 'checksums', '.', 'md5', 'file', ':', 'see', '_url_', '...', '!']
    """
    shortened = _RUN.sub(lambda match: "..." if match[1] == "." else match[1], text.lower())
    return _TOKEN.findall(shortened)
