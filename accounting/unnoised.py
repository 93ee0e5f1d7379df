"""Folders that this project writes without noise: runs and memories of translation, which have no guarantee, and fits
of documents, which release nothing private."""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from accounting import _json, evidence
from accounting.statement import PrivacyStatement, no_guarantee

PathLike = str | os.PathLike[str]
_MANIFEST = "manifest.json"
_MEMORY = "jaxpriv datastore "  # begins the format of its manifest
_TRANSLATION, _FIT, _EVALUATION = "translation train", "documents fit", "documents evaluate"
_CODED = {
    "none": "its keys are representations of private text as they are",
    "pca": "its keys are projections of representations of private text",
    "pq": "its keys are codes of representations of private text, which are compression: whoever holds the public "
    "model and the codebook can look for a guessed sentence",
}
_VALUES = "its values are pieces of private text as they are"


def statement_of(path: PathLike) -> PrivacyStatement | None:
    """That there is no guarantee, with the folder's own reasons; None where it is no such folder, or has a statement.

    Args:
      path: the folder, or its privacy.json.

    Raises:
      ValueError: nothing private was released from it; says what to report instead.
    """
    where = pathlib.Path(path)
    folder = where.parent if where.name == evidence.STATEMENT_FILE else where
    made, said = (
        _json.read_object(folder / _MANIFEST) or {},
        _json.read_object(folder / evidence.STATEMENT_FILE),
    )
    if said is not None and "guarantee" not in said:
        return None  # a statement of this project, or something else
    command = str(made.get("command", "")).removeprefix("jaxpriv ")
    if command == _FIT:
        raise ValueError(
            f"{folder} is a fit on public documents, which releases nothing private: there is nothing to report here. "
            "Report what `jaxpriv documents release` wrote with it: its --output, with its .privacy.json beside it "
            "(its ledger counts what each document has spent in all)"
        )
    if command == _EVALUATION and said is None:
        raise ValueError(
            f"{folder} is an evaluation that has not finished, and its statement comes at its end: go on with it "
            "(jaxpriv documents evaluate --resume)"
        )
    if str(made.get("format", "")).startswith(_MEMORY):
        return no_guarantee(unit="sentence", reasons=_of_memory(made))
    if command == _TRANSLATION or said is not None:
        return no_guarantee(unit="sentence", reasons=_of_run(said or {}))
    return None


def _of_memory(made: Mapping[str, Any]) -> list[str]:
    if made.get("weighted"):
        return [
            "its noisy counts have no statement beside them, or none that can be made for all of them together"
        ]
    return [_CODED.get(str(made.get("coding")), _CODED["none"]), _VALUES]


def _of_run(said: Mapping[str, Any]) -> list[str]:
    """One reason for each kind of method, with the methods that it is about."""
    guarantee = said.get("guarantee")
    about: dict[str, list[str]] = {}
    for method, words in guarantee.items() if isinstance(guarantee, Mapping) else ():
        reason = re.sub(r"^\((.*)\)", r"\1", str(words).removeprefix("epsilon: none "))
        about.setdefault(reason, []).append(str(method))
    reasons = [f"{', '.join(methods)}: {words}" for words, methods in about.items()]
    return reasons or ["no method of a translation run adds noise; this one has not finished"]
