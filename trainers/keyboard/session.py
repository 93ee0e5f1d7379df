"""A whole command: the run, its comparisons, statement, pictures and closing table."""

import concurrent.futures
import contextlib
import dataclasses
import json
import pathlib
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from accounting import PrivacyStatement, evidence, record, reporting
from trainers.common import checkpoint, files, metrics, processes, run_dir
from trainers.common.errors import InputError
from trainers.common.vocabulary import Vocabulary
from trainers.keyboard import checks, corpus, model, ngram, pictures, pretrain, released, stated
from trainers.keyboard import evaluate as scoring
from trainers.keyboard.config import DEMO, PRESETS, CompareConfig, Config, EvaluateConfig
from trainers.keyboard.train import FREE, Outcome, Run, model_sizes

NO_NOISE, NGRAM_FILE = "no_noise", "ngram.json"
SCORES = ("top1_words", "top3_words", "tff_accuracy", "perplexity")
LATER_OPTIONS = (
    "client_field",
    "text_field",
    "skip_bad",
    "timer_jitter",
    "coordinator",
    "num_processes",
    "process_id",
    "secure_aggregation",
    "secagg_bits",
    "pretrain_data",
    "pretrain_epochs",
    "pretrain_learning_rate",
    "pretrain_batch_size",
    "initial_model",
    "clip_search_rounds",
    "clip_search_report_goal",
    "clip_search_noise_multiplier",
    "clip_search_restarts",
)
NOT_COVERED = (
    "on test clients, whose text was never trained on; these scores are not covered by the guarantee"
)


def train(config: Config) -> tuple[dict[str, Any], str]:
    """Runs `jaxpriv keyboard train`: returns the JSON result and the closing text."""
    with contextlib.ExitStack() as until_done:
        return _train(config, until_done)


def _train(config: Config, until_done: contextlib.ExitStack) -> tuple[dict[str, Any], str]:
    folder = pathlib.Path(config.run_dir)
    with processes.together():
        _require_one_process(config)
        if processes.is_first():
            until_done.enter_context(run_dir.held(folder))
        config = dataclasses.replace(config, resume=run_dir.resumes(folder, config.resume))
        anew = config.resume and _never_began(folder)
        if config.resume and not anew and not (folder / pretrain.FOLDER / "config.json").is_file():
            run_dir.require(folder, "keyboard")
        if config.resume and (folder / "config.json").is_file():  # said before anything is read or planned
            saved, where = run_dir.read_config(folder), f"the run in {folder}"
            run_dir.require_same_settings(saved, config, free=FREE, presets=PRESETS, where=where)
        checks.check(config)
        data = corpus.load(config)
        first_stage = pretrain.prepare(config, data, model_sizes(config, data.vocabulary))
        if first_stage is not None:
            data = dataclasses.replace(data, shared=[*data.shared, *first_stage.shared])
    # The folder too: all of them write one checkpoint.
    if not processes.all_same(
        json.dumps([run_dir.settings(config, FREE), data.digests, str(folder.resolve())], sort_keys=True)
    ):
        raise InputError(
            "the processes of this run have different settings, data, words or --run-dir; give all of them the same, "
            "but for --process-id"
        )
    if config.data != corpus.EMBEDDED and processes.is_first():  # embedded text is public, and as it is
        for told in (data.shared, data.notes[1:]):
            if told:
                print(f"jaxpriv keyboard: {'; '.join(told)}", file=sys.stderr)
    if anew and processes.is_first():  # of whatever data it was
        (folder / NGRAM_FILE).unlink(missing_ok=True)
    if config.clip == "two_stage":
        from trainers.keyboard import two_stage  # it is made of this module's parts

        return two_stage.train(config, data, first_stage)
    with processes.together():
        runs = make_runs(config, data, first_stage)  # refuses before it writes
        if not config.resume and processes.is_first():
            run_dir.require_new(folder)
    pretrain_into(folder, config, data, first_stage, runs)
    del data
    return train_runs(config, runs)


def _never_began(folder: pathlib.Path) -> bool:
    """Whether a run was killed here before its first checkpoint: nothing of it was released, so it starts anew."""
    left = {
        NGRAM_FILE,
        NO_NOISE,
        "vocabulary.json",
        record.MECHANISM_FILE,
        record.PARTICIPATION_FILE,
        record.STAGES_FILE,
        "checkpoints",
    }
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    return bool(names) and names <= left and evidence.sign_of_release(folder) is None


def _require_one_process(config: Config) -> None:
    if config.num_processes == 1:
        return
    if config.clip == "two_stage":
        raise InputError("--clip two_stage runs in one process; leave --num-processes out")
    if config.pretrain_data != "none":
        raise InputError(
            "public pretraining runs in one process; train with --num-processes 1 and --pretrain-data first, then "
            "start from its folder with --initial-model"
        )


def make_runs(
    config: Config,
    data: corpus.Corpus,
    first_stage: pretrain.Start | None,
    notes: Sequence[str] = (),
    deployment_share: float = 1.0,
    stage: Mapping[str, Any] | None = None,
) -> dict[str, Run]:
    """The run, under "", and the comparison beside it where it is asked for; refuses what cannot be served."""
    folder = pathlib.Path(config.run_dir)
    configs = {"": config}
    if config.compare and config.mechanism != "none":
        configs[NO_NOISE] = dataclasses.replace(
            config, mechanism="none", secure_aggregation="none", run_dir=str(folder / NO_NOISE)
        )
    return {
        name: Run(each, data, folder / name, first_stage, notes, deployment_share, stage)
        for name, each in configs.items()
    }


def pretrain_into(
    folder: pathlib.Path,
    config: Config,
    data: corpus.Corpus,
    first_stage: pretrain.Start | None,
    runs: Mapping[str, Run],
) -> None:
    """Trains on the public text in `folder`, if any, and lets all runs start from what came out."""
    if first_stage is None:
        return
    held_out = data.held_out[: config.evaluation_examples]
    params = pretrain.run(config, first_stage, runs[""].sizes, held_out, folder / pretrain.FOLDER)
    for run in runs.values():
        run.initial = params


def _keep_own_clients(config: Config, runs: Mapping[str, Run]) -> None:
    """Drops the training text of clients that are other processes' part."""
    if config.num_processes > 1:
        own = corpus.share(runs[""].data, config.process_id, config.num_processes)
        for run in runs.values():
            run.data = own


def _assist(config: Config, runs: Mapping[str, Run]) -> tuple[dict[str, Any], str]:
    """The part of a process that is not the first."""
    _keep_own_clients(config, runs)
    for run in runs.values():
        run.assist()
    text = f"process {config.process_id} of {config.num_processes} is done; process 0 has the results"
    return {"run_dir": None, "process": config.process_id}, text


def train_runs(
    config: Config, runs: dict[str, Run], baseline: dict[str, Any] | None = None
) -> tuple[dict[str, Any], str]:
    """Trains what `make_runs` made; returns the JSON result and the closing text.

    Args:
      baseline: scores of the n-gram, where they are known.
    """
    if not processes.is_first():
        return _assist(config, runs)
    folder = pathlib.Path(config.run_dir)
    for name in runs:
        (folder / name).mkdir(parents=True, exist_ok=True, mode=0o755 if name == "" else 0o700)
    baseline = baseline or ngram_scores(runs[""].data, folder, config.evaluation_examples)
    _keep_own_clients(config, runs)
    with stated.when_stopped([folder / name for name in runs]):
        outcomes = _side_by_side(runs)

    statements = {name: stated.write(folder / name) for name in runs}
    labels = {config.mechanism: folder} | ({"without noise": folder / NO_NOISE} if NO_NOISE in runs else {})
    pictures.draw(labels, folder / "plots", ngram=baseline, delta=config.delta)
    pictures.draw_participation(folder, folder / "plots")

    own, statement = outcomes[""], statements[""]
    result = _result(config, folder, own.test, baseline, statement, own.seconds)
    up, down = runs[""].bytes_a_round
    result |= {"bytes_up": up, "bytes_down": down}
    rows = {_label(config): own.test._asdict()}
    if NO_NOISE in outcomes:
        rows["same model without noise"] = outcomes[NO_NOISE].test._asdict()
    rows["5-gram of the clients' text (not private)"] = dict(baseline)
    text = "\n".join(
        [
            table(rows),
            NOT_COVERED,
            "",
            statement.sentence,
            *deployment(statement.data),
            f"A client sends {up / 1e6:.2f} MB a round and receives {down / 1e6:.2f} MB, the protocol's keys apart.",
            f"Pictures, statement (privacy.md) and metrics: {folder}",
        ]
    )
    return result, text


def _result(
    config: Config,
    folder: pathlib.Path,
    scores: scoring.Evaluation,
    baseline: Mapping[str, Any] | None,
    statement: PrivacyStatement,
    seconds: float | None,
) -> dict[str, Any]:
    """What `--json` prints, whichever command scored the model."""
    return {
        "run_dir": str(folder),
        **{name: getattr(scores, name) for name in SCORES},
        "ngram_top1_words": None if baseline is None else baseline["top1_words"],
        **{name: statement.data[name] for name in ("rho", "epsilon", "delta")},
        "seconds": seconds,
        "simulation": config.insecure_noise_seed is not None,
    }


def _side_by_side(runs: dict[str, Run]) -> dict[str, Outcome]:
    """Trains every run, each on a device of its own where there are several; numbers do not depend on it."""
    devices = jax.local_devices()
    stop = threading.Event()

    def train_on(run: Run, device: jax.Device) -> Outcome:
        with jax.default_device(device):
            try:
                return run.train(stop)
            except BaseException:
                stop.set()
                raise

    if len(runs) == 1 or len(devices) == 1 or any(run.mesh is not None for run in runs.values()):
        return {name: train_on(run, devices[0]) for name, run in runs.items()}
    with concurrent.futures.ThreadPoolExecutor(len(runs)) as pool:
        waiting = {name: pool.submit(train_on, run, devices[i]) for i, (name, run) in enumerate(runs.items())}
        try:
            concurrent.futures.wait(waiting.values(), return_when=concurrent.futures.FIRST_EXCEPTION)
        except KeyboardInterrupt:
            stop.set()
            raise
        failed = [f for f in waiting.values() if f.done() and f.exception() is not None]
        real = [f for f in failed if not isinstance(f.exception(), KeyboardInterrupt)]
        for future in real or failed:
            future.result()
        return {name: future.result() for name, future in waiting.items()}


def ngram_scores(data: corpus.Corpus, folder: pathlib.Path, evaluation_examples: int) -> dict[str, Any]:
    """Scores of the 5-gram of the clients' text on the test clients, and under `during_training` those on what
    training is evaluated on; counted once a run."""
    saved = saved_ngram(folder)
    if saved is not None:
        return saved
    import numpy as np

    fitted = ngram.fit(np.concatenate(data.train), vocabulary=data.vocabulary, order=5)
    scores: dict[str, Any] = ngram.evaluate(fitted, data.test)._asdict()
    scores["during_training"] = ngram.evaluate(fitted, data.held_out[:evaluation_examples])._asdict()
    with files.atomic_write(folder / NGRAM_FILE) as file:
        json.dump({"covered_by_guarantee": False, **scores}, file, indent=1)
    return scores


def saved_ngram(folder: pathlib.Path) -> dict[str, Any] | None:
    """The scores that `ngram_scores` left in a run folder; None where there are none.

    Raises:
      InputError: the file is damaged.
    """
    path = folder / NGRAM_FILE
    if not path.exists():
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        for scores in (saved, saved.get("during_training", saved)):
            if not all(isinstance(scores[name], int | float) for name in SCORES):
                raise ValueError("scores that are no numbers")
        return saved
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it: train --resume counts the n-gram again"
        ) from None


def evaluate_run(config: EvaluateConfig) -> tuple[dict[str, Any], str]:
    """Scores the newest checkpoint of a run on its test clients, or on those of another file, as also an exported
    model."""
    if pathlib.Path(config.run_dir).is_file():
        return _evaluate_file(config)
    found = trained(config.run_dir)
    examples = (
        corpus.test_examples(config.data, found.vocabulary, _fields(config, found.config))
        if config.data
        else corpus.load(found.config).test
    )
    scores = scoring.evaluate(found.params, examples, found.sizes)
    baseline = None if config.data else saved_ngram(found.run)
    result = _result(found.config, found.run, scores, baseline, reporting.report(found.run), None)
    label = f"{_label(found.config)}, round {found.rounds} of {found.config.rounds}"
    return result, f"{table({label: scores._asdict()})}\n{NOT_COVERED}"


def _evaluate_file(config: EvaluateConfig) -> tuple[dict[str, Any], str]:
    """The same of a model that `keyboard export` wrote, which brings no clients along."""
    if config.data is None:
        raise InputError(f"{config.run_dir} holds no clients to score on; give --data FILE")
    model_file = released.load(config.run_dir)
    examples = corpus.test_examples(config.data, model_file.vocabulary, _fields(config, DEMO))
    scores = scoring.evaluate(model_file.params, examples, model_file.sizes)
    path, statement = pathlib.Path(config.run_dir), PrivacyStatement(model_file.statement)
    result = _result(DEMO, path, scores, None, statement, None)
    result["simulation"] = bool(statement.data.get("simulation"))
    label = f"{path.name}, after {model_file.rounds} rounds"
    return result, f"{table({label: scores._asdict()})}\n{NOT_COVERED}"


def _fields(config: EvaluateConfig, settings: Config) -> Config:
    """`settings` with the fields of --data that were given."""
    given = {name: getattr(config, name) for name in ("client_field", "text_field")}
    return dataclasses.replace(
        settings, **{name: value for name, value in given.items() if value is not None}
    )


class Trained(NamedTuple):
    """The model of a run folder. run: the folder. config: what made it. rounds: released before it."""

    run: pathlib.Path
    config: Config
    vocabulary: Vocabulary
    sizes: model.ModelConfig
    params: model.Params
    rounds: int


def trained(run: files.PathLike) -> Trained:
    """The newest whole checkpoint's model.

    Raises:
      InputError: it is no run, one stage of one, or has no trained model yet.
    """
    whole, folder, config = model_of(run)
    vocabulary = Vocabulary.load(folder / "vocabulary.json")
    checkpoints = folder / "checkpoints"
    at = checkpoint.latest(checkpoints)
    if at is None:
        raise InputError(f"{folder} has no whole checkpoint; train it first")
    if at == 0:
        released = evidence.checked_record(folder)[1].num_rounds
        raise InputError(
            f"{folder} was stopped before its first round was saved, with {released} released; go on with train "
            "--resume, or account for what it released (jaxpriv account report)"
        )
    sizes = model_sizes(config, vocabulary)
    template = model.init_params(sizes, seed=config.seed)
    params = checkpoint.load(checkpoints, at, template, under=".round.params")
    return Trained(whole, config, vocabulary, sizes, params, at)


def model_of(run: files.PathLike, *, stage_alone: bool = False) -> tuple[pathlib.Path, pathlib.Path, Config]:
    """The run's folder, the folder of its model (that of the last stage, where it has stages), and its settings.

    Raises:
      InputError: it is no run; or one stage of a run, whose cost alone says too little, unless `stage_alone`.
    """
    folder = run_dir.require(run, "keyboard")
    around = folder.resolve().parent
    if not stage_alone and (evidence.stages_of(around) or []).count(folder.resolve().name):
        raise InputError(f"{folder} is one stage of the run in {around}; give that folder, which states both")
    if not stage_alone and evidence.stage_of(folder) is not None:
        raise InputError(f"{folder} is one stage of a run; give that run's folder, which states all of them")
    stages = evidence.stages_of(folder)
    inside = folder if stages is None else run_dir.require(folder / stages[-1])
    return folder, inside, _saved_config(inside)


def _saved_config(folder: pathlib.Path) -> Config:
    saved: dict[str, Any] = run_dir.read_config(folder)
    try:
        saved = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
        # A run of an earlier version lacks the options that came later; it ran as if they were off.
        later = {name: getattr(DEMO, name) for name in LATER_OPTIONS}
        run_dir.require_types(saved, Config)
        config = Config(**(later | saved))
        checks.check(config)
        return config
    except (TypeError, KeyError, InputError) as error:
        raise InputError(
            f"{folder / 'config.json'} is not that of a keyboard run ({error}); use the jaxpriv that wrote it"
        ) from None


def compare(config: CompareConfig) -> tuple[dict[str, Any], str]:
    """Draws runs beside each other and lists how each ended."""
    if not config.runs:
        raise InputError("--runs needs at least one run folder")
    runs, rows, ngrams, data = {}, [], [], set()
    for name in config.runs:
        whole, folder, settings = model_of(name, stage_alone=True)
        saved = dataclasses.asdict(settings)
        scored = [r for r in metrics.read(folder / "metrics.jsonl") if "evaluation" in r]
        if not scored:
            raise InputError(f"{folder} has no evaluation yet; let it run to --evaluate-every rounds first")
        ngrams += [scores for scores in [saved_ngram(whole)] if scores is not None]
        data.add(run_dir.read_manifest(folder).get("digests", {}).get("data"))
        spent = reporting.report(whole).data  # refuses a run whose record does not hold all of its rounds
        if folder != whole:  # a run in stages has spent what all of them have
            scored[-1] |= {"rho": spent["rho"], "epsilon": spent["epsilon"]}
        runs[whole.name] = {"rows": scored, "config": saved}
        last = scored[-1]
        rows.append(
            {
                "run": whole.name,
                "mechanism": saved["mechanism"],
                "noise_per_client": pictures.noise_per_client(saved),
                "rounds": last["round"] + 1,
                "top1_words": last["evaluation"]["top1_words"],
                "perplexity": last["evaluation"]["perplexity"],
                "rho": last["rho"],
                "epsilon": last["epsilon"],
                **{f"reached_{level:g}": _first_round(scored, level) for level in config.reach},
            }
        )
    if len(runs) < len(config.runs):
        raise InputError("two of the run folders have the same name; rename one, since names label the lines")
    # A line of one run's clients says nothing of another's.
    one = len(data) == 1
    pictures.compare(runs, pathlib.Path(config.output), ngram=ngrams[0] if ngrams and one else None)
    shown = [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(rows[0], *shown, strict=True)]
    text = "\n".join("  ".join(f"{c:>{w}}" for c, w in zip(line, widths)) for line in [list(rows[0]), *shown])
    if not one:
        text += "\nThese runs are over different data: their scores do not rank them, and no n-gram line is drawn."
    return {"runs": rows, "picture": config.output}, f"{text}\nPicture: {config.output}"


def _first_round(scored: list[dict[str, Any]], level: float) -> int | None:
    """The first evaluated round with at least `level` percent top-1 words, or None."""
    return next((r["round"] + 1 for r in scored if (r["evaluation"]["top1_words"] or 0) >= level), None)


def _cell(value: Any) -> str:
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _label(config: Config) -> str:
    if config.mechanism == "none":
        return "federated model without noise"
    return f"private model ({config.mechanism}, z = {config.noise_multiplier:g}, m = {config.report_goal})"


def table(rows: dict[str, dict[str, float]]) -> str:
    """Scores as a table: percent, and perplexity."""
    width = max(map(len, rows))
    lines = [f"{'':<{width}}  top-1 words %  top-3 words %  TFF accuracy %  perplexity"]
    for label, row in rows.items():
        lines.append(
            f"{label:<{width}}  {row['top1_words']:13.2f}  {row['top3_words']:13.2f}"
            f"  {row['tff_accuracy']:14.2f}  {_perplexity(row['perplexity']):>10}"
        )
    return "\n".join(lines)


def _perplexity(value: float) -> str:
    return f"{value:.1f}" if value < 1e6 else f"{value:.3g}"


def deployment(statement: Mapping[str, Any]) -> list[str]:
    """The projection to deployment scale as a line of the closing text, where the statement has one."""
    section = statement.get("deployment")
    return [] if not section else ["At deployment scale (a projection, not this run): " + section["sentence"]]
