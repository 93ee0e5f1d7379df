"""Fit: everything public that a release needs, with the validation choice of a variant for each epsilon."""

import time
from typing import Any

from trainers.common import manifest, metrics, progress
from trainers.documents import evaluate, methods, preparation, public, store
from trainers.documents.config import Config


def fit(config: Config) -> dict[str, Any]:
    """Writes a fitted folder and returns `run_dir`, `choices`, validation macro-F1 and `seconds`."""
    preparation.check(config)
    started = time.monotonic()
    folder = preparation.open_run_dir(config)
    encoder = preparation.open_encoder(config.encoder)
    manifest.write(folder, command="documents fit", config=config, digests={"encoder": encoder.digest})
    encoded, facts = preparation.load_encoded(config, encoder, ("train", "validation"))
    train, validation = encoded["train"], encoded["validation"]
    prepared = public.prepare(config, train, validation)
    # Public documents are released here only to compare variants: a seed serves, nothing private is at stake.
    root = preparation.public_root(config, "choices")
    choices: dict[str, dict[str, str]] = {}
    scores: dict[str, dict[str, float]] = {}
    built = methods.build(config, prepared, train, validation)
    bar = progress.bar(total=len(built) * len(config.epsilons), what="choices", unit="epsilon")
    for name, method in built.items():
        on_validation = method.prepare(validation, method.variants)
        for epsilon in config.epsilons:
            variant, score = evaluate.choose(method, on_validation, validation, root, epsilon)
            choices.setdefault(name, {})[format(epsilon, "g")] = variant
            scores.setdefault(name, {})[format(epsilon, "g")] = score
            bar.update()
    bar.close()
    store.save(folder, store.Fitted(config, prepared, train, validation, choices, scores, encoder.digest))
    result = {
        "run_dir": str(folder),
        "choices": choices,
        "validation_macro_f1": scores,
        "documents": facts["documents"],
        "sentences": facts["sentences"],
        "seconds": time.monotonic() - started,
    }
    with metrics.Writer(folder / "metrics.jsonl") as writer:
        writer.write(**result)
    return result
