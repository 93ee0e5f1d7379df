"""A whole run: what it leaves, that it can be killed anywhere, what it refuses."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from accounting import reporting, round_up
from tests.trainers.keyboard import toy
from trainers import cli
from trainers.common import checkpoint, metrics
from trainers.common.errors import InputError
from trainers.keyboard import corpus, ngram, session, train
from trainers.keyboard.train import Run

ROOT = pathlib.Path(__file__).resolve().parents[3]
COMPARED = ("metrics.jsonl", "operator.jsonl", "participation.jsonl", "mechanism.json", "vocabulary.json")


def run(config):
    return session.train(config)


def final_state(config):
    data = corpus.load(config)
    made = Run(config, data, pathlib.Path(config.run_dir))
    state = checkpoint.load(made.checkpoints, config.rounds, made.start())
    bits = [
        np.asarray(
            jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )
        for leaf in map(jax.numpy.asarray, jax.tree.leaves(state))
    ]
    return [b.tobytes() for b in bits]


def same_run(a, b):
    for name in COMPARED:
        assert pathlib.Path(a.run_dir, name).read_bytes() == pathlib.Path(b.run_dir, name).read_bytes(), name
    assert final_state(a) == final_state(b)


def test_a_run_leaves_what_it_promises(whole):
    config, (result, text) = whole
    folder = pathlib.Path(config.run_dir)
    for name in (
        "config.json",
        "manifest.json",
        "mechanism.json",
        "participation.jsonl",
        "privacy.json",
        "privacy.md",
        "metrics.jsonl",
        "operator.jsonl",
        "plots/learning.png",
        "plots/clipping.png",
        "plots/privacy.png",
        "plots/smart_compose.png",
        "plots/participation.png",
    ):
        assert (folder / name).stat().st_size > 0, name
    assert list(result) == [
        "run_dir",
        "top1_words",
        "top3_words",
        "tff_accuracy",
        "perplexity",
        "ngram_top1_words",
        "rho",
        "epsilon",
        "delta",
        "seconds",
        "simulation",
        "bytes_up",
        "bytes_down",
    ]
    assert result["simulation"] is True  # the toy's noise comes from a public seed
    assert 0 <= result["top1_words"] <= 100
    assert stat.S_IMODE((folder / "checkpoints").stat().st_mode) == 0o700
    for name in ("participation.jsonl", "operator.jsonl", "timing.jsonl", "manifest.json"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name
    assert "simulation" in text.lower()
    # The n-gram is scored on the test clients for the table, and on what the curves are scored on for the picture.
    data, scores = corpus.load(config), json.loads((folder / "ngram.json").read_text())
    fitted = ngram.fit(np.concatenate(data.train), vocabulary=data.vocabulary, order=5)
    same = ngram.evaluate(fitted, data.validation[: config.evaluation_examples])
    assert scores["during_training"] == pytest.approx(same._asdict())
    assert scores["top1_words"] == result["ngram_top1_words"] != scores["during_training"]["top1_words"]


def test_the_statement_is_the_accountants(whole):
    """It comes with all its conditions (AC58)."""
    config, (result, _) = whole
    stated = json.loads(pathlib.Path(config.run_dir, "privacy.json").read_text())
    again = reporting.report(config.run_dir).data
    assert stated["rho"] == again["rho"] == pytest.approx(result["rho"])
    assert stated["observed"]["rho"] <= stated["rho"]
    assert stated["observed"]["num_rounds"] == config.rounds
    assert stated["deployment"] is not None
    words = pathlib.Path(config.run_dir, "privacy.md").read_text()
    for fact in (
        "| Protected unit | device |",
        "| Adjacency | zero-out",
        "| Noise multiplier z | 0.3 |",
        "| Clip norm C | 1 |",
        "| Rounds | 6 |",
        "| Enforced separation | b = 6 ",
        "| Enforced participations | at most 1 |",
        "| Restarts after rounds | none |",
        f"| zCDP rho | {round_up(again['rho'])} |",
        f"| Epsilon | {round_up(again['epsilon'])} at delta = 1e-10 |",
        "- hyperparameter tuning on the same devices",
        "- several devices of one user",
    ):
        assert fact in words, fact


def test_what_is_for_release_holds_no_client_text_and_only_what_is_covered(whole):
    config, _ = whole
    folder = pathlib.Path(config.run_dir)
    for path in [p for p in folder.rglob("*") if p.is_file()]:  # checkpoints, pictures and all
        assert toy.RARE.encode() not in path.read_bytes(), path
    for record in metrics.read(folder / "metrics.jsonl"):
        if "evaluation" in record:
            assert record["covered_by_guarantee"] is False
        else:
            assert set(record) == {"round", "clip_norm", "estimate", "fraction", "update_norm"}
    assert all(r["covered_by_guarantee"] is False for r in metrics.read(folder / "operator.jsonl"))


def test_the_same_settings_give_the_same_bits(whole, tmp_path):
    config, _ = whole
    other = toy.config(tmp_path)
    run(other)
    same_run(config, other)


def test_two_devices_give_the_same_model_but_for_rounding(whole, tmp_path):
    config, (result, _) = whole
    spread, _ = run(toy.config(tmp_path, devices=2))
    assert spread["perplexity"] == pytest.approx(result["perplexity"], rel=1e-4)
    for name in ("participation.jsonl", "mechanism.json"):
        assert (tmp_path / "run" / name).read_bytes() == pathlib.Path(config.run_dir, name).read_bytes()


@pytest.mark.parametrize(
    "killed", ["between rounds", "before the first checkpoint", "inside a checkpoint write"]
)
def test_a_killed_run_goes_on_to_the_same_bits(whole, tmp_path, monkeypatch, killed):
    config = toy.config(tmp_path)
    if killed == "inside a checkpoint write":
        real = os.rename

        def rename(a, b):
            if pathlib.Path(b).name == "4":
                raise KeyboardInterrupt
            real(a, b)

        monkeypatch.setattr(os, "rename", rename)
    else:
        rounds = 3 if killed == "between rounds" else 1
        real_append = train.record.ParticipationLog.append

        def append(self, number, *rest, **more):
            real_append(self, number, *rest, **more)
            if number == rounds:
                raise KeyboardInterrupt

        monkeypatch.setattr(train.record.ParticipationLog, "append", append)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    resumed = toy.config(tmp_path, resume=True)
    with contextlib.suppress(UserWarning):
        run(resumed)
    same_run(whole[0], config)


@pytest.mark.slow
def test_a_process_killed_at_any_moment_goes_on_to_the_same_bits(tmp_path):
    config = toy.config(tmp_path, rounds=8)
    whole = toy.config(tmp_path, "whole", rounds=8)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def start(settings):
        command = [sys.executable, "-m", "trainers", "keyboard", *toy.argv(settings)]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)

    process = start(whole)
    assert process.wait(300) == 0, process.stderr.read()
    log = pathlib.Path(config.run_dir, "participation.jsonl")
    for lines in (1, 4, 6):
        resume = pathlib.Path(config.run_dir, "config.json").exists()
        process = start(toy.config(tmp_path, rounds=8, resume=resume))
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            if log.exists() and log.read_bytes().count(b"\n") >= lines:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    process = start(toy.config(tmp_path, rounds=8, resume=True))
    assert process.wait(300) == 0, process.stderr.read()
    same_run(whole, config)


def test_a_run_folder_is_never_overwritten(whole, capsys):
    config, _ = whole
    assert cli.main(["keyboard", *toy.argv(config)]) == 2
    assert "exists already" in one_line(capsys)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"noise_multiplier": 3.0}, "noise_multiplier"),
        ({"clip_norm": 2.0}, "clip_norm"),
        ({"min_separation": 2}, "min_separation"),
        ({"seed": 1}, "seed"),
        ({"rounds": 8}, "rounds"),
    ],
)
def test_resuming_with_other_settings_is_refused(whole, capsys, changes, named):
    config, _ = whole
    changed = toy.config(pathlib.Path(config.run_dir).parent, resume=True, **changes)
    before = snapshot(config.run_dir)
    assert cli.main(["keyboard", *toy.argv(changed)]) == 2
    assert named in one_line(capsys)
    assert snapshot(config.run_dir) == before


def test_a_refused_resume_names_all_that_differs_and_the_preset(whole, capsys):
    config, _ = whole
    folder = pathlib.Path(config.run_dir).parent
    changed = toy.config(folder, resume=True, clip_norm=2.0, delta=1e-6, server_momentum=0.8)
    assert cli.main(["keyboard", *toy.argv(changed)]) == 2
    said = one_line(capsys)
    for field in ("clip_norm was 1.0, now it is 2.0", "delta was 1e-10, now it is 1e-06", "server_momentum"):
        assert field in said
    assert "--preset" not in said

    # The same command without its `--preset tiny`.
    words = toy.argv(toy.config(folder, resume=True))
    at = words.index("--preset")
    assert cli.main(["keyboard", *words[:at], *words[at + 2 :]]) == 2
    said = one_line(capsys)
    assert said.count(" was ") == 5
    assert "; and " in said
    assert "more" in said
    assert "as --preset tiny does from --preset demo" in said


def killed_after(monkeypatch, config, number):
    """Starts a run and kills it once round `number` is logged."""
    real = train.record.ParticipationLog.append

    def append(self, at, *rest, **more):
        real(self, at, *rest, **more)
        if at == number:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.record.ParticipationLog, "append", append)
        with pytest.raises(KeyboardInterrupt):
            run(config)


def test_a_run_killed_before_its_first_checkpoint_keeps_its_secret_and_settings(
    tmp_path, monkeypatch, capsys
):
    config = toy.config(tmp_path, insecure_noise_seed=None)
    killed_after(monkeypatch, config, 0)
    data = corpus.load(config)
    secrets = [Run(config, data, tmp_path / "run").resume()[1].secret.tobytes() for _ in range(2)]
    assert secrets[0] == secrets[1]
    for changes in ({"noise_multiplier": 1e-6}, {"insecure_noise_seed": 5}):
        changed = toy.config(tmp_path, resume=True, **({"insecure_noise_seed": None} | changes))
        assert cli.main(["keyboard", *toy.argv(changed)]) == 2
        assert next(iter(changes)) in one_line(capsys)


@pytest.mark.filterwarnings("ignore:checkpoint")
@pytest.mark.parametrize("loss", ["all gone", "all damaged"])
def test_a_run_without_a_whole_checkpoint_is_not_begun_again(tmp_path, monkeypatch, capsys, loss):
    config = toy.config(tmp_path)
    killed_after(monkeypatch, config, 3)
    for place in list((tmp_path / "run" / "checkpoints").iterdir()):
        if loss == "all gone":
            shutil.rmtree(place)
        else:
            (place / "facts.json").unlink()
    before = (tmp_path / "run" / "participation.jsonl").read_bytes()
    assert cli.main(["keyboard", *toy.argv(toy.config(tmp_path, resume=True))]) == 2
    assert "noise key" in one_line(capsys)
    assert (tmp_path / "run" / "participation.jsonl").read_bytes() == before


def test_resuming_on_other_data_is_refused(whole, tmp_path, capsys):
    config, _ = whole
    folder = pathlib.Path(config.run_dir).parent
    data = folder / "clients.jsonl"
    kept = data.read_bytes()
    toy.write_clients(data, seed=1)
    try:
        assert cli.main(["keyboard", *toy.argv(toy.config(folder, resume=True))]) == 2
    finally:
        data.write_bytes(kept)
    assert "data" in one_line(capsys)


def test_resuming_what_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert cli.main(["keyboard", *toy.argv(toy.config(tmp_path, resume=True))]) == 2
    assert "not the folder of a run" in one_line(capsys)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"noise_multiplier": -1.0}, "noise-multiplier"),
        ({"noise_multiplier": float("nan")}, "noise-multiplier"),
        ({"noise_multiplier": float("inf")}, "noise-multiplier"),
        ({"noise_multiplier": 0.0}, "--mechanism none"),
        ({"clip": "adaptive", "noise_multiplier": 0.5, "clipped_count_stddev": 0.25}, "count"),
        ({"min_separation": 7, "rounds": 12}, "24 devices cannot fill rounds of 4"),
        ({"min_separation": 0}, "--min-separation"),
        ({"max_participations": 1, "rounds": 12}, "--max-participations"),
        ({"report_goal": 25}, "report-goal"),
        ({"report_goal": 0}, "report-goal"),
        ({"delta": 1.0}, "delta"),
        ({"restarts": (3, 2)}, "restarts"),
        ({"restarts": (6,)}, "restarts"),
        ({"mechanism": "blt", "completion": True}, "completion"),  # AC12: refused before the first round
        ({"seed": 2**32 + 1}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"clip_norm": 0.0}, "clip-norm"),
        ({"vocabulary_size": 99}, "vocabulary-size"),
        ({"data": "no-such-file.jsonl"}, "no-such-file.jsonl"),
        ({"data": "."}, "folder"),
        ({"vocabulary": "public"}, "--public"),
        ({"clip_norm": 2e-38}, "clip-norm"),
        ({"clip_norm": 1e39}, "clip-norm"),
        ({"noise_multiplier": 1e39}, "noise-multiplier"),
        ({"min_separation": 2**31}, "min-separation"),
        ({"clip": "adaptive", "clipped_count_stddev": float("inf")}, "clipped-count-stddev"),
        (
            {"mechanism": "none", "clip": "adaptive", "clipped_count_stddev": float("nan")},
            "clipped-count-stddev",
        ),
        ({"devices": 0}, "devices must be at least 1"),
        ({"devices": 64}, "there are 8"),
        ({"timer_jitter": -1}, "timer-jitter"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(tmp_path, capsys, changes, says):
    config = toy.config(tmp_path, **changes)
    assert cli.main(["keyboard", *toy.argv(config)]) == 2
    assert says in one_line(capsys)
    assert not pathlib.Path(config.run_dir).exists()


def one_line(capsys) -> str:
    error = capsys.readouterr().err.strip()
    last = error.splitlines()[-1]
    assert "Traceback" not in error
    assert last.startswith("jaxpriv keyboard")
    return last


def snapshot(folder):
    return {p: p.read_bytes() for p in pathlib.Path(folder).rglob("*") if p.is_file()}


def test_more_noise_costs_less(tmp_path):
    """The same run with a bigger z has a smaller epsilon (AC58)."""
    costs = []
    for z in (0.5, 1.0):
        config = toy.config(tmp_path, f"z{z}", noise_multiplier=z)
        costs.append(Run(config, corpus.load(config), tmp_path).spent(6)["epsilon"])
    assert costs[1] < costs[0]


def test_training_that_diverges_stops_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(train.checks, "MOST_RATE", 1e39)
    with pytest.raises(InputError, match="diverged"):
        run(toy.config(tmp_path, client_learning_rate=1e38, local_epochs=3, mechanism="none", rounds=12))
    assert len(metrics.read(tmp_path / "run" / "operator.jsonl")) == 3


def test_the_servers_rate_falls_over_the_last_rounds(tmp_path):
    server = train.server_optimizer(toy.config(tmp_path, rounds=6, server_cooldown=4, server_momentum=0.0))
    state, rates = server.init(jax.numpy.zeros(())), []
    for _ in range(6):
        update, state = server.update(jax.numpy.ones(()), state)
        rates.append(float(-update) / 2.0)
    np.testing.assert_allclose(rates, [1, 1, 1, 0.75, 0.5, 0.25])


def test_the_clip_norm_in_force_moves_only_at_restarts(tmp_path):
    config = toy.config(
        tmp_path,
        clip="adaptive",
        clip_norm=0.05,
        restarts=(2, 5),
        noise_multiplier=0.3,
        clipped_count_stddev=0.5,
    )
    run(config)
    rows = [r for r in metrics.read(tmp_path / "run" / "metrics.jsonl") if "clip_norm" in r]
    in_force = [r["clip_norm"] for r in rows]
    assert in_force[0] == in_force[1] == pytest.approx(0.05)
    assert in_force[2] == in_force[3] == in_force[4] == rows[1]["estimate"]
    assert in_force[5] == rows[4]["estimate"]
    assert len({r["estimate"] for r in rows}) == 6
    mechanisms = json.loads((tmp_path / "run" / "privacy.json").read_text())["mechanisms"]
    assert len(mechanisms) == 2


@pytest.mark.parametrize("mechanism", ["independent", "tree", "blt", "banded"])
def test_every_mechanism_trains_and_is_stated(tmp_path, mechanism):
    config = toy.config(tmp_path, mechanism=mechanism, rounds=3, evaluate_every=3)
    result, _ = run(config)
    assert result["rho"] > 0
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["rho"] == pytest.approx(result["rho"])


def test_without_a_mechanism_there_is_no_epsilon(tmp_path):
    result, text = run(toy.config(tmp_path, mechanism="none", rounds=2))
    assert result["rho"] is None
    assert result["epsilon"] is None
    assert "none" in text


def test_the_comparison_trains_the_twin_and_the_ngram(tmp_path):
    result, text = run(toy.config(tmp_path, compare=True, rounds=2))
    assert "without noise" in text
    assert "5-gram" in text
    assert result["ngram_top1_words"] > 0
    own, twin = (metrics.read(tmp_path / "run" / name / "participation.jsonl") for name in ("", "no_noise"))
    assert own == twin  # the same cohorts: only the noise differs
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert any("no_noise" in line for line in stated["not_covered"])
    assert json.loads((tmp_path / "run" / "no_noise" / "privacy.json").read_text())["epsilon"] is None
    assert all(
        r["covered_by_guarantee"] is False
        for r in metrics.read(tmp_path / "run" / "no_noise" / "metrics.jsonl")
    )


def test_a_trained_run_is_scored_again_from_its_folder(whole, capsys):
    config, (result, _) = whole
    assert cli.main(["keyboard", "evaluate", "--run-dir", config.run_dir, "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in ("top1_words", "top3_words", "tff_accuracy", "perplexity", "rho", "epsilon"):
        assert again[name] == pytest.approx(result[name])


def test_a_trained_run_is_scored_on_another_population(whole, tmp_path, capsys):
    config, (result, _) = whole
    other = toy.write_clients(tmp_path / "other.jsonl", clients=40, seed=3)
    command = ["keyboard", "evaluate", "--run-dir", config.run_dir, "--data", str(other), "--json"]
    assert cli.main(command) == 0
    scored = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert scored["perplexity"] > 0
    assert (scored["rho"], scored["epsilon"]) == (
        pytest.approx(result["rho"]),
        pytest.approx(result["epsilon"]),
    )


def test_the_config_of_something_else_is_refused(tmp_path, capsys):
    for content in ("{}", "[]", "null", '{"surprise": 1}'):
        (tmp_path / "config.json").write_text(content)
        assert cli.main(["keyboard", "evaluate", "--run-dir", str(tmp_path)]) == 2
        assert "config.json" in one_line(capsys)


def test_runs_are_drawn_beside_each_other(whole, tmp_path, capsys):
    config, _ = whole
    out = tmp_path / "compare.png"
    assert cli.main(["keyboard", "compare", "--runs", config.run_dir, "--output", str(out), "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]
    assert row["rounds"] == config.rounds
    assert row["noise_per_client"] == pytest.approx(config.noise_multiplier / config.report_goal)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["keyboard", "compare", "--runs", str(tmp_path)]) == 2
    assert "not the folder of a run" in one_line(capsys)
