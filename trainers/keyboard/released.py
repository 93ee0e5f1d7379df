"""A trained model on its way to a phone: parameters, vocabulary and guarantee, from a run folder or one file.

The file is safetensors; its metadata hold the sizes, the words and the privacy statement. Nothing secret and
nothing that is not covered by the statement goes into it.
"""

import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from accounting import PrivacyStatement, reporting
from trainers.common import files, run_dir, statements, tensors
from trainers.common.errors import InputError
from trainers.common.vocabulary import Vocabulary
from trainers.keyboard import model
from trainers.keyboard.model import ModelConfig, Params

FORMAT = "jaxpriv keyboard model 1"


class Released(NamedTuple):
    """statement: what `privacy.json` says. rounds: released rounds that the parameters come after."""

    params: Params
    sizes: ModelConfig
    vocabulary: Vocabulary
    statement: dict[str, Any]
    rounds: int


def load(source: files.PathLike) -> Released:
    """The model of a run folder (its newest whole checkpoint) or of an exported .safetensors file.

    Raises:
      InputError: neither, or damaged; one line says what.
    """
    path = pathlib.Path(source)
    if path.is_dir():
        return _from_run(path)
    return _from_file(files.existing_file(path, "model"))


def _from_run(path: pathlib.Path) -> Released:
    from trainers.keyboard import (
        session,  # its runs measure completions, which are made of this module's models
    )

    found = session.trained(path)
    statement = dict(reporting.report(found.run).data)
    return Released(found.params, found.sizes, found.vocabulary, statement, found.rounds)


def save(path: files.PathLike, released: Released) -> None:
    """Writes the file, whole or not at all."""
    metadata = {
        "format": FORMAT,
        "sizes": json.dumps(dataclasses.asdict(released.sizes)),
        "words": json.dumps(released.vocabulary.words, ensure_ascii=False),
        "words_origin": released.vocabulary.origin,
        "rounds": str(released.rounds),
        "privacy": json.dumps(released.statement, ensure_ascii=False),
    }
    arrays = {name: np.asarray(value) for name, value in released.params.items()}
    metadata["digest"] = _digest(arrays, metadata)
    tensors.write(path, arrays, metadata)


def _from_file(path: pathlib.Path) -> Released:
    try:
        arrays, metadata = tensors.read(path)
    except ValueError as error:
        raise InputError(f"{path} is not a whole safetensors file ({error}); export it again") from None
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path} is not a keyboard model ({FORMAT}); make one with keyboard export")
    if metadata.pop("digest", None) != _digest(arrays, metadata):
        raise InputError(f"{path} is damaged: its contents are not what was written; export it again")
    try:
        sizes = ModelConfig(**json.loads(metadata["sizes"]))
        vocabulary = Vocabulary(tuple(json.loads(metadata["words"])), metadata["words_origin"])  # pyright: ignore[reportArgumentType]
        statement, rounds = json.loads(metadata["privacy"]), int(metadata["rounds"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: its metadata are damaged ({error}); export it again") from None
    template = model.init_params(sizes, seed=0)
    shapes = {name: value.shape for name, value in template.items()}
    if {name: value.shape for name, value in arrays.items()} != shapes or vocabulary.size != sizes.num_tokens:
        raise InputError(f"{path}: its arrays do not fit its sizes; export it again")
    if not all(value.dtype == np.float32 and np.isfinite(value).all() for value in arrays.values()):
        raise InputError(f"{path} holds parameters that are no finite float32 numbers; export it again")
    params = {name: jnp.asarray(value) for name, value in arrays.items()}
    return Released(params, sizes, vocabulary, statement, rounds)


def _digest(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> str:
    """SHA-256 of everything in the file."""
    parts: list[bytes | str] = []
    for name in sorted(arrays):
        parts += [name, f"{arrays[name].dtype}{arrays[name].shape}", arrays[name].tobytes()]
    for name in sorted(metadata):
        parts += [name, metadata[name]]
    return files.digest_of(*parts)


def export(source: files.PathLike, output: files.PathLike) -> Released:
    """Writes the model of a run folder to `output`, and its statement beside it (OUTPUT.privacy.json and .md).

    Raises:
      InputError: `output` exists already or is not named .safetensors, or the run has no model yet.
    """
    folder, target = run_dir.require(source, "keyboard"), pathlib.Path(output)
    if target.suffix != ".safetensors":
        raise InputError(f"--output {output} must end in .safetensors")
    if target.exists():
        raise InputError(f"{output} exists already; choose another --output")
    released = load(folder)
    statements.write(PrivacyStatement(released.statement), target)
    save(target, released)
    return released
