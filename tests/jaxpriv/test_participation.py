"""Timers, limits and cohorts: the separation that the accountant is told is the one that runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpriv import keys, participation
from tests.oracles.participation import replay

ROOT = keys.root(3)


@functools.partial(jax.jit, static_argnames=("report_goal", "num_chosen", "max_jitter"))
def attempt(state, number, round, **options):
    return participation.select(keys.fold(ROOT, number), state, round, **options)


def simulate(
    num_devices, rounds, *, b, k, goal, chosen=None, available=1.0, drop_out=0.0, jitter=0, limit=2000
):
    options = dict(
        report_goal=goal,
        num_chosen=chosen or goal,
        available=available,
        drop_out=drop_out,
        min_separation=jnp.int32(b),
        max_participations=jnp.int32(k),
        max_jitter=jitter,
    )
    state, round, log = participation.init(num_devices), 0, []
    for number in range(limit):
        if round == rounds:
            break
        state, cohort = attempt(state, jnp.int32(number), jnp.int32(round), **options)
        assert not bool(cohort.breaks_limits)
        ids = np.asarray(cohort.chosen)
        log.append(
            (round, ids[np.asarray(cohort.is_chosen)].tolist(), ids[np.asarray(cohort.reports)].tolist())
        )
        round += int(cohort.released)
    return state, log, round


@settings(max_examples=12)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([1, 3]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([1.0, 0.6]),
    st.sampled_from([0, 2]),
)
def test_simulated_participation_keeps_its_limits(b, k, goal, drop_out, available, jitter):
    state, log, _ = simulate(
        40,
        12,
        b=b,
        k=k,
        goal=goal,
        chosen=goal + 2,
        drop_out=drop_out,
        available=available,
        jitter=jitter,
        limit=40,
    )
    *_, devices = replay(40, log, min_separation=b)
    counts = [len(d.rounds) for d in devices]
    gaps = [y - x for d in devices for x, y in zip(d.rounds, d.rounds[1:])]
    measured = participation.measure(state)
    assert max(counts) <= k
    assert measured.max_participations == max(counts)
    assert measured.min_separation == (min(gaps) if gaps else None)
    assert not gaps or min(gaps) >= b
    assert measured.histogram == np.bincount(counts).tolist()
    np.testing.assert_array_equal(state.count, counts)
    if not jitter:
        np.testing.assert_array_equal(state.ready, [d.ready for d in devices])


def test_most_participations_counts_fence_posts():
    """10 rounds with b = 3 are 0, 3, 6 and 9; b = 0 is refused (AC20)."""
    assert participation.most_participations(10, 3) == 4
    assert participation.most_participations(9, 3) == 3
    assert participation.most_participations(7, 1) == 7
    assert participation.most_participations(7, 8) == 1
    options = dict(report_goal=1, num_chosen=1, available=1.0, drop_out=0.0, max_participations=9)
    state, took_part = participation.init(1), []
    for t in range(10):
        state, cohort = attempt(state, jnp.int32(t), jnp.int32(t), min_separation=3, **options)
        took_part += [t] if cohort.released else []
    assert took_part == [0, 3, 6, 9]
    with pytest.raises(ValueError, match="min_separation"):
        participation.most_participations(7, 0)


def test_a_device_whose_upload_failed_waits_as_long():
    """It downloads in round 2 with b = 5, and its timer starts then: it is next eligible in round 7 (AC21)."""
    options = dict(report_goal=1, num_chosen=1, available=1.0, min_separation=5, max_participations=9)
    state, cohort = participation.select(ROOT, participation.init(1), 2, drop_out=1.0, **options)
    assert not bool(cohort.released)
    assert not np.asarray(cohort.reports).any()  # nothing of it is summed, then or later
    assert int(state.ready[0]) == 7
    assert int(state.count[0]) == 0
    eligible = [
        int(attempt(state, jnp.int32(t), jnp.int32(t), drop_out=0.0, **options)[1].num_eligible)
        for t in range(2, 9)
    ]
    assert eligible == [0, 0, 0, 0, 0, 1, 1]


def test_every_device_takes_part_and_none_always():
    """100 clients, 10 a round, b = 1, 200 rounds: the chance of missing one is 7e-8 (AC23)."""
    state, _, rounds = simulate(100, 200, b=1, k=200, goal=10)
    assert rounds == 200
    count = np.asarray(state.count)
    assert count.min() >= 1
    assert count.max() < 200
    # 200 rounds at probability 1/10: mean 20, standard deviation 4.2; six of them either way.
    assert count.max() < 20 + 26


def test_an_abandoned_attempt_takes_no_round():
    state, log, rounds = simulate(60, 6, b=2, k=3, goal=3, chosen=4, drop_out=0.4)
    assert rounds == 6
    assert len(log) > 6
    assert int(state.count.sum()) == 18
    for round, chosen, reporters in log:
        assert len(reporters) in (0, 3)
        assert set(reporters) <= set(chosen)
        assert 0 <= round < 6


def test_too_few_available_devices_start_no_timers():
    """Else every retry would use some up, no round would ever be released, and no timer would ever run out."""
    state = participation.init(50)
    settings = dict(report_goal=10, num_chosen=12, drop_out=0.0, min_separation=4, max_participations=9)
    for attempt in range(20):
        key = jax.random.key(attempt)
        state, cohort = participation.select(key, state, 0, available=0.05, **settings)
        assert not cohort.released
    assert not np.asarray(state.ready).any()
    assert participation.select(jax.random.key(99), state, 0, available=1.0, **settings)[1].released


def test_reporters_come_first_and_goal_is_exact():
    _, log, _ = simulate(50, 5, b=3, k=2, goal=4, chosen=9)
    assert all(len(reporters) == 4 and chosen[:4] == reporters for _, chosen, reporters in log)


def test_a_cohort_that_would_break_the_limits_is_seen():
    state = participation.init(3)._replace(last=jnp.array([4, 4, 4], jnp.int32))
    _, cohort = participation.select(
        ROOT,
        state,
        5,
        report_goal=2,
        num_chosen=2,
        available=1.0,
        drop_out=0.0,
        min_separation=3,
        max_participations=9,
    )
    assert bool(cohort.breaks_limits)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [((99, 10, 50, 10, 5), "100 are needed"), ((100, 10, 50, 10, 4), "raise max_participations to 5")],
)
def test_limits_that_cannot_be_filled_are_refused_with_numbers(numbers, says):
    n, m, t, b, k = numbers
    with pytest.raises(ValueError, match=says):
        participation.check_capacity(n, report_goal=m, num_rounds=t, min_separation=b, max_participations=k)
    participation.check_capacity(100, report_goal=10, num_rounds=50, min_separation=10, max_participations=5)


def test_the_limits_that_just_fit_can_be_served():
    _, _, rounds = simulate(100, 50, b=10, k=5, goal=10)
    assert rounds == 50


def test_selection_follows_device_numbers_and_is_the_same_under_jit():
    arguments = dict(
        report_goal=2,
        num_chosen=3,
        available=0.7,
        drop_out=0.2,
        min_separation=2,
        max_participations=5,
        max_jitter=2,
    )
    eager = participation.select(ROOT, participation.init(20), 3, **arguments)
    jitted = jax.jit(lambda s: participation.select(ROOT, s, 3, **arguments))(participation.init(20))
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted)):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(eager[0]), jax.tree.leaves(participation.init(20))):
        assert a.dtype == b.dtype
        assert a.shape == b.shape


def test_diurnal_availability_peaks_at_its_hour():
    hours = jnp.arange(24.0)
    p = jax.vmap(lambda h: participation.diurnal(h, peak=3.0, lowest=0.1, highest=0.9))(hours)
    assert int(p.argmax()) == 3
    assert int(p.argmin()) == 15
    np.testing.assert_allclose([p.max(), p.min()], [0.9, 0.1], rtol=1e-5)
