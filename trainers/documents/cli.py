"""`jaxpriv documents fit|release|evaluate`: sentence-private document embeddings from the command line."""

import json
import time
from collections.abc import Sequence
from typing import Any

from trainers.common import command, run_dir
from trainers.common.errors import InputError
from trainers.common.wording import counted
from trainers.documents.config import METHODS, PRESETS, Config, ReleaseConfig, named

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
        with run_dir.held(config.run_dir):
            if name == "fit":
                from trainers.documents.fit import fit

                result, text = fit(config)
            else:
                result, text = evaluate(config)
        command.finish(result, as_json=config.json, text=text)
        return 0
    if name == "release":
        config = parse_release(rest, prog)
        begin(config.devices)
        from trainers.documents.release import release

        result = release(config)
        command.finish(result, as_json=config.json, text=release_words(result))
        return 0
    raise InputError(f"jaxpriv documents: unknown command {name!r}; choose fit, release or evaluate")


def release_words(result: dict[str, Any]) -> str:
    """What a release says to a person."""
    variants = ", ".join(
        v if len(result["variants"]) == 1 else f"{v}: {number}" for v, number in result["variants"].items()
    )
    lines = [
        f"{counted(result['documents'], 'document')} by {result['method']} ({variants}): {result['output']}",
        result["guarantee"]["sentence"],
    ]
    if result["chosen_at"] != result["epsilon"]:
        lines.append(
            f"Epsilon {named(result['epsilon'])} was not fitted: method and variants are those chosen at "
            f"{named(result['chosen_at'])}, the nearest that was."
        )
    if result["without_sentences"]:
        count, names = counted(result["without_sentences"], "document"), few(result["ids_without_sentences"])
        lines.append(
            f"{count} without a sentence ({names}): nothing of its text is said, its embedding is zero and it has no "
            "nearest candidate."
        )
    if result["one_sentence"]:
        lines.append(f"{counted(result['one_sentence'], 'document')} of one sentence.")
    shared = result["shared"]
    if shared["sentences"]:
        lines.append(
            f"For you alone: {shared['sentences']:,} of {counted(shared['of'], 'different sentence')} here (of some "
            "length) are in the texts that the fit calls public; a document of those texts has no guarantee."
        )
    if shared["documents"]:
        count = counted(len(shared["documents"]), "document")
        lines.append(f"Mostly in those texts: {count} ({few(shared['documents'])}).")
    lines.append(
        f"Counted in {result['ledger']}. Releases of the same documents that another ledger counts, such as that of "
        "another fitted folder, add their epsilons: share one with --ledger."
    )
    return "\n".join(lines)


def few(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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
    from trainers.common import files, metrics, statements
    from trainers.documents import data, pictures, preparation, public
    from trainers.documents import evaluate as measure

    begun = time.monotonic()
    started = preparation.start(config, "documents evaluate", data.SPLITS)
    folder, facts = started.folder, started.facts
    root = preparation.secret_key(folder, config.insecure_noise_seed)
    encoded = preparation.encode(config, started)
    train, validation, test = (encoded[part] for part in data.SPLITS)
    prepared = public.prepare(config, train, validation)
    path = folder / "metrics.jsonl"
    done = metrics.read(path) if path.exists() else []
    with files.atomic_write(path) as file:  # a line that a kill tore goes, before others follow it
        file.writelines(json.dumps(record) + "\n" for record in done)
    with metrics.Writer(path) as writer:
        measure.sweep(config, prepared, train, validation, test, root, writer, done)
        if "word_mdp" in config.methods:
            measure.sweep_words(config, prepared, test, started.encoder, root, writer, done)
    result = measure.summary(config, prepared, train, test, metrics.read(path))
    report = measure.write_report(folder, result, facts)
    pictures.draw(folder, result)
    statement = preparation.comparison_statement(config, simulation=config.insecure_noise_seed is not None)
    statements.write(statement, folder)
    result |= {
        "run_dir": str(folder),
        "documents": facts["documents"],
        "sentences": facts["sentences"],
        "fewer_than_2_sentences": facts["fewer_than_2_sentences"],
        "division": facts["division"],
        "guarantee": statement.data,
        "seconds": time.monotonic() - begun,
    }
    excepted = [name for name in (METHODS[0], "word_mdp") if name in config.methods]
    return result, f"{report}\n{preparation.guarantee_words(config, statement, excepted)}"
