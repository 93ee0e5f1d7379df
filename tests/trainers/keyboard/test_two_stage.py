"""The two-stage clipping recipe: what it states, where its clip norm comes from, that it can be killed anywhere."""

import contextlib
import dataclasses
import json
import math
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

import accounting
from accounting import cli as accounts
from accounting import record
from tests.oracles import accounting as brute_force
from tests.trainers.keyboard import toy
from tests.trainers.keyboard.test_train import same_run
from trainers.common import metrics
from trainers.common.errors import InputError
from trainers.keyboard import config as settings
from trainers.keyboard import corpus, session, train, two_stage
from trainers.keyboard import released as exported


def config(folder: pathlib.Path, run: str = "run", **changes: Any):
    made: dict[str, Any] = {
        "clip": "two_stage",
        "rounds": 4,
        "clip_search_rounds": 6,
        "clip_search_report_goal": 2,
        "clip_search_restarts": (3,),
        "clip_norm": 0.3,
        "noise_multiplier": 0.4,
        "clipped_count_stddev": 0.5,
    }
    return toy.config(folder, run, **(made | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    made = config(tmp_path_factory.mktemp("two_stage"))
    return made, session.train(made)


def stage_rho(folder: pathlib.Path) -> float:
    """From the record's plain numbers: worst squared sensitivity of the tree over 2 z^2, bits included in z."""
    facts = json.loads((folder / "mechanism.json").read_text())
    trees = np.diff([0, *facts["restarts"], facts["num_rounds"]]).tolist()
    matrix = brute_force.node_matrix(trees, completion=False)
    squared = brute_force.worst_case(matrix, facts["min_separation"], facts["max_participations"])
    return squared / (2 * facts["noise_multiplier"] ** 2)


def test_the_headline_is_the_sum_of_both_stages(whole, capsys):
    made, (result, text) = whole
    folder = pathlib.Path(made.run_dir)
    rhos = [stage_rho(folder / name) for name in ("stage1", "stage2")]
    assert min(rhos) > 0
    stated = json.loads((folder / "privacy.json").read_text())
    assert stated["rho"] == result["rho"] == pytest.approx(sum(rhos), rel=1e-9)
    assert result["epsilon"] == pytest.approx(
        accounting.epsilon_from_rho(sum(rhos), delta=made.delta, known="gaussian")
    )
    for name, rho in zip(("stage1", "stage2"), rhos):
        assert json.loads((folder / name / "privacy.json").read_text())["rho"] == pytest.approx(rho, rel=1e-9)
    assert [m["kind"] for m in stated["mechanisms"]] == [
        "TreeAggregation",
        "QuantileEstimation",
        "TreeAggregation",
    ]
    searched, bits, kept = stated["mechanisms"]
    assert [m["part"] for m in stated["mechanisms"]] == ["stage1", "stage1", "stage2"]
    assert [m["report_goal"] for m in stated["mechanisms"]] == [2, 2, made.report_goal]
    assert (searched["clip_norm"], kept["clip_norm"]) == (0.3, result["clip_norm"])
    assert [m.get("noise_on") for m in stated["mechanisms"]] == ["updates", "bits", None]
    # What the stage was told, of which the two multipliers that ran are the parts.
    whole_z = json.loads((folder / "stage1" / "mechanism.json").read_text())["noise_multiplier"]
    assert {m.get("whole_noise_multiplier") for m in (searched, bits)} == {whole_z}
    shares = sum(m["noise_multiplier"] ** -2 for m in (searched, bits))
    assert shares**-0.5 == pytest.approx(whole_z)
    words = (folder / "privacy.md").read_text()
    for heading in ("(stage1): TreeAggregation", "(stage1): QuantileEstimation", "(stage2): TreeAggregation"):
        assert f"## Mechanism {heading}" in words
    assert f"Noise multiplier z of the updates | {searched['noise_multiplier']}" in words
    assert f"Noise multiplier z of the clip bits (each +-1/2) | {bits['noise_multiplier']}" in words
    assert f"1/z^2 is the sum of theirs) | {whole_z:.6g}" in words
    assert f"Clip norm C | {result['clip_norm']:g}" in words
    assert "Clip norm C (at the start: it adapts) | 0.3" in words
    assert stated["sentence"] in text
    for note in ("stage1 alone", "stage2 alone"):
        assert note in (folder / "privacy.md").read_text()
    assert accounts.main(["report", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["rho"] == pytest.approx(sum(rhos), rel=1e-9)
    assert printed["squared_sensitivity"] is None  # each stage has its own


@pytest.mark.parametrize("kept", [0, 5])
def test_a_first_stage_that_lost_rounds_is_not_stated(whole, tmp_path, kept, capsys):
    """The second stage began, so the first had run to its end: what is missing was released all the same."""
    folder = shutil.copytree(whole[0].run_dir, tmp_path / "cut")
    log = folder / "stage1" / "participation.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:kept]))
    assert accounts.main(["report", str(folder)]) == 2
    assert f"holds {kept} of 6 rounds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("begun", "gone", "says"),
    [
        (two_stage.STAGES, ("stage2",), r"stage2 has no mechanism\.json"),
        (two_stage.STAGES, ("stage1", "stage2"), r"stage1 has no mechanism\.json"),
        # A list that does not say which have begun, as earlier versions wrote it.
        ((), ("stage2",), "never falls"),
        ((), ("stage1", "stage2"), "no stage of it has begun, but .*privacy.json shows"),
    ],
)
def test_stages_that_are_gone_are_not_begun_again(whole, tmp_path, begun, gone, says):
    made = whole[0]
    folder = shutil.copytree(made.run_dir, tmp_path / "run")
    record.write_stages(folder, two_stage.STAGES, begun=begun)
    for name in gone:
        shutil.rmtree(folder / name)
    with pytest.raises(ValueError, match=says):
        session.train(config(tmp_path, data=made.data, vocabulary=made.vocabulary, resume=True))
    assert not any((folder / name).exists() for name in gone)


def test_a_second_stage_that_lost_rounds_is_not_stated(whole, tmp_path, capsys):
    folder = shutil.copytree(whole[0].run_dir, tmp_path / "cut")
    log = folder / "stage2" / "participation.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    assert accounts.main(["report", str(folder)]) == 2
    assert "holds 1 of 4 rounds" in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds 1 of 4 rounds"):
        exported.load(folder)


def test_a_stage_is_not_stated_alone_where_the_list_of_stages_is_lost(whole, tmp_path):
    folder = shutil.copytree(whole[0].run_dir, tmp_path / "run")
    (folder / "stages.json").unlink()
    for act in (
        lambda: exported.export(folder / "stage2", tmp_path / "m.safetensors"),
        lambda: accounting.report(folder),
        lambda: session.evaluate_run(settings.EvaluateConfig(run_dir=str(folder))),
    ):
        with pytest.raises(
            ValueError, match=r"stages.json is missing, and .*config.json is of a run in stages"
        ):
            act()
    # The record of a stage says itself that it is one.
    assert "does not cover stage1 of the same run" in accounting.report(folder / "stage2").sentence


def test_a_search_that_lost_its_last_estimate_sets_no_clip_norm(whole, tmp_path):
    folder = shutil.copytree(pathlib.Path(whole[0].run_dir) / "stage1", tmp_path / "stage1")
    path = folder / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines(keepends=True) if '"round": 5' not in line]
    for text in ("".join(kept), ""):
        path.write_text(text)
        with pytest.raises(InputError, match="lost the estimate of round 5"):
            two_stage.clip_norm(folder)


def test_the_second_clip_norm_is_the_private_estimate_and_no_other(whole):
    made, (result, _) = whole
    folder = pathlib.Path(made.run_dir)
    search = [r for r in metrics.read(folder / "stage1" / "metrics.jsonl") if "fraction" in r]
    operator = metrics.read(folder / "stage1" / "operator.jsonl")
    private = bare = made.clip_norm
    for released, seen in zip(search, operator, strict=True):
        private *= math.exp(-made.clip_learning_rate * (released["fraction"] - made.clip_quantile))
        within = 1 - seen["num_clipped"] / made.clip_search_report_goal
        bare *= math.exp(-made.clip_learning_rate * (within - made.clip_quantile))
    used = {r["clip_norm"] for r in metrics.read(folder / "stage2" / "metrics.jsonl") if "clip_norm" in r}
    assert used == {result["clip_norm"]}
    assert result["clip_norm"] == pytest.approx(private, rel=1e-5)
    assert abs(result["clip_norm"] / bare - 1) > 1e-3
    stated = json.loads((folder / "stage2" / "mechanism.json").read_text())["clip"]
    assert stated["norm"] == result["clip_norm"]
    assert stated["kind"] == "fixed"


def test_both_stages_begin_alike_and_differ_as_asked(whole):
    made, _ = whole
    folder = pathlib.Path(made.run_dir)
    saved = [json.loads((folder / name / "config.json").read_text()) for name in two_stage.STAGES]
    assert [s["report_goal"] for s in saved] == [2, made.report_goal]
    assert saved[0]["noise_multiplier"] / 2 == pytest.approx(made.noise_multiplier / made.report_goal)
    assert saved[0]["insecure_noise_seed"] != saved[1]["insecure_noise_seed"]
    assert (folder / "plots" / "two_stage.png").stat().st_size > 0
    search, proper = two_stage.configs(config(folder, clip_search_report_goal=None, report_goal=40))
    assert (search.report_goal, search.rounds, search.clip) == (4, 6, "adaptive")
    assert (proper.clip, proper.rounds) == ("fixed", 4)


def test_the_other_commands_take_the_folder_around_both(whole, tmp_path):
    made, (result, _) = whole
    scored, _ = session.evaluate_run(settings.EvaluateConfig(run_dir=made.run_dir))
    for name in ("top1_words", "perplexity", "rho", "epsilon", "run_dir"):
        assert scored[name] == result[name]
    drawn, _ = session.compare(
        settings.CompareConfig(runs=(made.run_dir,), output=str(tmp_path / "c.png"), reach=(0.0, 100.1))
    )
    assert drawn["runs"][0]["rho"] == result["rho"]
    assert drawn["runs"][0]["reached_0"] == made.evaluate_every
    assert drawn["runs"][0]["reached_100.1"] is None


def test_runs_over_other_clients_are_not_ranked(whole, tmp_path):
    runs = [whole[0].run_dir, str(shutil.copytree(whole[0].run_dir, tmp_path / "other"))]
    compared = settings.CompareConfig(runs=tuple(runs), output=str(tmp_path / "c.png"))
    assert "different data" not in session.compare(compared)[1]
    place = tmp_path / "other" / "stage2" / "manifest.json"
    manifest = json.loads(place.read_text())
    manifest["digests"]["data"] = "0" * 64
    place.write_text(json.dumps(manifest))
    assert "different data" in session.compare(compared)[1]


@pytest.mark.parametrize("killed", [("stage1", 3), ("stage2", 2)])
def test_a_run_killed_in_either_stage_goes_on_to_the_same_bits(whole, tmp_path, monkeypatch, killed):
    made = config(tmp_path)
    real_append = train.record.ParticipationLog.append

    def append(self, number, *rest, **more):
        real_append(self, number, *rest, **more)
        if (self._path.parent.name, number) == killed:
            raise KeyboardInterrupt

    monkeypatch.setattr(train.record.ParticipationLog, "append", append)
    with pytest.raises(KeyboardInterrupt):
        session.train(made)
    monkeypatch.undo()
    so_far = accounting.report(made.run_dir).data
    assert json.loads((tmp_path / "run" / "privacy.json").read_text()) == so_far
    if killed[0] == "stage1":
        assert any("stage2 has not begun" in note for note in so_far["notes"])
        assert "same run" not in so_far["sentence"]  # nothing of it was released
    assert so_far["rho"] < whole[1][0]["rho"]
    result, _ = session.train(config(tmp_path, resume=True))
    assert result["clip_norm"] == whole[1][0]["clip_norm"]
    assert result["rho"] == whole[1][0]["rho"]
    for mine, other in zip(two_stage.configs(made), two_stage.configs(whole[0])):
        same_run(with_norm(mine, result), with_norm(other, result))


def with_norm(stage, result):
    return dataclasses.replace(stage, clip_norm=result["clip_norm"]) if stage.clip == "fixed" else stage


def test_a_resume_refuses_another_search(whole):
    made, _ = whole
    folder = pathlib.Path(made.run_dir)
    changes: dict[str, Any]
    for changes in ({"clip_search_rounds": 5}, {"clip_quantile": 0.6}, {"report_goal": 5}):
        with pytest.raises(InputError, match=f"began with other settings: {next(iter(changes))}"):
            session.train(config(folder.parent, resume=True, **changes))


def test_a_resume_in_the_first_stage_refuses_other_settings_of_the_second(tmp_path, monkeypatch):
    fixed: dict[str, Any] = {"clip_search_noise_multiplier": 0.2}
    monkeypatch.setattr(session, "train_runs", lambda *_: pytest.fail("the search went on"))
    made = config(tmp_path, **fixed)
    with pytest.raises(pytest.fail.Exception):
        session.train(made)
    with pytest.raises(ValueError, match="no stage of it has begun"):
        accounting.report(made.run_dir)
    with pytest.raises(pytest.fail.Exception):  # killed before the first stage began, it can be resumed
        session.train(config(tmp_path, resume=True, **fixed))
    changes: dict[str, Any]
    for changes in ({"report_goal": 5}, {"restarts": (2,)}, {"server_cooldown": 0}):
        with pytest.raises(InputError, match=f"began with other settings: {next(iter(changes))}"):
            session.train(config(tmp_path, resume=True, **fixed, **changes))


def test_deployment_scale_is_that_of_both_stages(whole):
    made, (_, text) = whole
    folder = pathlib.Path(made.run_dir)
    stated = json.loads((folder / "privacy.json").read_text())
    there, rhos = stated["deployment"], []
    for name, share in (("stage1", made.clip_search_report_goal / made.report_goal), ("stage2", 1)):
        facts = json.loads((folder / name / "mechanism.json").read_text())
        goal = made.deployment_report_goal * share
        separation = made.deployment_population // int(goal)
        trees = np.diff([0, *facts["restarts"], facts["num_rounds"]]).tolist()
        matrix = brute_force.node_matrix(trees, completion=False)
        rounds = facts["num_rounds"]
        squared = brute_force.worst_case(matrix, min(separation, rounds), -(-rounds // separation))
        z = facts["noise_multiplier"] * goal / facts["report_goal"]
        rhos.append(squared / (2 * z**2))
        assert there["runs"][name]["report_goal"] == goal
        alone = json.loads((folder / name / "privacy.json").read_text())["deployment"]
        assert alone == there["runs"][name]
        assert alone["rho"] == pytest.approx(rhos[-1])
    assert there["rho"] == pytest.approx(sum(rhos))
    assert there["epsilon"] == pytest.approx(
        accounting.epsilon_from_rho(sum(rhos), delta=made.delta, known="gaussian")
    )
    assert f"At deployment scale (a projection, not this run): {there['sentence']}" in text
    assert there["sentence"] in (folder / "privacy.md").read_text()
    for words in ("3250 devices a round", "6500 devices a round", "the same 4000000 devices"):
        assert words in there["sentence"]
    assert any("keeps its share of the report goal, 2 of 4" in note for note in stated["notes"])
    # Asked for another scale, the search keeps its share too.
    other = accounting.report(folder, deployment_report_goal=100, population=1000).data["deployment"]
    assert [run["report_goal"] for run in other["runs"].values()] == [50, 100]


def test_a_search_that_costs_more_than_the_training_is_said_at_once(whole, tmp_path, capsys, monkeypatch):
    made, (_, text) = whole
    folder = pathlib.Path(made.run_dir)
    rhos = [json.loads((folder / name / "privacy.json").read_text())["rho"] for name in two_stage.STAGES]
    assert rhos[0] > rhos[1]
    warning = next(
        line for line in text.splitlines() if line.startswith("the search for the clip norm costs")
    )
    for words in (
        f"{rhos[0]:.4g}",
        f"{rhos[1]:.4g}",
        "--clip-search-rounds",
        "--clip-search-noise-multiplier",
    ):
        assert words in warning

    class Began(Exception):
        pass

    def begin(*_):
        raise Began

    monkeypatch.setattr(session, "train_runs", begin)
    with pytest.raises(Began):
        session.train(config(tmp_path))
    assert capsys.readouterr().err.splitlines()[-1] == f"jaxpriv keyboard: {warning}"
    # What it says to set makes the stages cost the same, and is not warned about.
    words = warning.replace(",", " ").split()
    options = {
        name.strip("-").replace("-", "_"): float(words[words.index(name) + 1])
        for name in ("--clip-search-noise-multiplier", "--clipped-count-stddev")
        if name in words
    }
    options["clip_search_noise_multiplier"] *= 1.01
    with pytest.raises(Began):
        session.train(config(tmp_path, "quiet", **options))
    assert "costs" not in capsys.readouterr().err


def test_the_tiny_preset_searches_for_a_few_rounds():
    assert settings.TINY.clip_search_rounds <= 5


def test_stages_are_never_added_to_another_run(tmp_path):
    plain = config(tmp_path, clip="fixed")
    session.train(plain)
    before = sorted(p.name for p in pathlib.Path(plain.run_dir).iterdir())
    with pytest.raises(InputError, match='clip was "fixed", now it is "two_stage"'):
        session.train(config(tmp_path, resume=True))
    assert sorted(p.name for p in pathlib.Path(plain.run_dir).iterdir()) == before
    (pathlib.Path(plain.run_dir) / "config.json").unlink()
    with pytest.raises(InputError):
        session.train(config(tmp_path, resume=True))
    with pytest.raises(InputError, match="has released rounds"):
        train.Run(plain, corpus.load(plain), pathlib.Path(plain.run_dir)).begin()


def test_a_stage_says_that_it_is_one_and_is_not_exported_alone(whole, tmp_path):
    folder = pathlib.Path(whole[0].run_dir)
    for name, other in (("stage1", "stage2"), ("stage2", "stage1")):
        stated = accounting.report(folder / name)
        assert stated.sentence.endswith(f"does not cover {other} of the same run, over the same devices.")
        assert f"{other} of the same run, over the same devices" in stated.data["not_covered"]
        assert stated.sentence in (folder / name / "privacy.md").read_text()
    both = [accounting.report([folder / name for name in two_stage.STAGES]), accounting.report(folder)]
    assert both[0].sentence == both[1].sentence
    assert "same run" not in both[0].sentence
    other = tmp_path / "other"
    shutil.copytree(folder / "stage1", other)  # a run by itself, at its place
    assert "stage1 of the same run" in accounting.report([folder / "stage2", other]).sentence
    with pytest.raises(InputError, match="one stage of the run"):
        exported.export(folder / "stage2", tmp_path / "m.safetensors")
    assert exported.load(folder).statement["rho"] == json.loads((folder / "privacy.json").read_text())["rho"]


def test_a_stage_says_that_it_is_one_wherever_its_folder_lies(whole, tmp_path):
    for name, other in (("stage1", "stage2"), ("stage2", "stage1")):
        lone = shutil.copytree(pathlib.Path(whole[0].run_dir) / name, tmp_path / f"lone{name}")
        assert accounting.report(lone).sentence.endswith(
            f"does not cover {other} of the same run, over the same devices."
        )
        with pytest.raises(InputError, match="is one stage of a run; give that run's folder"):
            exported.export(lone, tmp_path / "m.safetensors")


@pytest.mark.parametrize("listed", [["stage1"], ["stage2"], ["stage2", "stage1"]])
def test_a_list_that_leaves_a_stage_out_is_refused(whole, tmp_path, listed):
    copy = shutil.copytree(whole[0].run_dir, tmp_path / "copy")
    shutil.copytree(copy / "stage2", copy / "stage2.bak")  # says the same
    assert accounting.report(copy).data["rho"] == whole[1][0]["rho"]
    record.write_stages(copy, listed)
    for refused in (accounting.report, lambda folder: exported.export(folder, tmp_path / "m.safetensors")):
        with pytest.raises(ValueError, match="is a stage of the run too: what it released would be left out"):
            refused(copy)


def test_a_stage_that_is_lost_while_it_runs_is_not_begun_again(tmp_path, monkeypatch):
    """No statement of the whole run is there yet that would tell of it."""
    made = config(tmp_path)
    real_append = train.record.ParticipationLog.append

    def append(self, number, *rest, **more):
        real_append(self, number, *rest, **more)
        if (self._path.parent.name, number) == ("stage2", 1):
            raise KeyboardInterrupt

    monkeypatch.setattr(train.record.ParticipationLog, "append", append)
    monkeypatch.setattr(
        session.stated, "when_stopped", lambda folders: contextlib.nullcontext()
    )  # as SIGKILL does
    with pytest.raises(KeyboardInterrupt):
        session.train(made)
    monkeypatch.undo()
    folder = tmp_path / "run"
    assert not (folder / "privacy.json").exists()
    shutil.rmtree(folder / "stage2")
    for refused in (lambda: accounting.report(folder), lambda: session.train(config(tmp_path, resume=True))):
        with pytest.raises(ValueError, match=r"stage2 has no mechanism\.json"):
            refused()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_search_rounds": 0}, "--clip-search-rounds must be at least 1"),
        ({"clip_search_report_goal": 0}, "--clip-search-report-goal must be at least 1"),
        ({"clip_search_report_goal": 1000}, "1000"),
        ({"clip_search_noise_multiplier": 0.0}, "--clip-search-noise-multiplier must be"),
        ({"clip_search_restarts": (9,)}, "restarts"),
        ({"clipped_count_stddev": 0.01}, "--clipped-count-stddev"),
        ({"restarts": (7,)}, "--restarts"),
        # The second stage alone: its places, calendar, bits and noise.
        ({"report_goal": 25}, "--report-goal"),
        ({"rounds": 40, "max_participations": 6}, "--max-participations"),
        ({"rounds": 12, "min_separation": 12, "clip_search_report_goal": 1}, "cannot fill rounds of 4"),
        ({"secure_aggregation": "secagg", "secagg_bits": 8, "report_goal": 24}, "--secagg-bits 8"),
        ({"noise_multiplier": 1e31, "clip_search_noise_multiplier": 0.4}, "--noise-multiplier"),
        ({"server_cooldown": 5}, "--server-cooldown"),
    ],
)
def test_what_either_stage_cannot_serve_is_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        session.train(config(tmp_path, **changes))
    assert not (tmp_path / "run").exists()


def test_a_lost_or_damaged_stage_is_never_left_out(whole, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(whole[0].run_dir, copy)
    (copy / "stage1" / "mechanism.json").unlink()
    with pytest.raises(ValueError, match=r"stage1 has no mechanism\.json"):
        accounting.report(copy)
    stages: Any
    for stages in ([], ["stage1", "stage1"], ["../stage1"], "stage1", [1]):
        record.write_stages(copy, stages)
        with pytest.raises(ValueError, match=r"stages\.json"):
            accounting.report(copy)
    (copy / "stages.json").write_text("{}")
    with pytest.raises(ValueError, match="not a list of stages"):
        accounting.report(copy)


def test_no_noise_in_two_stages_states_no_guarantee(tmp_path):
    result, text = session.train(config(tmp_path, mechanism="none", rounds=1, clip_search_rounds=2))
    assert result["rho"] is None
    assert "No differential privacy guarantee" in text
    assert np.isfinite(result["clip_norm"])
