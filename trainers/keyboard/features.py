"""The commands that use a trained model: suggest, compose, rescore, export."""

import itertools
import os
import pathlib
import select
import stat
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Int

from trainers.common import plots, readers
from trainers.common.errors import InputError
from trainers.common.tokenizer import tokenize
from trainers.keyboard import compose as composing
from trainers.keyboard import corpus, released, terminal
from trainers.keyboard import rescore as rescoring
from trainers.keyboard.features_config import ComposeConfig, ExportConfig, RescoreConfig, SuggestConfig
from trainers.keyboard.released import Released
from trainers.keyboard.suggest import Suggester

NOT_COVERED = "on held-out clients; these figures are not covered by the guarantee"
THRESHOLDS = np.array([0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
NOTHING = "nothing was shown"
MOST_WORDS = 10_000
MOST_BEAMS = 64
_SEQUENCE_LENGTH = 20

Outcome = tuple[dict[str, Any], str]


def _guarantee(model: Released) -> dict[str, Any]:
    return {name: model.statement.get(name) for name in ("rho", "epsilon", "delta")}


def _check(config: SuggestConfig | ComposeConfig) -> None:
    if not 0 < config.threshold <= 1:
        raise InputError(f"--threshold must be above 0 and at most 1, got {config.threshold}")
    if not 1 <= config.beams <= MOST_BEAMS:
        raise InputError(f"--beams must be from 1 to {MOST_BEAMS}, got {config.beams}")


def _texts(config: ComposeConfig | RescoreConfig) -> Iterable[str] | None:
    """What to work on: each --text, else the lines of standard input where something is piped in; None measures."""
    if config.text:
        return config.text
    if config.data is not None or config.output is not None or not _is_piped():
        return None
    if not select.select([sys.stdin], [], [], 0)[0]:
        print(
            "reading lines of standard input; to measure on held-out clients instead: </dev/null",
            file=sys.stderr,
        )
    lines = (line.rstrip("\r\n") for line in sys.stdin)
    first = next(lines, None)
    return None if first is None else itertools.chain([first], lines)


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file: not a terminal, not /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something that is no file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _answer(
    texts: Iterable[str],
    answer: Callable[[str], dict[str, Any]],
    show: Callable[[dict[str, Any]], str],
    *,
    json: bool,
) -> list[dict[str, Any]]:
    """One answer a text, each shown as soon as it is there."""
    rows = []
    for text in texts:
        rows.append(answer(text))
        if not json:
            print(show(rows[-1]), flush=True)
    return rows


def suggest(config: SuggestConfig) -> Outcome:
    """Runs `jaxpriv keyboard suggest`."""
    _check(config)
    if config.offered < 1:
        raise InputError(f"--offered must be at least 1, got {config.offered}")
    model = released.load(config.run_dir)
    suggester = Suggester(model)
    words = rescoring.tappable(model.vocabulary.words)
    offer = lambda letters: _offered(letters, suggester, words, config.offered)
    complete = lambda letters: composing.complete(
        model, suggester, threshold=config.threshold, letters=letters, beams=config.beams
    )
    if not config.text and sys.stdin.isatty() and not config.json:
        terminal.type_with(suggester, offer, complete)
        return {}, ""

    def answer(text: str) -> dict[str, Any]:
        letters = suggester.read(text)
        return {"text": text, "suggestions": offer(letters), "completion": complete(letters) or None}

    def show(row: dict[str, Any]) -> str:
        return "  ".join(row["suggestions"]) + (
            f"   [{' '.join(row['completion'])}]" if row["completion"] else ""
        )

    texts = config.text or (line.rstrip("\r\n") for line in sys.stdin)
    return {"suggestions": _answer(texts, answer, show, json=config.json), **_guarantee(model)}, ""


def _offered(letters: str, suggester: Suggester, words: rescoring.Words, count: int) -> list[str]:
    """Words that begin with the letters; where none does, what noisy typing may have meant by them."""
    found = suggester.suggest(letters, count=count)
    if found:
        return found
    vocabulary = suggester.vocabulary.words
    options = {"stddev": rescoring.TAP_STDDEV, "weight": 1.0, "count": count}
    near = rescoring.candidates(letters, words, vocabulary, suggester.log_probs, **options)
    return [word for word, _ in near if word != letters]


def compose(config: ComposeConfig) -> Outcome:
    """Runs `jaxpriv keyboard compose`."""
    _check(config)
    if not 1 <= config.min_words <= composing.LENGTH:
        raise InputError(f"--min-words must be from 1 to {composing.LENGTH}, got {config.min_words}")
    model = released.load(config.run_dir)
    options: dict[str, Any] = {"min_words": config.min_words, "beams": config.beams}
    texts = _texts(config)
    if texts is not None:
        suggester = Suggester(model)

        def answer(text: str) -> dict[str, Any]:
            suggester.read(text if text[-1:].isspace() else text + " ")
            words = composing.complete(model, suggester, threshold=config.threshold, **options)
            return {"text": text, "completion": words or None}

        def show(row: dict[str, Any]) -> str:
            if row["completion"] is None:
                return f"{row['text']} ({NOTHING}: no completion above the threshold {config.threshold:g})"
            return f"{row['text']} [{' '.join(row['completion'])}]"

        return {"completions": _answer(texts, answer, show, json=config.json), **_guarantee(model)}, ""
    _, test = _held_out(config, model)
    thresholds = np.unique([*THRESHOLDS, config.threshold])
    points = composing.measure(model.params, test, model.sizes, thresholds=thresholds, **options)
    chosen = next(p for p in points if p.threshold == config.threshold)
    if config.output:
        made, (axis,) = plots.figure()
        x = [p.trigger_rate for p in points]
        plots.curves(
            axis,
            {"thresholds": (x, [p.accuracy for p in points])},
            xlabel="trigger rate, % of positions",
            ylabel="exact completions, % of those shown",
            title=NOT_COVERED,
        )
        for p in points[::2]:
            axis.annotate(f"{p.threshold:g}", (p.trigger_rate, p.accuracy), fontsize=7)
        plots.save(made, config.output)
    lines = ["threshold  trigger rate %  accuracy %  accepted words %"]
    lines += [
        f"{p.threshold:9g}  {p.trigger_rate:14.2f}  "
        + (f"{p.accuracy:10.2f}  {p.words:16.2f}" if p.trigger_rate else NOTHING)
        for p in points
    ]
    result = {
        "run_dir": config.run_dir,
        "trigger_rate": chosen.trigger_rate,
        "accuracy": chosen.accuracy,
        "curve": [p._asdict() for p in points],
        **_guarantee(model),
    }
    return result, "\n".join([*lines, NOT_COVERED])


def rescore(config: RescoreConfig) -> Outcome:
    """Runs `jaxpriv keyboard rescore`."""
    if not 1e-3 <= config.tap_stddev <= 10:
        raise InputError(f"--tap-stddev must be from 0.001 to 10 key widths, got {config.tap_stddev}")
    if not 0 <= config.weight <= 1000:
        raise InputError(f"--weight must be from 0 to 1000, got {config.weight}")
    if not 0 <= config.seed < 2**32:
        raise InputError(f"--seed must be from 0 to 2^32 - 1, got {config.seed}")
    model = released.load(config.run_dir)
    words = rescoring.tappable(model.vocabulary.words)
    texts = _texts(config)
    if texts is not None:
        rows = _answer(
            texts,
            lambda text: _rescored(text, model, words, config),
            lambda row: f"{row['text']} -> {' '.join(row['rescored'])}",
            json=config.json,
        )
        return {"rescored": rows, **_guarantee(model)}, ""
    validation, test = _held_out(config, model)
    tuning, cases = (
        rescoring.cases(model.params, part, model.sizes, words, most=MOST_WORDS)
        for part in (validation, test)
    )
    ratios = rescoring.measure(tuning, cases, words, stddev=config.tap_stddev, seed=config.seed)
    speed = rescoring.speed(cases, model.vocabulary.words)
    if config.output:
        _draw_rescoring(config, tuning, cases, words)
    result = {
        "run_dir": config.run_dir,
        "word_modified_ratio": ratios._asdict(),
        "speed": speed._asdict(),
        "words": len(cases.target),
        **_guarantee(model),
    }
    text = "\n".join(
        [
            "words that have to be modified, %",
            f"  taps alone                     {ratios.taps:6.2f}",
            f"  taps and rank in vocabulary    {ratios.taps_and_rank:6.2f}",
            f"  {f'taps and model (weight {ratios.weight:g})':<30} {ratios.taps_and_model:6.2f}",
            f"words picked before the first letter {speed.picked_rate:.2f} %; keystrokes a word "
            f"{speed.keystrokes_plain:.2f} -> {speed.keystrokes:.2f}; at most {speed.words_per_minute:.1f} "
            "words a minute instead of 36.2",
            f"{len(cases.target)} words {NOT_COVERED}",
        ]
    )
    return result, text


def _draw_rescoring(config: RescoreConfig, tuning: rescoring.Cases, cases: rescoring.Cases, words) -> None:
    """Words to be modified over the error of the taps, for the three ways of decoding."""
    errors = [0.6 * config.tap_stddev, 0.8 * config.tap_stddev, config.tap_stddev, 1.2 * config.tap_stddev]
    rows = [rescoring.measure(tuning, cases, words, stddev=e, seed=config.seed) for e in errors]
    made, (axis,) = plots.figure()
    ways = {"taps": "taps alone", "taps_and_rank": "and rank in vocabulary", "taps_and_model": "and model"}
    plots.curves(
        axis,
        {label: (errors, [getattr(row, way) for row in rows]) for way, label in ways.items()},
        xlabel="standard deviation of a tap, key widths",
        ylabel="words to be modified, %",
        title=NOT_COVERED,
    )
    plots.save(made, config.output)  # pyright: ignore[reportArgumentType] - checked by the caller


def _rescored(text: str, model: Released, words: rescoring.Words, config: RescoreConfig) -> dict[str, Any]:
    """Each word of `text` replaced by the best candidate, given the words already chosen."""
    suggester, chosen, choices = Suggester(model), [], []
    for typed in tokenize(text):
        found = rescoring.candidates(
            typed,
            words,
            model.vocabulary.words,
            suggester.log_probs,
            stddev=config.tap_stddev,
            weight=config.weight,
        )
        chosen.append(found[0][0])
        choices.append([{"word": word, "score": score} for word, score in found])
        suggester.commit(chosen[-1])
    return {"text": text, "rescored": chosen, "candidates": choices}


def _held_out(
    config: ComposeConfig | RescoreConfig, model: Released
) -> tuple[Int[np.ndarray, "examples width"], Int[np.ndarray, "examples width"]]:
    """At most `examples` examples of validation and of test clients, encoded with the model's vocabulary."""
    if config.examples < 1:
        raise InputError(f"--examples must be at least 1, got {config.examples}")
    if config.data is not None:
        splits = readers.read_splits(
            config.data, text_field=config.text_field, client_field=config.client_field
        )
        parts = [
            model.vocabulary.encode(p.tokens, _SEQUENCE_LENGTH) for p in (splits.validation, splits.test)
        ]
    elif pathlib.Path(config.run_dir).is_dir():
        from trainers.keyboard import session  # it uses this package's commands

        data = corpus.load(session.model_of(config.run_dir)[2])
        parts = [data.validation, data.test]
    else:
        raise InputError(f"{config.run_dir} holds no clients to measure on; give --data FILE or --text")
    if not all(len(part) for part in parts):
        raise InputError("there is no held-out example to measure on; check the data's splits")
    return parts[0][: config.examples], parts[1][: config.examples]


def export(config: ExportConfig) -> Outcome:
    """Runs `jaxpriv keyboard export`."""
    model = released.export(config.run_dir, config.output)
    result = {"output": config.output, "rounds": model.rounds, **_guarantee(model)}
    return result, f"{config.output}: the model after {model.rounds} rounds\n{model.statement['sentence']}"
