"""Whatever was killed, cut, deleted or edited, a run never says less than it released; every stop is stated."""

import contextlib
import json
import shutil

import pytest

import accounting
from accounting import record, reporting
from tests.trainers.keyboard import toy
from tests.trainers.keyboard.test_train import killed_after, one_line, same_run, snapshot
from trainers import cli
from trainers.common import metrics, statements
from trainers.common.errors import InputError
from trainers.keyboard import released, session
from trainers.keyboard.train import Run


@pytest.fixture
def copied(whole, tmp_path):
    """A finished run that may be damaged, and its settings to resume it."""
    made = whole[0]
    shutil.copytree(made.run_dir, tmp_path / "run")
    return tmp_path / "run", toy.config(tmp_path, data=made.data, vocabulary=made.vocabulary, resume=True)


def lines(folder, name="participation.jsonl"):
    return (folder / name).read_text().splitlines(keepends=True)


def test_a_run_killed_again_before_it_caught_up_keeps_all_that_it_released(whole, tmp_path, monkeypatch):
    config = toy.config(tmp_path)
    folder = tmp_path / "run"
    killed_after(monkeypatch, config, 3)  # the newest checkpoint is of round 2
    before = {name: lines(folder, name) for name in ("participation.jsonl", "metrics.jsonl")}
    assert len(before["participation.jsonl"]) == 4
    resumed = toy.config(tmp_path, resume=True)
    for after in (2, 3):
        killed_after(monkeypatch, resumed, after)
        for name, kept in before.items():
            assert lines(folder, name)[: len(kept)] == kept, name
        assert reporting.report(folder).data["observed"]["num_rounds"] == 4
    session.train(resumed)
    same_run(whole[0], config)


def test_no_statement_outlives_the_line_of_a_round_that_it_does_not_count(tmp_path, monkeypatch):
    """Killed between the two, the resumed run would take the round for one that the statement counts."""
    config = toy.config(tmp_path, resume=True)
    killed_after(monkeypatch, toy.config(tmp_path), 2)  # stopped, and stated
    folder = tmp_path / "run"
    assert json.loads((folder / "privacy.json").read_text())["observed"]["num_rounds"] == 3
    with monkeypatch.context() as patch:
        patch.setattr(
            session.stated, "when_stopped", lambda folders: contextlib.nullcontext()
        )  # as SIGKILL does
        killed_after(patch, config, 2)
        assert (folder / "privacy.json").exists()  # it counts this round
        killed_after(patch, config, 3)
        assert not list(folder.glob("privacy.*"))
        killed_after(patch, config, 4)
    assert reporting.report(folder).data["observed"]["num_rounds"] == 5
    session.train(config)
    assert json.loads((folder / "privacy.json").read_text())["observed"]["num_rounds"] == 6


def test_the_checkpoints_of_another_run_are_refused_though_all_settings_are_its_own(tmp_path, monkeypatch):
    """Its noise key is another: the rounds since would be released a second time."""
    folders = []
    for name in ("one", "two"):
        killed_after(monkeypatch, toy.config(tmp_path, name, insecure_noise_seed=None), 3)
        folders.append(tmp_path / name)
    shutil.copy(folders[0] / "manifest.json", tmp_path / "manifest")
    own = folders[0] / "checkpoints"
    own.rename(tmp_path / "kept")
    shutil.copytree(folders[1] / "checkpoints", own)
    before = lines(folders[0], "metrics.jsonl")
    resumed = toy.config(tmp_path, "one", insecure_noise_seed=None, resume=True)
    manifest = folders[0] / "manifest.json"
    for text in (manifest.read_text(), None):  # there, and lost
        manifest.unlink() if text is None else manifest.write_text(text)
        with pytest.raises(InputError, match="is of another run than"):
            session.train(resumed)
    shutil.copy(tmp_path / "manifest", manifest)
    assert lines(folders[0], "metrics.jsonl") == before
    shutil.rmtree(own)
    (tmp_path / "kept").rename(own)
    session.train(resumed)
    assert reporting.report(folders[0]).data["observed"]["num_rounds"] == 6


def lose_rounds(folder):
    (folder / "participation.jsonl").write_text("".join(lines(folder)[:3]))


def lose_the_log(folder):
    (folder / "participation.jsonl").unlink()


def edit_the_noise(folder):
    path = folder / "mechanism.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"noise_multiplier": 300.0}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lose_rounds, "holds 3 of 6 rounds"),
        (lose_the_log, "holds 0 of 6 rounds"),
        (edit_the_noise, "noise_multiplier 300.0, but the run began with"),
    ],
)
def test_a_damaged_record_is_refused_by_every_command_and_overwrites_nothing(
    copied, tmp_path, capsys, damage, says
):
    folder, resumed = copied
    damage(folder)
    before = snapshot(folder)
    for argv in (
        toy.argv(resumed),
        ["export", "--run-dir", str(folder), "--output", str(tmp_path / "m.safetensors")],
        ["evaluate", "--run-dir", str(folder)],
        ["compare", "--runs", str(folder), "--output", str(tmp_path / "c.png")],
        ["suggest", "--run-dir", str(folder), "--text", "we see"],
    ):
        assert cli.main(["keyboard", *argv]) == 2, argv
        assert says in one_line(capsys), argv
    assert cli.main(["account", "report", str(folder)]) == 2
    assert says in capsys.readouterr().err
    assert snapshot(folder) == before
    assert not list(tmp_path.glob("m.safetensors*"))


def test_a_log_shorter_than_its_checkpoint_is_refused_before_a_round_is_released(
    tmp_path, monkeypatch, capsys
):
    killed_after(monkeypatch, toy.config(tmp_path), 4)
    folder = tmp_path / "run"
    (folder / "participation.jsonl").write_text("".join(lines(folder)[:3]))
    monkeypatch.setattr(Run, "advance", lambda *_: pytest.fail("a round was released"))
    assert cli.main(["keyboard", *toy.argv(toy.config(tmp_path, resume=True))]) == 2
    assert "lost rounds" in one_line(capsys)
    assert len(lines(folder)) == 3


@pytest.mark.parametrize("left", ["checkpoints", "metrics.jsonl", "privacy.json"])
def test_a_run_with_a_public_model_is_not_begun_again_over_what_it_released(copied, left):
    folder, resumed = copied
    (folder / "pretraining").mkdir()  # what lets a run without config.json be resumed
    (folder / "pretraining" / "config.json").write_text("{}")
    for name in {"checkpoints", "metrics.jsonl", "privacy.json"} - {left}:
        shutil.rmtree(folder / name) if name == "checkpoints" else (folder / name).unlink()
    for name in ("config.json", "participation.jsonl"):
        (folder / name).unlink()
    before = snapshot(folder)
    with pytest.raises(InputError, match=f"has released rounds, as .*{left}.* shows"):
        session.train(resumed)
    assert snapshot(folder) == before


def test_a_round_is_on_disk_in_the_log_before_it_is_released(tmp_path, monkeypatch):
    real, seen = Run.advance, []

    def advance(run, state, reporters):
        log = record.read_participation(run.folder)
        seen.append(log.num_rounds)
        assert sorted(run.data.ids[i] for i in reporters) == sorted(
            log.names[d] for d in log.devices[log.rounds == log.num_rounds - 1]
        )
        return real(run, state, reporters)

    monkeypatch.setattr(Run, "advance", advance)
    session.train(toy.config(tmp_path, rounds=2))
    assert seen == [1, 2]


def test_a_run_that_stops_states_what_it_released(tmp_path, monkeypatch, capsys):
    config = toy.config(tmp_path, insecure_noise_seed=None, drop_out=0.0)
    real = Run.next_cohort

    def next_cohort(run, state, t):
        if t == 3:
            raise InputError("round 4 can never be filled")
        return real(run, state, t)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "next_cohort", next_cohort)
        assert cli.main(["keyboard", *toy.argv(config)]) == 2
    folder = tmp_path / "run"
    said = one_line(capsys)
    assert f"can never be filled; {folder / 'privacy.md'} states what was released so far (3 rounds)" in said
    stated = json.loads((folder / "privacy.json").read_text())
    assert stated == reporting.report(folder).data
    assert stated["observed"]["num_rounds"] == 3

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", interrupted)  # its round is logged: it may be out
        assert (
            cli.main(["keyboard", *toy.argv(toy.config(tmp_path, insecure_noise_seed=None, resume=True))])
            == 130
        )
    said = one_line(capsys)
    assert "privacy.md states what was released so far (3 rounds)" in said
    assert "--resume goes on" in said

    def killed(run, state, reporters):
        """The statement of three rounds is gone before the fourth is released."""
        if record.read_participation(run.folder).num_rounds == 4:
            assert not list(folder.glob("privacy.*"))
            raise SystemExit
        assert (folder / "privacy.json").exists()
        return real_advance(run, state, reporters)

    real_advance = Run.advance
    monkeypatch.setattr(Run, "advance", killed)
    with pytest.raises(SystemExit):
        session.train(toy.config(tmp_path, insecure_noise_seed=None, resume=True))
    assert json.loads((folder / "privacy.json").read_text())["observed"]["num_rounds"] == 4


def test_a_run_that_stops_before_its_first_round_has_nothing_to_state(tmp_path, monkeypatch, capsys):
    def next_cohort(*_):
        raise InputError("too few devices")

    monkeypatch.setattr(Run, "next_cohort", next_cohort)
    assert cli.main(["keyboard", *toy.argv(toy.config(tmp_path))]) == 2
    assert one_line(capsys) == "jaxpriv keyboard: too few devices"
    assert not (tmp_path / "run" / "privacy.json").exists()
    assert metrics.read(tmp_path / "run" / "metrics.jsonl") == []


def test_old_rounds_are_never_accounted_with_new_settings(tmp_path, capsys):
    """Saved with z = 7, C = 5, b = 100; resumed with z = 3, C = 1 or b = 10 (AC31)."""
    settings = {"noise_multiplier": 7.0, "clip_norm": 5.0, "min_separation": 100, "rounds": 2}
    session.train(toy.config(tmp_path, **settings))
    before = snapshot(tmp_path / "run")
    for name, old, new in (
        ("noise_multiplier", 7.0, 3.0),
        ("clip_norm", 5.0, 1.0),
        ("min_separation", 100, 10),
    ):
        changed = toy.config(tmp_path, resume=True, **settings | {name: new})
        assert cli.main(["keyboard", *toy.argv(changed)]) == 2
        assert f"{name} was {old}, now it is {new}" in one_line(capsys)
        assert snapshot(tmp_path / "run") == before
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert stated["rho"] == pytest.approx(
        2 / (2 * 7.0**2)
    )  # two rounds of one tree: at most two nodes hold a device


def test_a_statement_that_says_more_is_never_overwritten(copied, capsys):
    folder, resumed = copied
    path = folder / "privacy.json"
    more = json.loads(path.read_text())
    path.write_text(json.dumps(more | {"rho": more["rho"] * 1.01}))
    before = snapshot(folder)
    assert cli.main(["keyboard", *toy.argv(resumed)]) == 2
    assert "never falls" in one_line(capsys)
    assert {p: b for p, b in snapshot(folder).items() if p.parent == folder} == {
        p: b for p, b in before.items() if p.parent == folder
    }


def test_a_released_file_is_reported_by_no_other_statement_than_its_own(whole, tmp_path):
    model = tmp_path / "m.safetensors"
    released.export(whole[0].run_dir, model)
    own = reporting.report(model)
    assert own.data == reporting.report(whole[0].run_dir).data
    other = accounting.TreeAggregation(
        noise_multiplier=50.0, num_rounds=6, min_separation=3, adjacency="zero-out"
    )
    statements.write(accounting.statement(other, delta=1e-6), model)
    with pytest.raises(ValueError, match=r"is not the statement of .*m.safetensors, which holds its own"):
        reporting.report(model)
    statements.write(own, model)
    model.write_bytes(model.read_bytes()[:40])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        reporting.report(model)
