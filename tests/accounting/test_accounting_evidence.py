"""A run's record is believed only where nothing that a released round leaves says more."""

import json
import shutil

import pytest

import accounting
from accounting import record
from tests.accounting_runs import facts, schedule, write

STATED = ("mechanism.json", "participation.jsonl")


@pytest.fixture
def run(tmp_path):
    """A finished run of six rounds with everything that a trainer leaves."""
    folder = tmp_path / "run"
    folder.mkdir()
    write(folder, facts(num_rounds=6), rounds=6)
    for step in (4, 6):
        place = folder / "checkpoints" / str(step)
        place.mkdir(parents=True)
        noted = {"mechanism": json.loads((folder / "mechanism.json").read_text())}
        (place / "facts.json").write_text(json.dumps(noted))
    (folder / "metrics.jsonl").write_text("".join(f'{{"round": {t}, "norm": 1.0}}\n' for t in range(6)))
    (folder / "privacy.json").write_text(accounting.report(folder).json())
    return folder


def remove(folder, *names):
    for name in names:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def cut(folder, lines):
    path = folder / "participation.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


@pytest.mark.parametrize("kept", [None, 0, 3, 5])
@pytest.mark.parametrize("witness", ["checkpoints", "metrics.jsonl", "privacy.json"])
def test_a_log_that_lost_rounds_is_refused_by_each_witness_alone(run, witness, kept):
    remove(run, *({"checkpoints", "metrics.jsonl", "privacy.json"} - {witness}))
    if kept is None:
        remove(run, "participation.jsonl")
    else:
        cut(run, kept)
    for claim in ("enforced", "observed"):
        with pytest.raises(ValueError, match=rf"holds {kept or 0} of 6 rounds .*{witness}.* lost rounds"):
            accounting.report(run, claim=claim)


def test_a_whole_run_and_one_that_others_wrote_are_stated(run, tmp_path):
    whole = accounting.report(run).data
    assert whole["observed"]["num_rounds"] == 6
    other = tmp_path / "other"
    other.mkdir()
    for name in STATED:
        shutil.copy(run / name, other)
    assert accounting.report(other).data == whole
    (other / "checkpoints" / "1000" / "state").mkdir(parents=True)  # steps of another trainer
    (other / "metrics.jsonl").write_text('{"step": 900}\n{"round": true}\n7\n{"round": 9')
    (other / "config.json").write_text('{"mechanism": "mine", "noise_multiplier": 1}')
    (other / "privacy.json").write_text("{")
    assert accounting.report(other).data == whole


def test_a_run_that_goes_on_while_it_is_read_is_no_contradiction(run, monkeypatch):
    """The witnesses are read first: a round that ends between is in the log and in nothing that was read."""
    remove(run, "checkpoints/6", "metrics.jsonl", "privacy.json")
    cut(run, 5)
    real = record.read_mechanism

    def read(folder):
        log = accounting.ParticipationLog(folder)
        log.append(5, schedule(5))
        log.close()
        (folder / "metrics.jsonl").write_text('{"round": 5}\n')
        return real(folder)

    monkeypatch.setattr(record, "read_mechanism", read)
    assert accounting.report(run).data["observed"]["num_rounds"] == 6


@pytest.mark.parametrize(
    ("witness", "field", "value"),
    [
        ("privacy.json", "noise_multiplier", 200.0),
        ("checkpoints", "noise_multiplier", 200.0),
        ("checkpoints", "max_participations", 2),
        ("checkpoints", "min_separation", 4),
        ("checkpoints", "simulation", True),
    ],
)
def test_a_changed_record_is_refused_by_each_witness_alone(run, witness, field, value):
    remove(run, *({"checkpoints", "privacy.json"} - {witness}))
    path = run / "mechanism.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    message = (
        f"{field} {json.dumps(value)}, but the run began with" if witness == "checkpoints" else "never falls"
    )
    with pytest.raises(ValueError, match=message):
        accounting.report(run)
    with pytest.raises(ValueError, match=message):
        accounting.report([run, run])


def test_a_changed_record_is_refused_by_the_runs_settings(run):
    remove(run, "checkpoints", "privacy.json")
    settings = {
        "mechanism": "tree_reduced",
        "noise_multiplier": 0.2,
        "rounds": 6,
        "report_goal": 2,
        "adjacency": "zero-out",
        "delta": 1e-6,
        "restarts": [],
        "completion": False,
    }
    (run / "config.json").write_text(json.dumps(settings))
    with pytest.raises(
        ValueError, match=r"noise_multiplier 2.0, but the run began with 0.2, as .*config.json"
    ):
        accounting.report(run)


def test_the_statement_of_a_folder_without_its_record_is_not_believed_over_the_log(run):
    remove(run, "mechanism.json")
    with pytest.raises(ValueError, match=r"mechanism.json: no such file"):
        accounting.report(run)
    remove(run, "participation.jsonl")
    assert (
        accounting.report(run).data["observed"]["num_rounds"] == 6
    )  # as a released statement, of all rounds
    (run / "checkpoints" / "8").mkdir()
    (run / "checkpoints" / "8" / "digests.json").write_text("{}")
    with pytest.raises(ValueError, match="6 of 8 rounds"):
        accounting.report(run)


def test_stages_that_lost_their_record_are_not_left_out(run, tmp_path):
    whole = tmp_path / "whole"
    for name in ("stage1", "stage2"):
        shutil.copytree(run, whole / name)
    accounting.write_stages(whole, ["stage1", "stage2"])
    both = accounting.report(whole)
    assert both.data["rho"] == 2 * accounting.report(run).data["rho"]
    remove(whole / "stage2", *STATED)
    with pytest.raises(ValueError, match=r"stage2.mechanism.json is missing, but rounds were released"):
        accounting.report(whole)
    remove(whole, "stage2")
    assert accounting.report(whole).data["rho"] < both.data["rho"]  # nothing is left that shows it
    (whole / "privacy.json").write_text(both.json())
    with pytest.raises(ValueError, match="never falls"):
        accounting.report(whole)
    remove(whole, "stage1")
    with pytest.raises(ValueError, match=r"no stage of it has begun, but .*privacy.json shows"):
        accounting.report(whole)
    shutil.copytree(run, whole / "stage1")
    remove(whole, "stages.json")
    with pytest.raises(ValueError, match=r"mechanism.json: no such file"):
        accounting.report(whole)


def test_a_statement_of_no_guarantee_is_not_improved(run):
    bare = write(run, facts(mechanism="none", noise_multiplier=0.0), rounds=6)
    remove(run, "checkpoints", "privacy.json")
    (run / "privacy.json").write_text(accounting.report(bare).json())
    accounting.write_mechanism(run, facts())
    with pytest.raises(ValueError, match="states no guarantee"):
        accounting.report(run)
