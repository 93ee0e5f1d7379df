"""Run records: written, torn, repeated, broken; the report states what ran and no more; statements are valid."""

import dataclasses
import json
import math

import numpy as np
import pytest

import accounting
from accounting import record
from accounting.statement import jsonable
from tests.accounting_runs import facts, schedule, valid, write

SHARES = {
    "scale": 20.0,
    "dimension": 100,
    "beta": 0.5,
    "noise": "distributed",
    "min_survivors": 4,
    "max_clients": 5,
}


def test_a_record_comes_back_as_it_was_written(tmp_path):
    for run in (
        facts(),
        facts(mechanism="none", noise_multiplier=0, clip={"kind": "fixed", "norm": 1}),
        facts(
            mechanism="blt",
            strategy={"theta": np.array([0.9, 0.5]), "omega": np.array([0.1, 0.2], np.float32)},
            restarts=(4,),
        ),
        facts(mechanism="banded", strategy={"coefficients": [1.0, 0.5]}, population=100),
        facts(mechanism="independent"),
        facts(
            clip={"kind": "adaptive", "norm": 0.1, "count_stddev": 5.0, "quantile": 0.5},
        ),
        facts(secure_aggregation={"scale": 1e4, "dimension": 100, "beta": 0.5, "bits": 16}),
        facts(mechanism="independent", secure_aggregation=SHARES),
    ):
        accounting.write_mechanism(tmp_path, run)
        again = record.read_mechanism(tmp_path)
        assert jsonable(plain(again)) == jsonable(plain(run))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mechanism.json"]


def plain(run):
    return json.loads(json.dumps(dataclasses.asdict(run), default=record.plain))


def test_the_report_states_the_worst_allowed_schedule_and_the_observed_one(tmp_path):
    run = facts()
    data = valid(accounting.report(write(tmp_path, run)))
    tree = accounting.TreeAggregation(
        noise_multiplier=2.0, num_rounds=12, min_separation=3, max_participations=4, adjacency="zero-out"
    )
    assert data["rho"] == accounting.rho(tree)
    assert data["epsilon"] == accounting.epsilon(tree, delta=1e-6)
    seen = data["observed"]
    assert (seen["num_rounds"], seen["num_devices"]) == (12, 8)
    assert (seen["min_separation"], seen["max_participations"]) == (4, 3)
    assert seen["histogram"] == {"3": 8}
    # rounds 0, 4, 8: 3 nodes alone in [0, 4) and [4, 8), two together in [0, 8), and 3 in [8, 12)
    assert seen["squared_sensitivity"] == 3 + 3 + 4 + 3
    assert seen["rho"] < data["rho"]


def test_only_released_rounds_count(tmp_path):
    data = valid(accounting.report(write(tmp_path, facts(restarts=(4, 10)), rounds=5)))
    assert data["mechanisms"][0]["num_rounds"] == 5
    assert data["mechanisms"][0]["restarts"] == [4]
    data = valid(accounting.report(write(tmp_path / ".", facts(), rounds=0)))
    assert (data["rho"], data["epsilon"]) == (0, 0)


def test_a_torn_last_line_is_left_out_and_written_again(tmp_path):
    write(tmp_path, facts(), rounds=6)
    path = tmp_path / "participation.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    torn = accounting.report(tmp_path)
    assert torn.data["observed"]["num_rounds"] == 5
    assert any("cut short" in note for note in torn.data["notes"])
    log = accounting.ParticipationLog(tmp_path)
    log.append(5, schedule(5))
    log.close()
    assert path.read_bytes() == whole


def test_a_resumed_run_appends_only_the_rounds_that_are_not_there(tmp_path):
    write(tmp_path, facts(), rounds=8)
    path = tmp_path / "participation.jsonl"
    whole = path.read_bytes()
    log = accounting.ParticipationLog(tmp_path)
    assert path.read_bytes() == whole  # killed here, what was released stays recorded
    for t in range(5, 8):
        log.append(t, schedule(t)[::-1])
        assert path.read_bytes() == whole
    log.append(8, schedule(8), failed=["x"])
    log.close()
    log = accounting.ParticipationLog(tmp_path)
    for t, devices, failed, message in (
        (7, ["d0", "d1"], [], "round 7 was recorded before with other devices"),
        (8, schedule(8), ["y"], "round 8 was recorded before with another failed"),
        (10, schedule(10), [], "round 10 follows round 8; rounds are missing"),
        (9, ["a", "a"], [], "names a device twice"),
    ):
        with pytest.raises(ValueError, match=message):
            log.append(t, devices, failed=failed)
    log.close()
    assert path.read_bytes().startswith(whole)
    assert accounting.report(tmp_path).data["observed"]["num_rounds"] == 9


def test_a_last_line_that_only_lost_its_end_counts(tmp_path):
    write(tmp_path, facts(), rounds=6)
    path = tmp_path / "participation.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert accounting.report(tmp_path).data["observed"]["num_rounds"] == 6
    log = accounting.ParticipationLog(tmp_path)
    log.append(5, schedule(5))
    log.close()
    assert path.read_bytes() == whole


def test_a_log_with_a_faulty_line_is_not_continued(tmp_path):
    write(tmp_path, facts(), rounds=2)
    path = tmp_path / "participation.jsonl"
    path.write_bytes(path.read_bytes() + b"{oops}\n")
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"participation.jsonl, line 3: not JSON"):
        accounting.ParticipationLog(tmp_path)
    assert path.read_bytes() == whole


def test_a_repeated_round_counts_once_and_a_different_one_is_refused(tmp_path):
    write(tmp_path, facts(), rounds=6)
    with (tmp_path / "participation.jsonl").open("a") as file:
        file.write(json.dumps({"round": 5, "devices": schedule(5)[::-1]}) + "\n")
    assert accounting.report(tmp_path).data["observed"]["num_rounds"] == 6
    with (tmp_path / "participation.jsonl").open("a") as file:
        file.write(json.dumps({"round": 5, "devices": ["d0"]}) + "\n")
    with pytest.raises(ValueError, match=r"line 8: round 5 was recorded before with other devices"):
        accounting.report(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"round": 7, "devices": []}', "round 7 follows round 5; rounds are missing"),
        ('{"round": 6}', 'must be an object with "round" and "devices"'),
        ("[1, 2]", 'must be an object with "round" and "devices"'),
        ("{oops}", "not JSON"),
        ('{"round": -1, "devices": []}', "round must be"),
        ('{"round": 6.0, "devices": []}', "round must be"),
        ('{"round": 6, "devices": "ab"}', "devices must be a list of ids"),
        ('{"round": 6, "devices": [1.5]}', "devices must be a list of ids"),
        ('{"round": 6, "devices": [true]}', "devices must be a list of ids"),
        ('{"round": 6, "devices": ["a", "a"]}', "names a device twice"),
        ('{"round": 6, "devices": [], "noise_multiplier": NaN}', "noise_multiplier must be"),
        ('{"round": 6, "devices": ["a", "b"], "failed": ["b"]}', "'b' is in both devices and failed"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_faulty_line_is_named(tmp_path, line, message):
    write(tmp_path, facts(), rounds=6)
    with (tmp_path / "participation.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=f"participation.jsonl, line 7.*{message}"):
        accounting.report(tmp_path)


def test_broken_limits_void_the_enforced_guarantee_and_only_the_observed_one_is_stated(tmp_path):
    close = lambda t: ["a", f"d{t}"] if t in (2, 4) else [f"d{t}", f"e{t}"]
    write(tmp_path, facts(), devices=close)
    with pytest.raises(
        ValueError, match="2 rounds after its last time, less than the stated min_separation 3"
    ):
        accounting.report(tmp_path)
    observed = accounting.report(tmp_path, claim="observed")
    assert "does not cover other schedules than the one that was observed" in observed.sentence
    assert observed.data["mechanisms"][0]["min_separation"] == 2
    assert observed.data["mechanisms"][0]["max_participations"] == 2
    assert any("limits were broken" in note for note in observed.data["notes"])
    valid(observed)


@pytest.mark.parametrize(
    ("more", "devices", "message"),
    [
        ({"max_participations": 2}, schedule, "took part 3 times, more than the stated max_participations 2"),
        ({"num_rounds": 11}, schedule, "12 rounds were released, more than the planned 11"),
    ],
)
def test_more_than_stated_voids_the_guarantee(tmp_path, more, devices, message):
    with pytest.raises(ValueError, match=message):
        accounting.report(write(tmp_path, facts(**more), devices=devices))


def test_a_round_with_less_noise_than_stated_voids_the_guarantee(tmp_path):
    accounting.write_mechanism(tmp_path, facts())
    log = accounting.ParticipationLog(tmp_path)
    for t in range(6):
        log.append(t, schedule(t), noise_multiplier=2.0 if t != 3 else 1.5)
    log.close()
    with pytest.raises(ValueError, match=r"used noise multiplier 1.5, less than the stated 2"):
        accounting.report(tmp_path)
    observed = accounting.report(tmp_path, claim="observed")
    assert observed.data["mechanisms"][0]["noise_multiplier"] == 1.5


def test_a_round_without_noise_leaves_nothing_to_state(tmp_path):
    accounting.write_mechanism(tmp_path, facts())
    log = accounting.ParticipationLog(tmp_path)
    for t in range(6):
        log.append(t, schedule(t), noise_multiplier=2.0 if t != 3 else 0.0)
    log.close()
    observed = accounting.report(tmp_path, claim="observed")
    assert (observed.data["rho"], observed.data["epsilon"]) == ("inf", "inf")


@pytest.mark.parametrize(
    ("again", "field"),
    [
        ({"noise_multiplier": 0.5}, "noise_multiplier"),
        ({}, "noise_multiplier"),
        ({"noise_multiplier": 2.0, "failed": ["c"]}, "failed"),
    ],
)
def test_a_repeated_round_that_differs_in_anything_is_refused(tmp_path, again, field):
    write(tmp_path, facts(), rounds=2)
    first = {"round": 2, "devices": ["a", "b"], "noise_multiplier": 2.0, "failed": ["c", "d"]}
    same = first | {"failed": ["d", "c"]}
    other = {"round": 2, "devices": ["a", "b"]} | again
    path = tmp_path / "participation.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(first) + "\n" + json.dumps(same) + "\n")
    assert accounting.report(tmp_path).data["observed"]["num_failed"] == 2
    with path.open("a") as file:
        file.write(json.dumps(other) + "\n")
    with pytest.raises(ValueError, match=f"line 5: round 2 was recorded before with another {field}"):
        accounting.report(tmp_path)


def test_claims_beyond_the_run_are_refused_and_weaker_ones_allowed(tmp_path):
    write(tmp_path, facts())
    for claims, message in (
        ({"noise_multiplier": 3.0}, "cannot state noise multiplier 3: the run used 2"),
        ({"noise_multiplier": 1.0}, "cannot state noise multiplier 1: the run used 2"),
        ({"min_separation": 4}, "cannot state min_separation 4: the enforced one is 3"),
        ({"max_participations": 3}, "cannot state max_participations 3: the enforced one is 4"),
        ({"claim": "observed", "min_separation": 5}, "cannot state min_separation 5: the observed one is 4"),
        ({"claim": "hoped"}, "claim must be one of enforced, observed"),
    ):
        with pytest.raises(ValueError, match=message):
            accounting.report(tmp_path, **claims)
    weaker = accounting.report(tmp_path, noise_multiplier=2.0, min_separation=2, max_participations=6)
    assert weaker.data["rho"] >= accounting.report(tmp_path).data["rho"]
    assert accounting.report(tmp_path, claim="observed", min_separation=4).data["rho"] > 0


def test_adaptive_clipping_and_secure_aggregation_are_accounted(tmp_path):
    plain_run = facts()
    adaptive = facts(clip={"kind": "adaptive", "norm": 0.1, "count_stddev": 1.2, "quantile": 0.5})
    rho = accounting.report(write(tmp_path, plain_run)).data["rho"]
    data = valid(accounting.report(write(tmp_path, adaptive)))
    assert data["rho"] == pytest.approx(rho, rel=1e-12)
    assert [m["kind"] for m in data["mechanisms"]] == ["TreeAggregation", "QuantileEstimation"]
    assert data["observed"]["rho"] == pytest.approx(13 / 8, rel=1e-12)
    secure = facts(secure_aggregation={"scale": 10.0, "dimension": 100, "beta": 0.0})
    data = valid(accounting.report(write(tmp_path, secure)))
    inflation = accounting.inflated_norm(0.5, 10.0, 100, 0.0) / 0.5
    assert data["rho"] == pytest.approx(rho * inflation**2, rel=1e-12)
    assert data["observed"]["rho"] == pytest.approx(13 / 8 * inflation**2, rel=1e-12)


def test_a_scale_that_follows_the_clip_norm_is_accounted_with_adaptive_clipping(tmp_path):
    """In units of the clip norm every round is inflated alike, and the bits are exact: their rho is untouched."""
    rounding = {"scale": 20.0, "dimension": 100, "beta": 0.0, "scale_follows_clip_norm": True}
    adaptive = {"kind": "adaptive", "norm": 0.5, "count_stddev": 1.2, "quantile": 0.5}
    bare = valid(accounting.report(write(tmp_path, facts(clip=adaptive))))
    data = valid(accounting.report(write(tmp_path, facts(clip=adaptive, secure_aggregation=rounding))))
    there = accounting.report(write(tmp_path, facts(secure_aggregation=rounding, deployment={}))).data
    assert "This is of exact sums" in there["deployment"]["sentence"]
    updates, bits = (m["rho"] for m in bare["mechanisms"])
    inflation = 1 + np.sqrt(128) / (20.0 * 0.5)
    assert [m["kind"] for m in data["mechanisms"]] == ["SecureAggregation", "QuantileEstimation"]
    assert data["rho"] == pytest.approx(updates * inflation**2 + bits, rel=1e-12)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_noise_in_shares_of_the_clients_is_accounted_as_zcdp(tmp_path, adjacency):
    made = {"mechanism": "independent", "noise_multiplier": 1.0, "adjacency": adjacency}
    run = facts(**made, secure_aggregation=SHARES)
    data = valid(accounting.report(write(tmp_path, run)))
    (only,) = run.mechanisms(12)
    assert isinstance(only, accounting.DistributedDiscreteGaussian)
    assert data["rho"] == accounting.rho(only)
    assert data["epsilon"] == accounting.epsilon_from_rho(data["rho"], delta=1e-6, known="zcdp")
    # One participation costs inflation^2 / 2 and the correction; the log's costliest device took part so often.
    one = accounting.rho(dataclasses.replace(only, max_participations=1))
    assert data["observed"]["rho"] == pytest.approx(one * data["observed"]["max_participations"], rel=1e-12)
    assert data["observed"]["epsilon"] <= data["epsilon"]
    bare = facts(**made)
    assert data["rho"] > accounting.report(write(tmp_path, bare)).data["rho"]
    assert data["deployment"] == accounting.report(tmp_path).data["deployment"]


def test_several_runs_over_the_same_devices_add(tmp_path):
    folders = []
    for name, z in (("one", 2.0), ("two", 4.0)):
        (tmp_path / name).mkdir()
        folders.append(write(tmp_path / name, facts(noise_multiplier=z)))
    alone = [accounting.report(folder).data["rho"] for folder in folders]
    data = valid(accounting.report(folders))
    assert data["rho"] == pytest.approx(sum(alone), rel=1e-14)
    assert data["observed"] is None
    accounting.write_mechanism(folders[1], facts(delta=1e-5))
    with pytest.raises(ValueError, match="different deltas"):
        accounting.report(folders)
    accounting.write_mechanism(folders[1], facts(adjacency="replace-one"))
    with pytest.raises(ValueError, match="unequal adjacency"):
        accounting.report(folders)


def test_no_noise_is_no_guarantee(tmp_path):
    run = facts(mechanism="none", noise_multiplier=0.0)
    data = valid(accounting.report(write(tmp_path, run)))
    assert data["epsilon"] is None
    assert data["epsilon_printed"] == "none"
    assert data["sentence"].startswith("No differential privacy guarantee")


def test_a_public_noise_seed_is_said_first(tmp_path):
    said = accounting.report(write(tmp_path, facts(simulation=True)))
    assert said.sentence.startswith("Simulation, no guarantee")
    assert said.markdown().splitlines()[2].startswith("**Simulation, no guarantee.**")
    valid(said)


def test_a_vocabulary_from_clients_is_excepted_in_the_headline(tmp_path):
    said = accounting.report(write(tmp_path, facts(vocabulary="clients")))
    assert "the guarantee does not cover the vocabulary" in said.sentence
    assert any("vocabulary, which was built" in line for line in said.data["not_covered"])


def test_deployment_scale_is_apart_and_settable(tmp_path):
    write(tmp_path, facts(deployment={}))
    data = valid(accounting.report(tmp_path))
    there = data["deployment"]
    assert (there["report_goal"], there["population"]) == (6500, 1_000_000)
    assert there["noise_multiplier"] == 2.0 * 6500 / 2
    assert there["min_separation"] == 153
    assert "Not a guarantee of this run." in accounting.report(tmp_path).markdown()
    assert "exact sums" not in there["sentence"]
    other = accounting.report(tmp_path, deployment_report_goal=10, population=40).data["deployment"]
    assert (other["noise_multiplier"], other["min_separation"], other["max_participations"]) == (10, 4, 3)
    with pytest.raises(ValueError, match="population must be at least"):
        accounting.report(tmp_path, population=5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mechanism": "trees"}, "mechanism must be one of none"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be"),
        ({"noise_multiplier": -1}, "noise_multiplier must be"),
        ({"mechanism": "none"}, "noise_multiplier must be 0 for mechanism none"),
        ({"delta": 1.0}, "delta must be below 1"),
        ({"clip": {"kind": "fixed", "norm": 0}}, "clip norm must be"),
        ({"clip": {"kind": "other", "norm": 1}}, "clip kind must be"),
        ({"clip": {"kind": "adaptive", "norm": 1}}, "count_stddev if and only if"),
        ({"clip": {"kind": "adaptive", "norm": 1, "count_stddev": 1.0}}, "below 2 x count_stddev"),
        ({"clip": None}, "clip must be an object"),
        ({"mechanism": "blt"}, "strategy of mechanism blt lacks 'theta'"),
        ({"mechanism": "banded", "strategy": {"theta": [0.5]}}, "lacks 'coefficients'"),
        ({"secure_aggregation": {"scale": 1}}, "secure_aggregation lacks beta, dimension"),
        ({"restarts": (5, 5)}, "restarts must be strictly increasing"),
        ({"restarts": ("a",)}, "restarts must be"),
        ({"restarts": None}, "restarts must be a list"),
        ({"notes": "text"}, "notes must be a list of texts"),
        ({"notes": None}, "notes must be a list of texts"),
        ({"not_covered": 5}, "not_covered must be a list of texts"),
        ({"num_rounds": 10**30}, "num_rounds must be at most 1,000,000,000"),
        (
            {
                "clip": {"kind": "adaptive", "norm": 0.1, "count_stddev": 5.0},
                "secure_aggregation": {"scale": 1e4, "dimension": 100, "beta": 0.5},
            },
            "secure_aggregation cannot be accounted with adaptive clipping",
        ),
        ({"secure_aggregation": SHARES}, "distributed noise is independent every round"),
        (
            {"mechanism": "independent", "secure_aggregation": {**SHARES, "noise": "halved"}},
            "secure_aggregation noise must be one of",
        ),
        (
            {
                "mechanism": "independent",
                "secure_aggregation": {k: v for k, v in SHARES.items() if k != "max_clients"},
            },
            "secure_aggregation lacks max_clients",
        ),
        (
            {"secure_aggregation": {"scale": 1, "dimension": 1, "beta": 0, "scale_follows_clip_norm": 1}},
            "scale_follows_clip_norm must be true or false",
        ),
        (
            {"secure_aggregation": {"scale": 1e4, "dimension": 10**400, "beta": 0.5}},
            "dimension must be at most",
        ),
        (
            {"secure_aggregation": {"scale": 1e4, "dimension": 10**5000, "beta": 0.5}},
            "dimension must be at most",
        ),
        ({"vocabulary": "mine"}, "vocabulary must be one of"),
        ({"report_goal": 0}, "report_goal must be"),
        ({"simulation": "no"}, "simulation must be"),
    ],
)
def test_records_that_are_refused(more, message):
    with pytest.raises(ValueError, match=message):
        facts(**more)


def test_deployment_scale_is_left_out_where_it_would_take_hours(tmp_path):
    said = accounting.report(write(tmp_path, facts(num_rounds=10**9, deployment={})))
    assert said.data["deployment"] is None
    assert any("deployment scale is left out" in note for note in said.data["notes"])
    valid(said)


def test_ids_that_python_hashes_alike_are_other_devices(tmp_path):
    write(tmp_path, facts(num_rounds=3), rounds=0)
    log = accounting.ParticipationLog(tmp_path)
    log.append(0, [-1, 0, 7])
    log.append(0, [7, 0, -1])
    assert log.knows(0)
    assert not log.knows(1)
    for others in ([-2, 0, 7], [-1, 2**61 - 1, 7], ["-1", 0, 7]):
        with pytest.raises(ValueError, match="round 0 was recorded before with other devices"):
            log.append(0, others)


def test_files_that_are_not_a_record_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"mechanism.json: no such file"):
        accounting.report(tmp_path)
    path = tmp_path / "mechanism.json"
    for text, message in (
        ("{", "not JSON"),
        ('{"unit": "a\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "not a run record"),
        ('{"format": "other"}', "not a run record"),
        ('{"format": "jaxpriv-mechanism", "version": 99}', "version 99 is not 1"),
        ('{"format": "jaxpriv-mechanism", "version": 1, "foo": 2}', r"unknown fields \['foo'\], missing"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            accounting.report(tmp_path)
    accounting.write_mechanism(tmp_path, facts())
    data = json.loads(path.read_text()) | {"noise_multiplier": "NaN"}
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"mechanism.json: noise_multiplier must be a number, got 'NaN'"):
        accounting.report(tmp_path)
    accounting.write_mechanism(tmp_path, facts())
    with pytest.raises(ValueError, match=r"participation.jsonl: no such file"):
        accounting.report(tmp_path)
