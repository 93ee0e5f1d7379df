"""Who takes part in a run: limits kept, timers with jitter, rounds that cannot be filled."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from accounting import reporting
from tests.trainers.keyboard import toy
from trainers.common import checkpoint, metrics
from trainers.common.errors import InputError
from trainers.keyboard import corpus, plan, session, train
from trainers.keyboard.train import Run


def test_abandoned_rounds_and_late_devices_keep_the_limits(tmp_path):
    """Whose upload fails waits as who took part, and nothing of it enters this or a later sum (AC21)."""
    config = toy.config(tmp_path, drop_out=0.3, over_selection=0.5, min_separation=2, report_goal=3, rounds=8)
    session.train(config)
    statement = reporting.report(config.run_dir).data
    assert statement["observed"]["num_rounds"] == 8
    assert statement["observed"]["min_separation"] >= 2
    lines = metrics.read(tmp_path / "run" / "participation.jsonl")
    assert all(len(line["devices"]) == 3 for line in lines)
    assert any(line.get("failed") for line in lines)
    assert all(row["num_present"] == 3 for row in metrics.read(tmp_path / "run" / "operator.jsonl"))
    downloads = {}
    for t, line in enumerate(lines):
        for device in [*line["devices"], *line.get("failed", [])]:
            downloads.setdefault(device, []).append(t)
    assert all(b - a >= 2 for rounds in downloads.values() for a, b in itertools.pairwise(rounds))


def drawing(folder, **changes):
    """A run that draws cohorts and trains nothing."""
    config = toy.config(folder, **changes)
    made = Run(config, corpus.load(config), folder / "run")
    return made, made.start()


def test_jitter_lengthens_waits_and_leaves_the_default_separation_room(tmp_path):
    made, state = drawing(tmp_path, timer_jitter=2, rounds=12)
    assert made.plan.min_separation == 24 // 4 - 2
    times = {}
    for t in range(12):
        state, reporters, _ = made.next_cohort(state, t)
        for device in reporters:
            times.setdefault(device, []).append(t)
    gaps = np.concatenate([np.diff(rounds) for rounds in times.values()])
    assert gaps.min() >= 4
    assert len(np.unique(gaps)) > 1
    ready = np.asarray(state.devices.ready)
    last = np.asarray(state.devices.last)
    assert set((ready - last)[last >= 0]) == {4, 5, 6}


def test_who_was_cut_off_has_not_taken_part(tmp_path):
    """24 clients make up 6 rounds of 4 with one participation each, however many more are asked."""
    changes = {"max_participations": 1, "min_separation": 1, "rounds": 6}
    made, _ = drawing(tmp_path, over_selection=0.5, **changes)
    assert made.plan.selected == 6
    with pytest.raises(InputError, match=r"4 x 7 = 28 .*raise --max-participations to 2 .*--report-goal"):
        drawing(tmp_path, over_selection=0.5, **changes | {"rounds": 7})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"timer_jitter": 7}, "--timer-jitter must be a number of rounds from 0 to --rounds 6"),
        ({"timer_jitter": 6}, "--timer-jitter 6 leaves no separation: 24 clients in rounds of 4 can wait 6"),
        ({"over_selection": 1e308}, "--over-selection must be a share of the report goal from 0 to 1000"),
        ({"mechanism": "blt", "buffers": 21}, "--buffers must be at most 20"),
        (
            {"clip": "adaptive", "noise_multiplier": 1.0, "clipped_count_stddev": 0.25},
            "raise --clipped-count-stddev",
        ),
        ({"min_separation": 7, "report_goal": 5}, "lower --min-separation to 4, or --report-goal to 4"),
    ],
)
def test_limits_that_no_run_could_keep_are_refused_by_option(tmp_path, changes, says):
    with pytest.raises(InputError) as caught:
        drawing(tmp_path, **changes)
    assert says in str(caught.value)


def test_hours_of_the_devices_own_examples_are_said_to_be_not_covered(tmp_path):
    made, _ = drawing(tmp_path, availability="diurnal")
    assert plan.HOURS not in made.plan.record.notes
    data = dataclasses.replace(made.data, hours=[np.array([3.0])] * made.data.num_clients)
    assert plan.HOURS in Run(made.config, data, tmp_path).plan.record.notes


def test_a_round_that_no_retry_can_fill_stops_at_once(tmp_path):
    # Every report is lost: four downloads an attempt, until fewer than four of the 24 devices are free.
    made, state = drawing(tmp_path, drop_out=1 - 1e-9)
    with pytest.raises(
        InputError, match=r"round 1 can never be filled: 0 devices .* 24 wait .*--min-separation"
    ):
        made.next_cohort(state, 0)
    # Enough are free, and never there at once: it gives up in the end, and says so.
    made, state = drawing(tmp_path, availability="diurnal", report_goal=20, min_separation=1)
    made._select = functools.partial(_nobody, made._select)
    with pytest.raises(InputError, match=r"24 devices are free"):
        made.next_cohort(state, 0)


def _nobody(select, key, devices, t, attempt):
    """As at an hour when no device can be reached."""
    _, cohort = select(key, devices, t, attempt)
    none = jax.numpy.zeros_like(cohort.reports)
    return devices, cohort._replace(is_chosen=none, reports=none, released=jax.numpy.bool_(False))


def test_a_timer_goes_on_after_a_resume(tmp_path):
    """A device of round 8, saved at round 10 with separation 5, is not eligible before round 13 (AC22)."""
    options = {"report_goal": 1, "num_chosen": 1, "available": 1.0, "drop_out": 0.0}
    options |= {"min_separation": 5, "max_participations": 9}
    select = jax.jit(train.participation.select, static_argnames=("report_goal", "num_chosen"))
    state, cohort = select(jax.random.key(0), train.participation.init(1), 8, **options)
    assert bool(cohort.released)
    checkpoint.save(tmp_path, 10, state, facts={})
    state = checkpoint.load(tmp_path, 10, train.participation.init(1))
    released = [bool(select(jax.random.key(t), state, t, **options)[1].released) for t in range(9, 15)]
    assert released == [False, False, False, False, True, True]
