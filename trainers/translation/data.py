"""The joint vocabulary, and the folder that holds a released translation model."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece
from flax import nnx

from trainers.common import files, metrics
from trainers.common.errors import InputError
from trainers.common.pairs import Pair
from trainers.translation import model as models
from trainers.translation.batches import Example
from trainers.translation.config import ModelConfig
from trainers.translation.model import END, PAD, UNK

VOCABULARY, WEIGHTS, FACTS, TRAINED_ON = "vocabulary.model", "model.npz", "model.json", "trained_on.npz"


class Vocabulary:
    """SentencePiece pieces shared by both languages: PAD 0, UNK 1, END 2, bytes for characters never seen."""

    def __init__(self, model: bytes):
        self.model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise InputError(f"not a SentencePiece model: {str(error)[:80]}") from error
        ids = (self._processor.pad_id(), self._processor.unk_id(), self._processor.eos_id())
        if ids != (PAD, UNK, END):
            raise InputError(
                f"the SentencePiece model has pad, unk, eos = {ids}; train it with {PAD}, {UNK}, {END}"
            )

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    def encode(self, texts: Iterable[str]) -> list[np.ndarray]:
        """Pieces of each text, without an end mark; a blank text has none."""
        return [np.asarray(p, np.int32) for p in self._processor.encode([t.strip() for t in texts])]

    def decode(self, sequences: Iterable[Sequence[int] | np.ndarray]) -> list[str]:
        """Texts of piece sequences; END and PAD are dropped, and no text holds a line end."""
        kept = [[int(p) for p in s if p not in (PAD, END)] for s in sequences]
        return [" ".join(self._processor.decode(s).split()) if s else "" for s in kept]

    def examples(self, pairs: Sequence[Pair]) -> list[Example]:
        """Both sides of every pair as pieces."""
        sources = self.encode(p.source for p in pairs)
        targets = self.encode(p.target for p in pairs)
        return [Example(s, t) for s, t in zip(sources, targets)]


def train_vocabulary(texts: Iterable[str], size: int) -> Vocabulary:
    """A BPE vocabulary of `size` pieces over the public text of both languages, with byte fallback.

    Raises:
      InputError: the text is too small for so many pieces (or `size` for the characters in it).
    """
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=out,
            vocab_size=size,
            model_type="bpe",
            character_coverage=0.9998,
            byte_fallback=True,
            normalization_rule_name="identity",
            pad_id=PAD,
            unk_id=UNK,
            eos_id=END,
            bos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].rpartition("]")[2].strip()
        raise InputError(
            f"cannot train a vocabulary of {size} pieces on this text ({reason}); change --vocabulary-size"
        ) from error
    return Vocabulary(out.getvalue())


class Model(NamedTuple):
    """A translation model ready for use. digest: SHA-256 over weights, vocabulary and shape: what a store
    names.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    params: Any
    vocabulary: Vocabulary
    digest: str


def digest(config: ModelConfig, params: Any, vocabulary: Vocabulary) -> str:
    """SHA-256 of everything that keys depend on."""
    leaves = [np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
    return files.digest_of(json.dumps(dataclasses.asdict(config), sort_keys=True), vocabulary.model, *leaves)


def make(config: ModelConfig, params: Any, vocabulary: Vocabulary) -> Model:
    """Puts a model together; `params` may be of any array type."""
    params = jax.tree.map(jnp.asarray, params)
    return Model(config, models.abstract(config)[0], params, vocabulary, digest(config, params, vocabulary))


def save(folder: files.PathLike, model: Model, **facts: Any) -> None:
    """Writes the model into a folder, each file whole; `model.json` comes last and makes it valid."""
    root = pathlib.Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(root / VOCABULARY, "wb") as file:
        file.write(model.vocabulary.model)
    save_params(root / WEIGHTS, model.params)
    with files.atomic_write(root / FACTS) as file:
        record = {"model": dataclasses.asdict(model.config), "digest": model.digest, **facts}
        json.dump(metrics.plain(record), file, indent=1)
        file.write("\n")


def save_trained_on(folder: files.PathLike, sides: np.ndarray) -> None:
    """Writes what a model was trained on, as `corpora.side_digests`: what whoever takes the model can compare with."""
    with files.atomic_write(pathlib.Path(folder) / TRAINED_ON, "wb") as file:
        np.savez(file, sides=sides)


def trained_on(folder: files.PathLike) -> np.ndarray | None:
    """The digests of both sides of all pairs that a model was trained on; None where its folder does not say."""
    path = pathlib.Path(folder) / TRAINED_ON
    if not path.is_file():
        return None
    sides = load_arrays(path).get("sides")
    if sides is None or sides.dtype != np.uint64 or sides.ndim != 1:
        raise InputError(f"{path} does not say what the model was trained on; copy the folder anew")
    return sides


def load(folder: files.PathLike) -> Model:
    """The model in a folder.

    Raises:
      InputError: a file is missing, or the weights are not those that `model.json` names.
    """
    root = pathlib.Path(folder)
    if not root.is_dir():
        raise InputError(f"model folder {root} does not exist; `jaxpriv translation train` makes one")
    try:
        facts = json.loads(files.existing_file(root / FACTS, "model description").read_text(encoding="utf-8"))
        config = ModelConfig(**facts["model"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{root / FACTS} describes no model ({error}); copy the folder anew") from error
    vocabulary = Vocabulary(files.existing_file(root / VOCABULARY, "vocabulary").read_bytes())
    params = load_params(files.existing_file(root / WEIGHTS, "weights"), models.abstract(config)[1])
    model = make(config, params, vocabulary)
    if model.digest != facts.get("digest"):
        raise InputError(f"{root}: weights or vocabulary differ from what model.json names; copy it anew")
    return model


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def save_params(path: files.PathLike, params: Any, *, permissions: int = 0o644) -> None:
    """Writes a pytree of arrays as .npz, whole or not at all."""
    with files.atomic_write(path, "wb", permissions=permissions) as file:
        arrays: dict[str, Any] = dict(zip(_names(params), map(np.asarray, jax.tree.leaves(params))))
        np.savez(file, **arrays)


def load_arrays(path: files.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name; InputError if it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise InputError(f"weights {path} cannot be read ({error}); copy them anew") from error
    except Exception as error:  # zipfile.BadZipFile has no base beside Exception
        raise InputError(f"weights {path} are damaged ({error}); copy them anew") from error


def load_params(path: files.PathLike, like: Any) -> Any:
    """Reads what `save_params` wrote, in the structure of `like` (arrays or shapes).

    Raises:
      InputError: damaged, or of another shape.
    """
    found = load_arrays(path)
    leaves, tree = jax.tree.flatten(like)
    names = _names(like)
    if set(found) != set(names) or any(found[n].shape != leaf.shape for n, leaf in zip(names, leaves)):
        raise InputError(f"weights {path} are of another model shape than the description beside them")
    return jax.tree.unflatten(tree, [jnp.asarray(found[name]) for name in names])
