"""`jaxpriv documents fit|release|evaluate`: sentence-private document embeddings from the command line."""

import json
import time
from collections.abc import Sequence
from typing import Any

from trainers.common import command
from trainers.common.errors import InputError
from trainers.documents.config import PRESETS, Config, ReleaseConfig

USAGE = """usage: jaxpriv documents {fit,release,evaluate} [OPTIONS]

  fit       prepare candidates, recoder, classifiers and choices from public documents
  release   write private embeddings of documents (parquet) with their guarantee; counts what each has spent
  evaluate  macro-F1 of every method against epsilon, sentences and candidates: table, pictures, JSON

`jaxpriv documents COMMAND --help` lists the options. `evaluate` alone runs on embedded data in a few minutes."""


def main(argv: Sequence[str]) -> int:
    """Runs one command; raises InputError for bad input, which the caller prints as one line with status 2."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, rest = argv[0], argv[1:]
    prog = f"jaxpriv documents {name}"
    if name in ("fit", "evaluate"):
        description = {"fit": "Fits what a release needs.", "evaluate": "Measures every method."}[name]
        config = command.parse(Config, rest, prog=prog, presets=PRESETS, description=description)
        begin(config.devices)
        if name == "fit":
            from trainers.documents.fit import fit

            result = fit(config)
            text = f"fitted in {result['seconds']:.0f} s: {result['run_dir']}"
        else:
            result, text = evaluate(config)
        command.finish(result, as_json=config.json, text=text)
        return 0
    if name == "release":
        config = parse_release(rest, prog)
        begin(config.devices)
        from trainers.documents.release import release

        result = release(config)
        text = (
            f"{result['documents']} documents by {result['method']} ({result['variant']}): {result['output']}\n"
            f"{result['guarantee']['sentence']}"
        )
        if result["without_sentences"] or result["one_sentence"]:
            text += (
                f"\n{result['without_sentences']} document(s) without a sentence say nothing of their text; "
                f"{result['one_sentence']} of one sentence."
            )
        command.finish(result, as_json=config.json, text=text)
        return 0
    raise InputError(f"jaxpriv documents: unknown command {name!r}; choose fit, release or evaluate")


def begin(devices: int | None) -> None:
    """Devices and the compilation cache, before jax computes anything.

    Raises:
      InputError: there are fewer devices.
    """
    command.prepare_devices(devices)
    command.keep_compilations()
    import jax

    if devices is not None and devices > jax.local_device_count():
        raise InputError(f"--devices {devices}: there are {jax.local_device_count()}; lower it")


def parse_release(argv: Sequence[str], prog: str) -> ReleaseConfig:
    """The options of `release`; those without a default must be given."""
    from tyro import MISSING

    required = ReleaseConfig(run_dir=MISSING, data=MISSING, output=MISSING, epsilon=MISSING)
    return command.parse(
        ReleaseConfig,
        argv,
        prog=prog,
        presets={"default": required},
        description="Releases private embeddings.",
    )


def evaluate(config: Config) -> tuple[dict[str, Any], str]:
    """Runs the evaluation and returns its JSON and its report."""
    from trainers.common import files, manifest, metrics, statements
    from trainers.documents import evaluate as measure
    from trainers.documents import pictures, preparation, public

    preparation.check(config)
    started = time.monotonic()
    folder = preparation.open_run_dir(config)
    encoder = preparation.open_encoder(config.encoder)
    manifest.write(folder, command="documents evaluate", config=config, digests={"encoder": encoder.digest})
    root = preparation.secret_key(folder, config.insecure_noise_seed)
    encoded, facts = preparation.load_encoded(config, encoder, ("train", "validation", "test"))
    train, validation, test = (encoded[part] for part in ("train", "validation", "test"))
    prepared = public.prepare(config, train, validation)
    path = folder / "metrics.jsonl"
    done = metrics.read(path) if path.exists() else []
    with files.atomic_write(path) as file:  # a line that a kill tore goes, before others follow it
        file.writelines(json.dumps(record) + "\n" for record in done)
    with metrics.Writer(path) as writer:
        measure.sweep(config, prepared, train, validation, test, root, writer, done)
        if "word_mdp" in config.methods:
            measure.sweep_words(config, prepared, test, encoder, root, writer, done)
    result = measure.summary(config, prepared, train, test, metrics.read(path))
    report = measure.write_report(folder, result, facts)
    pictures.draw(folder, result)
    statement = preparation.comparison_statement(config)
    statements.write(statement, folder / "privacy")
    result |= {
        "run_dir": str(folder),
        "documents": facts["documents"],
        "sentences": facts["sentences"],
        "guarantee": statement.data,
        "seconds": time.monotonic() - started,
    }
    return result, report
