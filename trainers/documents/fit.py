"""Fit: everything public that a release needs, with the validation choice of a variant for each epsilon."""

import time
from typing import Any

from trainers.common import metrics, progress
from trainers.common.wording import counted
from trainers.documents import choices, methods, overlap, preparation, public, store
from trainers.documents.config import Config, named


def fit(config: Config) -> tuple[dict[str, Any], str]:
    """Writes a fitted folder; returns `run_dir`, `choices`, validation macro-F1 and so on, and the same in words."""
    begun = time.monotonic()
    started = preparation.start(config, "documents fit", ("train", "validation"))
    folder, facts = started.folder, started.facts
    encoded = preparation.encode(config, started)
    train, validation = encoded["train"], encoded["validation"]
    prepared = public.prepare(config, train, validation)
    # Public documents are released here only to compare variants: a seed serves, nothing private is at stake.
    root = preparation.public_root(config, "choices")
    chosen: dict[str, dict[str, choices.Choice]] = {}
    scores: dict[str, dict[str, float]] = {}
    built = methods.build(config, prepared, train, validation)
    bar = progress.bar(total=len(built) * len(config.epsilons), what="choices", unit="epsilon")
    for name, method in built.items():
        on_validation = method.prepare(validation, method.variants)
        for epsilon in config.epsilons:
            method.check(epsilon, validation, "--epsilons")
            choice, score = choices.choose(method, on_validation, validation, root, epsilon)
            chosen.setdefault(name, {})[named(epsilon)] = choice
            scores.setdefault(name, {})[named(epsilon)] = score
            bar.update()
    bar.close()
    texts = (text for part in started.splits.values() for text in part.texts)
    known = overlap.digests(texts, splitter=config.splitter)
    digest = started.encoder.digest
    store.save(folder, store.Fitted(config, prepared, train, validation, chosen, scores, digest, known))
    result = {
        "run_dir": str(folder),
        "choices": {name: {e: c.overall for e, c in row.items()} for name, row in chosen.items()},
        "choices_by_length": store.plain(chosen),
        "validation_macro_f1": scores,
        "documents": facts["documents"],
        "sentences": facts["sentences"],
        "division": facts["division"],
        "seconds": time.monotonic() - begun,
    }
    with metrics.Writer(folder / "metrics.jsonl") as writer:
        writer.write(**result)
    return result, _words(config, result)


def _words(config: Config, result: dict[str, Any]) -> str:
    lines = [
        "Macro-F1 in percent on "
        f"{counted(result['documents']['validation'], 'public validation document')} ({result['division']}), "
        "each method in the variant that did best there (by number of sentences another may; fit.json has them):",
        "",
        "| method | " + " | ".join(f"eps {named(e)}" for e in config.epsilons) + " |",
        "| --- |" + " ---: |" * len(config.epsilons),
    ]
    for name, row in result["validation_macro_f1"].items():
        cells = [f"{score:.1f} ({result['choices'][name][e]})" for e, score in row.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    statement = preparation.comparison_statement(config, simulation=False)
    return "\n".join(
        [
            *lines,
            "",
            "Fitting reads public documents alone and spends nothing.",
            preparation.guarantee_words(config, statement),
            f"Fitted in {result['seconds']:.0f} s: {result['run_dir']}",
        ]
    )
