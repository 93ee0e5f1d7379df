"""`jaxpriv translation attack`: what a memory gives away to another member, measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpriv import keys
from trainers.common import files, parallel_text
from trainers.common.errors import InputError
from trainers.translation import attack, corpora, data, datastore, facts, report, retrieval
from trainers.translation.config import MAX_WINDOW, Required, RequiredMany


@dataclass(frozen=True, kw_only=True)
class AttackConfig:
    """Measure leakage: one member trains an inverse model on its own records and tries it on the others';
    a guesser looks for exact codes; values that occur in one sentence, or at one member only, are counted."""

    model: str = "runs/translation/public"
    """Folder of the public model."""
    codebook: str | None = None
    """The server's codebook; without it plain keys alone are attacked."""
    attacker: Required = ""
    """The attacking member's pairs: FILE or FILE:sub=a,b."""
    defender: RequiredMany = ()
    """The others' pairs: NAME=FILE, one word a member."""
    source_field: str = "en"
    """Field (or language) of the source side."""
    target_field: str = "de"
    """Field (or language) of the target side."""
    window: int = 8
    """Pieces before a record that the attack tries to write, at most 64."""
    sentences: int = 1000
    """Train pairs of each member that are used."""
    steps: int = 1000
    """Updates of the inverse model."""
    output: str | None = None
    """Markdown file for the table and the samples (it holds private text)."""
    seed: int = 0
    """Of the inverse model."""
    skip_bad: bool = False
    """Leave bad records out, rather than stop at the first."""
    json: bool = False
    """Print one JSON object as the last line (without samples)."""


def run_attack(config: AttackConfig) -> tuple[dict[str, Any], str]:
    """Reconstruction with plain and coded keys, membership, rare values; BLEU and F1 in percent."""
    if not config.attacker or not config.defender:
        raise InputError("--attacker FILE and --defender NAME=FILE are needed")
    for name in ("window", "sentences", "steps"):
        if getattr(config, name) < 1:
            raise InputError(f"--{name} must be at least 1, got {getattr(config, name)}")
    if config.window > MAX_WINDOW:
        raise InputError(f"--window must be at most {MAX_WINDOW}, got {config.window}")
    if not 0 <= config.seed < 2**32:
        raise InputError(f"--seed must be in [0, 2^32), got {config.seed}")
    if config.output is not None:
        files.require_new(config.output, "--output")
    named = [corpora.parse_client(text) for text in config.defender]
    if len({name for name, _ in named}) < len(named):
        raise InputError("--defender names a member twice; give each its own name")
    model = data.load(config.model)
    codebook = None if config.codebook is None else datastore.load_codebook(config.codebook, model.digest)
    coded = facts.facts_of(model, codebook)
    own, _, _ = _entries(config, model, config.attacker)
    members = {victim: _entries(config, model, source) for victim, source in named}
    for victim, (_, guesses, inside) in members.items():
        if len(np.unique(guesses.sentences)) == len(inside):
            raise InputError(
                f"--defender {victim} has no test pair: membership compares train pairs with others; give a test file"
            )
    # What everyone holds after the exchange: the records of all members.
    joint = [own, *(theirs for theirs, _, _ in members.values())]
    memory_keys = np.concatenate([datastore.encode(coded, codebook, part.keys) for part in joint])
    memory_values = np.concatenate([part.values for part in joint])
    result: dict[str, Any] = {"reconstruction": {}, "membership": {}, "rare_values": {}}
    lines = ["| defender | keys | BLEU | precision | recall | F1 | F1 without a key |", "|" + " --- |" * 7]
    samples: list[str] = []
    own_text = attack.windows(own.values, own.sentences, length=config.window)
    ways = {"plain": lambda k: k}
    if codebook is not None:
        ways["coded"] = lambda k: np.asarray(
            datastore.decode(coded, codebook, datastore.encode(coded, codebook, k))
        )
    inverses = {
        name: attack.fit_inverse(
            keys.stream(keys.root(config.seed), f"translation-attack-{name}"),
            way(own.keys),
            own_text,
            vocabulary_size=len(model.vocabulary),
            steps=config.steps,
        )
        for name, way in ways.items()
    }
    rare = attack.rare_values([(part.values, part.sentences) for part in joint])[1:]
    for (victim, (theirs, guesses, members_of)), seldom in zip(members.items(), rare):
        hidden = attack.windows(theirs.values, theirs.sentences, length=config.window)
        for name, way in ways.items():
            told = attack.reconstruct(
                inverses[name], way(theirs.keys), hidden, own_text, model.vocabulary.decode
            )
            row = {f: getattr(told, f) for f in ("bleu", "precision", "recall", "f1", "baseline_f1")}
            result["reconstruction"].setdefault(victim, {})[name] = row
            lines.append(f"| {victim} | {name} | " + " | ".join(f"{v:.2f}" for v in row.values()) + " |")
            samples += [f"- {victim}, {name}: `{truth}` read as `{guess}`" for truth, guess in told.samples]
        guessed = datastore.encode(coded, codebook, guesses.keys)
        inside = np.isin(guesses.sentences, members_of)
        found = attack.membership(
            memory_keys,
            memory_values,
            (guessed[inside], guesses.values[inside], guesses.sentences[inside]),
            (guessed[~inside], guesses.values[~inside], guesses.sentences[~inside]),
            lambda k: datastore.decode(coded, codebook, np.asarray(k)),
        )
        result["membership"][victim] = found._asdict()
        result["rare_values"][victim] = seldom._asdict()
        lines.append("")
        lines.append(
            f"{victim}: {found.members_found:.1f} % of its sentences are found by their exact records, "
            f"{found.others_found:.1f} % of others; AUC {found.auc:.3f}; "
            f"{seldom.in_one_sentence} of its values occur in one sentence of all members' only ({seldom.records} of "
            f"its {len(theirs.values)} records), {seldom.in_no_other_client} at no other member."
        )
    result["guarantee"] = report.GUARANTEE["fednn"]
    shown = "\n".join([*lines, "", report.GUARANTEE["fednn"]])
    if config.output is not None:
        with files.atomic_write(config.output, permissions=0o600) as file:
            file.write("\n".join([shown, "", *samples]) + "\n")
    return result, shown if config.json else "\n".join([shown, "", *samples])


def _entries(
    config: AttackConfig, model: data.Model, text: str
) -> tuple[retrieval.Entries, retrieval.Entries, np.ndarray]:
    """`(records, guesses, members)`: of a member's train pairs, as it would store them; of guessed pairs, these and
    some that it does not hold, mixed and sent through the model anew, as a guesser would; which guesses are members.
    """
    path, subs = corpora.parse_source(text)
    splits, _ = parallel_text.read_pair_splits(
        path,
        source_field=config.source_field,
        target_field=config.target_field,
        sub=subs,
        skip_bad=config.skip_bad,
    )
    kept = model.vocabulary.examples(splits.train[: config.sentences])
    other = model.vocabulary.examples(splits.test[: config.sentences])
    if not kept:
        raise InputError(f"{text}: no train pair; give more")
    mixed = np.random.default_rng(config.seed).permutation(len(kept) + len(other))
    guesses = [(kept + other)[i] for i in mixed]
    return (
        retrieval.all_entries(model.graphdef, model.params, kept),
        retrieval.all_entries(model.graphdef, model.params, guesses),
        np.flatnonzero(mixed < len(kept)),
    )
