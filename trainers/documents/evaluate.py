"""Measure: macro-F1 of every method against epsilon, sentences a document, and number of candidates.

`jaxpriv documents evaluate` runs this on the embedded docstrings in a few minutes; it reports, for each
method and epsilon, the variant that validation documents chose, and its mean and spread over trials.
"""

import json
import pathlib
from typing import Any

import jax
import numpy as np

from jaxpriv import keys
from trainers.common import files, metrics, progress
from trainers.documents import choices, methods, networks, word_mdp
from trainers.documents.config import Config, named
from trainers.documents.data import Encoded
from trainers.documents.encoder import SentenceEncoder
from trainers.documents.public import Public

_LEAST_WORDS = 30  # documents: on fewer, scores are chance
CEILING = "deepest_candidate (no privacy)"
BIN_EPSILON = 10.0


def sweep(
    config: Config,
    public: Public,
    train: Encoded,
    validation: Encoded,
    test: Encoded,
    root: jax.Array,
    writer: metrics.Writer,
    done: list[dict[str, Any]],
) -> None:
    """Writes one record a method and epsilon: variant, macro-F1 of each trial, per bin, per number of candidates."""
    finished = {(r["method"], r.get("epsilon")) for r in done}
    num_classes = len(test.classes)
    if CEILING in config.methods and "deepcandidate" not in config.methods:
        ceiling = methods.build(_with(config, ("deepcandidate",)), public, train, validation)["deepcandidate"]
    else:
        ceiling = None
    built = methods.build(config, public, train, validation)
    todo = [(n, m) for n, m in built.items() if any((n, e) not in finished for e in config.epsilons)]
    bar = progress.bar(total=len(todo) * len(config.epsilons), what="methods", unit="epsilon")
    for name, method in todo:
        on_validation, on_test = (method.prepare(x, method.variants) for x in (validation, test))
        if name == "deepcandidate" and CEILING in config.methods and (CEILING, None) not in finished:
            writer.write(**_ceiling(method, on_validation, on_test, validation, test))
        for epsilon in config.epsilons:
            bar.update()
            if (name, epsilon) in finished:
                continue
            method.check(epsilon, test, "--epsilons")
            choice, validation_score = choices.choose(method, on_validation, validation, root, epsilon)
            predictions = []
            for trial in range(config.trials):
                stream = keys.for_round(keys.stream(root, f"test {name} {named(epsilon)}"), trial)
                key_rows = jax.random.split(stream, len(test.ids))
                predictions.append(choices.predict(method, on_test, test.counts, key_rows, epsilon, choice))
            record: dict[str, Any] = {
                "method": name,
                "epsilon": epsilon,
                "variant": choice.overall,
                "by_length": dict(zip(map(choices.group_name, range(len(choices.GROUPS))), choice.by_length)),
                "validation": validation_score,
                "trials": [networks.macro_f1(test.labels, p, num_classes) for p in predictions],
            }
            if epsilon == BIN_EPSILON:
                record["bins"] = _by_bin(test, predictions)
                if method.draws:
                    record["candidates"] = _by_candidates(method, on_test, test, root, epsilon, choice)
            writer.write(**record)
    bar.close()
    if ceiling is not None and (CEILING, None) not in finished:
        on_validation, on_test = (ceiling.prepare(x, ceiling.variants) for x in (validation, test))
        writer.write(**_ceiling(ceiling, on_validation, on_test, validation, test))


def _with(config: Config, names: tuple[str, ...]) -> Config:
    import dataclasses

    return dataclasses.replace(config, methods=names)


def _ceiling(
    method: methods.Method, on_validation: Any, on_test: Any, validation: Encoded, test: Encoded
) -> dict:
    """The deepest candidate without privacy: what DeepCandidate comes to as epsilon grows."""

    def score(prepared, documents, variant):
        deepest = methods.Released(np.zeros((0, 0), np.float32), prepared[variant].argmax(1))
        return networks.macro_f1(documents.labels, method.predict(deepest, 0.0, variant), len(test.classes))

    variant = max(method.variants, key=lambda v: score(on_validation, validation, v))
    return {"method": CEILING, "epsilon": None, "variant": variant, "trials": [score(on_test, test, variant)]}


def _by_bin(test: Encoded, predictions: list[np.ndarray]) -> dict[str, dict[str, float]]:
    """Macro-F1 by number of sentences, over the trials, with the number of documents; those of 0 and 1 apart."""
    out = {}
    for group, (low, _) in enumerate(choices.GROUPS):
        rows = (choices.group_of(test.counts) == group) & (test.counts >= low)
        if rows.any():
            scores = [networks.macro_f1(test.labels[rows], p[rows], len(test.classes)) for p in predictions]
            out[choices.group_name(group)] = {"documents": int(rows.sum()), "mean": float(np.mean(scores))}
    return out


def _by_candidates(
    method: methods.Method,
    prepared: Any,
    test: Encoded,
    root: jax.Array,
    epsilon: float,
    choice: choices.Choice,
) -> dict[str, float]:
    """Macro-F1 with the first part of the candidates only, which are in random order."""
    total, out = prepared[choice.overall].shape[1], {}
    for size in sorted({max(2, total * share // 100) for share in (2, 5, 10, 25, 50, 100)}):
        key_rows = jax.random.split(keys.stream(root, f"candidates {method.name} {size}"), len(test.ids))
        first = {variant: prepared[variant][:, :size] for variant in {*choice.by_length}}
        predicted = choices.predict(method, first, test.counts, key_rows, epsilon, choice)
        out[str(size)] = networks.macro_f1(test.labels, predicted, len(test.classes))
    return out


def sweep_words(
    config: Config,
    public: Public,
    test: Encoded,
    encoder: SentenceEncoder,
    root: jax.Array,
    writer: metrics.Writer,
    done: list[dict[str, Any]],
) -> None:
    """word_mdp on the first documents of the test split, which it has to encode again each time."""
    finished = {(r["method"], r.get("epsilon")) for r in done}
    todo = [e for e in config.word_epsilons if ("word_mdp", e) not in finished]
    if not todo:
        return
    space = word_mdp.open_space(config.word_vectors, encoder)
    part = test.take(np.arange(min(config.word_documents, len(test.ids))))
    bar = progress.bar(total=len(todo) * config.word_trials, what="word_mdp", unit="trial")
    for epsilon in todo:
        scores = []
        for trial in range(config.word_trials):
            key = keys.for_round(keys.stream(root, f"word_mdp {named(epsilon)}"), trial)
            rewritten = word_mdp.rewrite(key, part.texts, space, epsilon=epsilon, splitter=config.splitter)
            predicted = public.classifier.predict(word_mdp.means(rewritten, encoder))
            scores.append(networks.macro_f1(part.labels, predicted, len(part.classes)))
            bar.update()
        writer.write(
            method="word_mdp",
            epsilon=epsilon,
            variant=f"{space.name}; mean distance to the nearest word {space.nearest:.3g}",
            documents=len(part.ids),
            trials=scores,
        )
    bar.close()


def summary(
    config: Config, public: Public, train: Encoded, test: Encoded, records: list[dict]
) -> dict[str, Any]:
    """The fixed JSON keys, and beside them spread, choices, bins and numbers of candidates."""
    num_classes = len(test.classes)
    means: dict[str, Any] = {
        "nonprivate": networks.macro_f1(test.labels, public.classifier.predict(test.means), num_classes),
        "random": networks.random_guess(train.labels, num_classes),
    }
    spread: dict[str, dict[str, float]] = {}
    chosen: dict[str, dict[str, str]] = {}
    by_length: dict[str, dict[str, dict[str, str]]] = {}
    for record in records:
        epsilon = "inf" if record["epsilon"] is None else named(record["epsilon"])
        name = record["method"]
        means.setdefault(name, {})[epsilon] = float(np.mean(record["trials"]))
        spread.setdefault(name, {})[epsilon] = float(np.std(record["trials"]))
        chosen.setdefault(name, {})[epsilon] = record["variant"]
        if "by_length" in record:
            by_length.setdefault(name, {})[epsilon] = record["by_length"]
    return {
        "macro_f1": means,
        "spread": spread,
        "choices": chosen,
        "choices_by_length": by_length,
        "bins": {r["method"]: r["bins"] for r in records if "bins" in r},
        "bins_nonprivate": _by_bin(test, [public.classifier.predict(test.means)]),
        "word_mdp_documents": max((r["documents"] for r in records if r["method"] == "word_mdp"), default=0),
        "num_candidates": {r["method"]: r["candidates"] for r in records if "candidates" in r},
    }


def write_report(folder: pathlib.Path, result: dict[str, Any], facts: dict[str, Any]) -> str:
    """`results.json` and `report.md`; returns the report."""
    with files.atomic_write(folder / "results.json") as file:
        json.dump(metrics.plain(result), file, indent=2)
        file.write("\n")
    means = result["macro_f1"]
    private = {k: v for k, v in means.items() if isinstance(v, dict) and k != CEILING}
    epsilons = sorted({e for v in private.values() for e in v}, key=float)
    short = facts["fewer_than_2_sentences"]["test"]
    counted = (
        f", of which {short:,} have fewer than 2 sentences (the paper leaves those out)" if short else ""
    )
    lines = [
        f"Macro-F1 in percent on {facts['documents']['test']:,} test documents ({len(facts['classes'])} classes)"
        f"{counted}, mean (spread) over trials. Non-private "
        f"{means['nonprivate']:.1f}, random guess {means['random']:.1f}"
        + (f", deepest candidate without privacy {means[CEILING]['inf']:.1f}." if CEILING in means else "."),
        "",
        "| method | " + " | ".join(f"eps {e}" for e in epsilons) + " |",
        "| --- |" + " ---: |" * len(epsilons),
    ]
    for name, row in private.items():
        cells = [f"{row[e]:.1f} ({result['spread'][name][e]:.1f})" if e in row else "" for e in epsilons]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if "word_mdp" in private:
        space, few = next(iter(result["choices"]["word_mdp"].values())), result["word_mdp_documents"]
        lines += [
            "",
            f"word_mdp's epsilon is metric, per unit of its word space: {space}. It is not comparable. Measured on the "
            f"first {few:,} test documents{'' if few >= _LEAST_WORDS else ', so few that its scores mean nothing'}.",
        ]
    text = "\n".join(lines) + "\n"
    with files.atomic_write(folder / "report.md") as file:
        file.write(text)
    return text
