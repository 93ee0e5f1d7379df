"""Two stages over the same devices: a small run finds the clip norm, the run proper keeps it.

    jaxpriv keyboard train --clip two_stage

`stage1/` clips adaptively at a small report goal, from the same starting parameters; the clip norm of `stage2/` is the
private quantile estimate that it ended with, which its guarantee covers. The second stage starts afresh, so all that it
takes from the first is that one released number. Both are runs with statements of their own; what the folder around
them states, and `jaxpriv account report` on it, is their composition.

At deployment scale the search keeps its share of the report goal (the deployed models were tuned with 500 devices a
round and trained with 6,500; Xu et al. 2023, arXiv:2305.18465, section 3) and its noise per client, and takes its
devices from the same population.
"""

import dataclasses
import math
import pathlib
import sys
from typing import Any

from accounting import evidence, record, reporting
from trainers.common import manifest, metrics, plots, run_dir
from trainers.common.errors import InputError
from trainers.keyboard import corpus, pretrain, session, stated
from trainers.keyboard.config import Config
from trainers.keyboard.train import Run

STAGES = ("stage1", "stage2")
FIRST = (
    "first of two stages over the same devices: the cost of both is stated in the folder above; at deployment scale it "
    "keeps its share of the report goal, {small} of {large}, and its noise per client"
)
SECOND = (
    "second of two stages over the same devices, with a clip norm that the first released: what is stated here leaves "
    "the first out, and the cost of both is stated in the folder above"
)


def train(
    config: Config, data: corpus.Corpus, first_stage: pretrain.Start | None
) -> tuple[dict[str, Any], str]:
    """Trains both stages, or goes on in the one that was killed; returns the JSON result and the closing text."""
    folder = pathlib.Path(config.run_dir)
    search, proper = configs(config)
    note = FIRST.format(small=search.report_goal, large=proper.report_goal)
    share = search.report_goal / proper.report_goal
    one, two = ({"name": name, "of": list(STAGES)} for name in STAGES)
    runs = session.make_runs(search, data, first_stage, (note,), share, stage=one)
    # Refuses, before anything is written or spent, what does not depend on the clip norm to be found.
    planned = session.make_runs(proper, data, first_stage, (SECOND,), stage=two)
    warning = _costly(search, runs[""], planned[""])
    if warning:
        print(f"jaxpriv keyboard: {warning}", file=sys.stderr)
    if not config.resume:
        run_dir.require_new(folder)
    elif (folder / record.MECHANISM_FILE).exists() or (
        (folder / "config.json").exists() and evidence.stages_of(folder) != list(STAGES)
    ):
        # Stages added to it would spend on the same devices, and its own statement would not count them.
        raise InputError(f"{folder} is not a run in two stages; choose another --run-dir")
    elif (folder / evidence.STATEMENT_FILE).exists():
        reporting.report(folder)  # refuses where stages that it stated are gone: they would be begun again
    session.pretrain_into(folder, config, data, first_stage, runs)
    if not (folder / "config.json").exists():
        record.write_stages(folder, STAGES)
        facts = {"digests": data.digests, "shared_lines": data.shared, "data": data.notes}
        manifest.write(folder, command="jaxpriv keyboard train", config=config, **facts)
    baseline = session.ngram_scores(data, folder, config.evaluation_examples)
    with stated.when_stopped([folder]):
        runs[""].stated_in.append(folder)
        runs[""].before_first_round = lambda: record.write_stages(folder, STAGES, begun=STAGES[:1])
        _, searched = session.train_runs(search, runs, baseline)
        norm = clip_norm(folder / STAGES[0])
        proper = dataclasses.replace(proper, clip_norm=norm)
        again = session.make_runs(proper, data, first_stage, notes=(SECOND,), stage=two)
        for run in again.values():
            run.initial = runs[""].initial
        again[""].stated_in.append(folder)
        again[""].before_first_round = lambda: record.write_stages(folder, STAGES, begun=STAGES)
        result, text = session.train_runs(proper, again, baseline)

    statement = stated.write(folder)
    _draw(folder, norm)
    composed = {name: statement.data[name] for name in ("rho", "epsilon", "delta")}
    lines = [
        f"First stage, clip norm sought with {search.report_goal} devices a round: {norm:.4g}",
        searched.splitlines()[1],
        *([warning] if warning else []),
        "",
        "Second stage:",
        text,
        "",
        "Both stages together (the headline):",
        statement.sentence,
        *session.deployment(statement.data),
        f"Statement and pictures: {folder}",
    ]
    return result | composed | {"run_dir": str(folder), "clip_norm": norm}, "\n".join(lines)


def configs(config: Config) -> tuple[Config, Config]:
    """Settings of both stages; the clip norm of the second is still to be found.

    Raises:
      InputError: the first stage cannot be served.
    """
    if config.clip_search_rounds < 1:
        raise InputError(f"--clip-search-rounds must be at least 1, got {config.clip_search_rounds}")
    goal = config.clip_search_report_goal
    goal = max(1, config.report_goal // 10) if goal is None else goal
    if goal < 1:
        raise InputError(f"--clip-search-report-goal must be at least 1, got {goal}")
    noise = config.clip_search_noise_multiplier
    if noise is None:
        noise = config.noise_multiplier * goal / config.report_goal
    elif not 0 < noise < math.inf:
        raise InputError(f"--clip-search-noise-multiplier must be a finite number above 0, got {noise}")
    folder, seed = pathlib.Path(config.run_dir), config.insecure_noise_seed
    search = dataclasses.replace(
        config,
        clip="adaptive",
        rounds=config.clip_search_rounds,
        report_goal=goal,
        noise_multiplier=noise,
        restarts=config.clip_search_restarts,
        completion=config.completion and bool(config.clip_search_restarts),
        server_cooldown=0,
        compare=False,
        run_dir=str(folder / STAGES[0]),
        # Another seed than the second stage's, or both would have the same noise.
        insecure_noise_seed=None if seed is None else (seed + 1) % 2**32,
    )
    return search, dataclasses.replace(config, clip="fixed", run_dir=str(folder / STAGES[1]))


def _costly(search: Config, first: Run, second: Run) -> str:
    """One line where the search costs more than the training that it serves, with what to set; else empty."""
    rhos = [run.spent(run.config.rounds)["rho"] for run in (first, second)]
    if rhos[0] is None or rhos[1] is None or rhos[0] <= rhos[1]:
        return ""
    # rho falls with the square of the noise, and the count's noise must stay above half of it.
    noise = search.noise_multiplier * math.sqrt(rhos[0] / rhos[1])
    stddev = first.plan.record.clip["count_stddev"]
    more = f" with --clipped-count-stddev {0.6 * noise:.3g}" if 2 * stddev <= 1.05 * noise else ""
    return (
        f"the search for the clip norm costs rho {rhos[0]:.4g} and the training that it serves {rhos[1]:.4g}: set "
        f"fewer --clip-search-rounds than {search.rounds}, or --clip-search-noise-multiplier {noise:.3g}{more} instead "
        f"of {search.noise_multiplier:.3g}, which costs as much as the training"
    )


def clip_norm(folder: pathlib.Path) -> float:
    """The quantile estimate that a finished adaptive run released last."""
    path = folder / "metrics.jsonl"
    released = [line for line in metrics.read(path) if "estimate" in line] if path.exists() else []
    rounds = record.read_mechanism(folder).num_rounds
    if not released or released[-1]["round"] != rounds - 1:
        raise InputError(f"{path} has lost the estimate of round {rounds - 1}, the last one; restore it")
    return float(released[-1]["estimate"])


def _draw(folder: pathlib.Path, norm: float) -> None:
    """two_stage.png: the estimate by round of the first stage, and the accuracy of both."""
    lines = {name: metrics.read(folder / name / "metrics.jsonl") for name in STAGES}
    made, (left, right) = plots.figure(2)
    own = [r for r in lines[STAGES[0]] if "estimate" in r]
    x = [r["round"] + 1 for r in own]
    plots.curves(
        left,
        {
            "private quantile estimate": (x, [r["estimate"] for r in own]),
            "clip norm in force": (x, [r["clip_norm"] for r in own]),
        },
        xlabel="round of the first stage",
        ylabel="L2 norm of an update",
        lines={f"clip norm of the second stage: {norm:.3g}": norm},
    )
    scored = {name: [r for r in rows if "evaluation" in r] for name, rows in lines.items()}
    plots.curves(
        right,
        {
            label: ([r["round"] + 1 for r in rows], [r["evaluation"]["top1_words"] for r in rows])
            for label, rows in zip(
                ("first stage, adaptive clip", "second stage, fixed clip"), scored.values()
            )
        },
        xlabel="round of the stage",
        ylabel="top-1 words, %",
        title="held-out clients (not covered by the guarantee)",
    )
    (folder / "plots").mkdir(exist_ok=True)
    plots.save(made, folder / "plots" / "two_stage.png")
