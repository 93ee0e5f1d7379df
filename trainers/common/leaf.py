"""Reads LEAF JSON (Caldas et al. 2018, arXiv:1812.01097): `{users, num_samples, user_data: {user: {x, y}}}`.

Text comes as windows of words (`y` is `x` shifted by one), as nested windows with `target_tokens`, or as
strings.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainers.common import tables
from trainers.common.errors import InputError
from trainers.common.tables import Row

_MARKS = frozenset(
    {"<BOS>", "<EOS>", "<PAD>"}
)  # of LEAF's own preprocessing; <OOV> stays, it is a word's place


def is_leaf(path: Path) -> bool:
    """Whether a .json file begins like LEAF: an object that names users, num_samples or user_data."""
    for _, text, _ in tables.lines(path):
        if text is None or text.strip():
            head = (text or "").lstrip()[:2000]
            rest = head.removeprefix("{").lstrip()
            if head.startswith("{") and not rest:  # pretty-printed: the key is on the next line
                continue
            return rest.startswith(('"users"', '"num_samples"', '"user_data"', '"hierarchies"'))
    return False


def rows(path: Path) -> Iterator[Row]:
    """Yields one record a user, with its examples as `tokens` (lists of words) or as `text`."""
    parts = []
    for number, text, problem in tables.lines(path):
        if text is None:
            raise InputError(f"{path}, line {number}: {problem}; save the file as UTF-8")
        parts.append(text)
    try:
        data = json.loads("\n".join(parts))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); copy it again") from error
    users, user_data = data.get("users"), data.get("user_data")
    if not isinstance(users, list) or not isinstance(user_data, dict):
        raise InputError(f"{path}: LEAF needs a list `users` and an object `user_data`; one is missing")
    promised = data.get("num_samples")
    seen = set()
    for number, user in enumerate(users):
        where = f"user {user!r}"
        content = user_data.get(user) if isinstance(user, str) else None
        if not isinstance(content, dict) or not isinstance(content.get("x"), list):
            yield Row(where, None, "no list `x` in user_data")
            continue
        if user in seen:
            yield Row(where, None, "stands twice in `users`, so its examples would count twice")
            continue
        seen.add(user)
        x, y = content["x"], content.get("y")
        if isinstance(promised, list) and number < len(promised) and promised[number] != len(x):
            yield Row(where, None, f"num_samples says {promised[number]}, user_data holds {len(x)} examples")
            continue
        if not isinstance(y, list) or len(y) != len(x):
            y = [None] * len(x)
        examples = [_examples(sample, target) for sample, target in zip(x, y)]
        if any(e is None for e in examples):
            yield Row(where, None, "an example that is no text (LEAF's image sets hold numbers)")
        elif x and isinstance(x[0], str):
            yield Row(where, {"client_id": user, "text": [e for one in examples for e in one or ()]})
        else:
            lists = [e for one in examples for e in one or ()]
            yield Row(where, {"client_id": user, "tokens": lists, "text": [" ".join(e) for e in lists]})


def _examples(sample: Any, target: Any) -> list[Any] | None:
    """The utterances of one sample, or None where it is no text."""
    if isinstance(sample, str):
        return [sample + target if isinstance(target, str) and len(target) == 1 else sample]
    if not isinstance(sample, list):
        return None
    if all(isinstance(word, str) for word in sample):
        words = list(sample)
        if isinstance(target, list) and target and isinstance(target[-1], str):
            words.append(target[-1])  # the window's last word stands only in y
        return [[word for word in words if word not in _MARKS]]
    if all(isinstance(window, list) for window in sample):
        shifted = target.get("target_tokens") if isinstance(target, dict) else target
        pairs = zip(sample, shifted) if isinstance(shifted, list) and len(shifted) == len(sample) else None
        nested = [_examples(w, t) for w, t in pairs] if pairs else [_examples(w, None) for w in sample]
        return None if any(n is None for n in nested) else [e for n in nested for e in n or ()]
    return None
