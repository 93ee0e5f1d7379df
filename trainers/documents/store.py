"""A fitted folder: public arrays, networks, candidates' texts and choices, written whole and read back exactly."""

import dataclasses
import json
import math
import pathlib
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from trainers.common import files, run_dir
from trainers.common.errors import InputError
from trainers.documents import networks
from trainers.documents.choices import GROUPS, Choice, group_name
from trainers.documents.config import METHODS, Config
from trainers.documents.data import Encoded
from trainers.documents.public import VOTE_EPSILONS, Public

_GROUPS = tuple(group_name(i) for i in range(len(GROUPS)))
_ARRAYS = ("public.npz", "documents.npz")
_NETWORKS = ("classifier", "recoded_classifier")
_FORMAT = 5
# All that a fit leaves: nothing else may be written over it.
FILES = ("fit.json", *_ARRAYS, "manifest.json", "config.json", "metrics.jsonl")


_DAMAGE = (
    *(AttributeError, KeyError, TypeError, ValueError, RecursionError, OSError, EOFError),
    *(zipfile.BadZipFile, zlib.error),
)


class Fitted(NamedTuple):
    """What `fit` leaves for `release`.

    config: of the fit. public, train, validation: as methods need them. choices: {method: {epsilon: Choice}}.
    scores: {method: {epsilon: macro-F1 on validation}}. encoder: its digest; sentences encoded otherwise do not fit.
    sentences: digests of those of all texts that the fit read as public (`overlap.digests`).
    """

    config: Config
    public: Public
    train: Encoded
    validation: Encoded
    choices: dict[str, dict[str, Choice]]
    scores: dict[str, dict[str, float]]
    encoder: str
    sentences: np.ndarray


def save(folder: pathlib.Path, fitted: Fitted) -> None:
    """Writes `public.npz`, `documents.npz` and, last, `fit.json`: a folder with that file is complete."""
    public = fitted.public
    arrays: dict[str, Any] = {
        name: getattr(public, name)
        for name in (
            "rows", "means", "recoded_means", "directions", "pairs", "principal", "discriminant", "centre", "low",
            "high",
        )
    }  # fmt: skip
    arrays["quantile_percents"] = np.array(list(public.quantiles))
    arrays["quantile_values"] = np.array(list(public.quantiles.values()))
    arrays |= {f"recoder/{k}": v for k, v in _flatten(public.recoder.state).items()}
    classifiers = {name: getattr(public, name) for name in _NETWORKS}
    classifiers |= {f"votes{i}": votes for i, votes in enumerate(public.votes)}
    for name, classifier in classifiers.items():
        arrays |= {f"{name}/{k}": v for k, v in _flatten(classifier.state).items()}
        arrays |= {f"{name}/centre": classifier.centre, f"{name}/scale": np.float64(classifier.scale)}
    with files.atomic_write(folder / "public.npz", "wb") as file:
        np.savez(file, **arrays)
    documents: dict[str, Any] = {"sentences": fitted.sentences}
    for part in ("train", "validation"):
        one: Encoded = getattr(fitted, part)
        documents |= {f"{part}/{k}": getattr(one, k) for k in ("labels", "vectors", "offsets")}
        for name in ("ids", "texts"):
            documents |= {f"{part}/{name}{k}": v for k, v in _packed(getattr(one, name)).items()}
    with files.atomic_write(folder / "documents.npz", "wb") as file:
        np.savez(file, **documents)
    record = {
        "format": _FORMAT,
        "config": dataclasses.asdict(fitted.config),
        "classes": list(fitted.train.classes),
        "choices": plain(fitted.choices),
        "validation_macro_f1": fitted.scores,
        "encoder": fitted.encoder,
        "digests": {name: files.digest(folder / name) for name in _ARRAYS},
    }
    with files.atomic_write(folder / "fit.json") as file:
        json.dump(record, file, indent=2)
        file.write("\n")


def plain(chosen: Mapping[str, Mapping[str, Choice]]) -> dict[str, Any]:
    """Choices as JSON: {method: {epsilon: {"overall": variant, "by_length": {sentences: variant}}}}."""
    return {
        name: {
            e: {"overall": c.overall, "by_length": dict(zip(_GROUPS, c.by_length))} for e, c in row.items()
        }
        for name, row in chosen.items()
    }


def load(folder: pathlib.Path) -> Fitted:
    """Reads a fitted folder.

    Raises:
      InputError: the folder is not one, or its fit was not finished.
    """
    path = folder / "fit.json"
    run_dir.require_command(folder, "documents fit")
    if not path.is_file():
        raise InputError(
            f"{folder} holds no fit.json; make it with `jaxpriv documents fit --run-dir {folder}` (add --resume if it "
            "was interrupted)"
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != _FORMAT:
            raise InputError(
                f"{path} was written by another version of jaxpriv (format {record['format']}, this one reads "
                f"{_FORMAT}); fit again, and keep its ledger.json: what documents have spent stays spent"
            )
        settings: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in record["config"].items()
        }
        config = Config(**settings)
        for name in _ARRAYS:
            if files.digest(folder / name) != record["digests"][name]:
                raise ValueError(f"{name} is not the one that fit.json was written with")
        with np.load(folder / "public.npz") as arrays:
            public = _public(dict(arrays))
        with np.load(folder / "documents.npz") as arrays:
            train, validation = (
                _encoded(arrays, part, tuple(record["classes"])) for part in ("train", "validation")
            )
            sentences = arrays["sentences"]
        chosen = {
            name: {e: Choice(c["overall"], tuple(c["by_length"][n] for n in _GROUPS)) for e, c in row.items()}
            for name, row in record["choices"].items()
        }
        scores: dict[str, dict[str, float]] = record["validation_macro_f1"]
        _check(chosen, scores)
        encoder = str(record["encoder"])
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(f"fitted folder {folder} is damaged ({error}); fit again") from error
    return Fitted(config, public, train, validation, chosen, scores, encoder, sentences)


def _check(chosen: Mapping[str, Mapping[str, Choice]], scores: Mapping[str, Mapping[str, float]]) -> None:
    """Refuses choices of no known method, or that are not of the same epsilons, each with its score."""
    epsilons = next(iter(chosen.values()), {}).keys()
    for name, row in chosen.items():
        if name not in METHODS or name in (METHODS[0], "word_mdp"):
            raise ValueError(f"{name!r} in its choices is no method that releases")
        if not all(isinstance(variant, str) for c in row.values() for variant in (c.overall, *c.by_length)):
            raise ValueError(f"its choices for {name} are no variants")
        if not row or row.keys() != epsilons or not all(0 < float(e) < math.inf for e in row):
            raise ValueError(f"its choices for {name} have the epsilons {', '.join(row) or 'none'}")
        if scores[name].keys() != epsilons or not all(
            isinstance(x, (int, float)) for x in scores[name].values()
        ):
            raise ValueError(f"its validation_macro_f1 of {name} is not that of its choices")


def _public(arrays: dict[str, np.ndarray]) -> Public:
    """The public side from its arrays; networks get their sizes from their kernels."""

    def state(name: str) -> tuple[nnx.GraphDef, nnx.State]:
        first, second = arrays[f"{name}/first.kernel"], arrays[f"{name}/second.kernel"]
        shape = (first.shape[0], first.shape[1], second.shape[1])
        graph, state = nnx.split(networks.MLP(*shape, nnx.Rngs(0)))
        pure = {
            layer: {part: jax.numpy.asarray(arrays[f"{name}/{layer}.{part}"]) for part in ("kernel", "bias")}
            for layer in ("first", "second")
        }
        nnx.replace_by_pure_dict(state, pure)
        return graph, state

    plain: dict[str, Any] = {k: v for k, v in arrays.items() if "/" not in k and not k.startswith("quantile")}

    def classifier(name: str) -> networks.Classifier:
        return networks.Classifier(*state(name), arrays[f"{name}/centre"], float(arrays[f"{name}/scale"]))

    found: dict[str, Any] = {name: classifier(name) for name in _NETWORKS}
    found["votes"] = tuple(classifier(f"votes{i}") for i in range(len(VOTE_EPSILONS)))
    quantiles = dict(zip(arrays["quantile_percents"].tolist(), arrays["quantile_values"].tolist()))
    return Public(**plain, **found, recoder=networks.Recoder(*state("recoder")), quantiles=quantiles)


def _encoded(arrays: Any, part: str, classes: tuple[str, ...]) -> Encoded:
    return Encoded(
        _unpacked(arrays, f"{part}/ids"),
        _unpacked(arrays, f"{part}/texts"),
        arrays[f"{part}/labels"],
        classes,
        arrays[f"{part}/vectors"],
        arrays[f"{part}/offsets"],
    )


def _packed(texts: list[str]) -> dict[str, np.ndarray]:
    """UTF-8 bytes one after another and where each text ends: as large as the texts, however long one of them is."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    ends = np.cumsum([len(one) for one in encoded], dtype=np.int64)
    return {"": np.frombuffer(b"".join(encoded), np.uint8), "/ends": ends}


def _unpacked(arrays: Any, name: str) -> list[str]:
    data, ends = arrays[name].tobytes(), arrays[f"{name}/ends"].tolist()
    return [data[a:b].decode("utf-8", "surrogatepass") for a, b in zip([0, *ends], ends)]


def _flatten(state: nnx.State) -> dict[str, np.ndarray]:
    return {
        f"{layer}.{part}": np.asarray(value)
        for layer, parts in nnx.to_pure_dict(state).items()
        for part, value in parts.items()
    }
