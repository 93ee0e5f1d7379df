"""A round: clip each client, sum, divide by the report goal, step the server; layout and donation change nothing."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpriv import noise, sharding
from tests.bench import workload
from tests.trainers.keyboard import data
from tests.trainers.keyboard.test_client import by_hand
from trainers.keyboard import batches, model
from trainers.keyboard import round as rounds

CONFIG = model.ModelConfig(num_tokens=data.WORDS + 4, embedding_size=6, hidden_size=12)
SERVER = optax.sgd(1.0, momentum=0.9)
ROUND = rounds.RoundConfig(
    report_goal=8,
    client_learning_rate=0.5,
    local_epochs=1,
    clip_norm=0.3,
    noise_multiplier=0.0,
    adaptive=None,
)


def pack(clients, chunk_size=1, ids=None):
    ids = np.arange(len(clients)) if ids is None else ids
    return batches.pack_round(
        ids, clients, batch_size=4, max_examples=100, chunk_size=chunk_size, num_clients=8, width=data.WIDTH
    )


def spread(clients, mesh, chunk_size=1, ids=None):
    """One part a device of the mesh."""
    ids = np.arange(len(clients)) if ids is None else ids
    parts = batches.pack_parts(
        ids,
        clients,
        num_parts=mesh.size,
        batch_size=4,
        max_examples=100,
        chunk_size=chunk_size,
        num_clients=8,
        width=data.WIDTH,
    )
    return sharding.place_parts(parts, mesh)


@functools.cache
def plain_step(devices=None):
    """The round without noise, compiled once for the tests that share it."""
    mesh = None if devices is None else sharding.make_mesh(jax.devices()[:devices])
    return rounds.make_round(ROUND, CONFIG, SERVER, None, mesh)


@functools.cache
def params0():
    return model.init_params(CONFIG, seed=0)


def start(config=ROUND):
    return rounds.init(config, params0(), SERVER, None, None)


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def test_two_rounds_by_hand():
    step = plain_step()
    state = start()
    params = params0()
    momentum = np.zeros_like(flat(params))
    for seed in 0, 1:
        clients = data.clients(seed)
        updates = [flat(by_hand(params, rows, learning_rate=0.5, epochs=1, batch_size=4)) for rows in clients]
        norms = np.array([np.linalg.norm(u) for u in updates])
        clipped = [u * min(1.0, 0.3 / max(n, 1e-30)) for u, n in zip(updates, norms, strict=True)]
        momentum = 0.9 * momentum + np.sum(clipped, 0) / 8
        before = flat(params)
        state, info = step(state, pack(clients))
        np.testing.assert_allclose(flat(state.params), before + momentum, rtol=1e-4, atol=2e-6)
        np.testing.assert_allclose(info.operator.norm, norms.sum(), rtol=1e-4)
        assert int(info.operator.num_clipped) == (norms > 0.3).sum() > 0
        assert (int(info.operator.num_empty), int(info.operator.num_present)) == (1, 6)
        np.testing.assert_allclose(
            info.released.update_norm, np.linalg.norm(np.sum(clipped, 0) / 8), rtol=1e-4
        )
        params = jax.tree.map(jnp.array, state.params)
    assert int(state.step) == 2


@pytest.mark.parametrize(
    "layout", ["chunks of 3", "all at once", "shuffled", "2 devices", "2 devices, chunks of 3", "8 devices"]
)
def test_layout_changes_rounding_only(layout):
    clients = data.clients(2, sizes=(3, 9, 0, 1, 5, 2, 7, 4))
    reference, _ = plain_step()(start(), pack(clients))
    state = start()
    step, mesh = plain_step(), None
    if "devices" in layout:
        step = plain_step(int(layout[0]))
        mesh = sharding.make_mesh(jax.devices()[: int(layout[0])])
        state = sharding.replicate(state, mesh)
        batch = spread(clients, mesh, chunk_size=3 if "chunks" in layout else 1)
    elif layout == "shuffled":
        order = [3, 1, 7, 0, 2, 6, 5, 4]
        batch = pack([clients[i] for i in order], ids=order)
    else:
        batch = pack(clients, chunk_size=3 if layout == "chunks of 3" else 8)
    state, _ = step(state, batch)
    change = flat(reference.params) - flat(start().params)
    assert np.linalg.norm(flat(state.params) - flat(reference.params)) <= 1e-6 * np.linalg.norm(change) * 3


def test_the_state_is_donated_and_the_callers_parameters_live():
    params = params0()
    state = rounds.init(ROUND, params, SERVER, None, None)
    saved = jax.tree.map(np.array, state)
    step = plain_step()
    new, _ = step(state, pack(data.clients()))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    assert np.isfinite(flat(params)).all()
    np.testing.assert_array_equal(flat(saved.params), flat(params))  # a copy taken before is of that round
    assert not np.array_equal(flat(new.params), flat(params))


def test_rounds_of_other_clients_compile_nothing_new():
    step, state = plain_step(), start()
    compiled = []
    for sizes in (3, 9, 0), (1,), (20, 2, 2, 2, 5, 6), ():
        state, _ = step(state, pack(data.clients(sizes=sizes)))
        compiled.append(step._cache_size())  # type: ignore[attr-defined]
    assert len(set(compiled)) == 1


@pytest.mark.parametrize(
    ("chunk_size", "devices", "clip_norm"), [(8, 1, 1.0), (2, 1, 1.0), (1, 4, 1.0), (2, 4, 0.5)]
)
def test_the_noise_is_that_of_the_sum_once_and_divided_by_the_report_goal(chunk_size, devices, clip_norm):
    """In one chunk, in four and on four devices, with z = 1 and C = 1: variance 1 in the sum (AC15); with C = 0.5 and a
    report goal of 100 a deviation of 0.005 in the mean (AC14)."""
    wide = model.ModelConfig(num_tokens=2004, embedding_size=24, hidden_size=12)
    config = dataclasses.replace(ROUND, noise_multiplier=1.0, clip_norm=clip_norm, report_goal=100)
    params, server = model.init_params(wide, seed=0), optax.sgd(1.0)
    mechanism = noise.independent()
    state = rounds.init(config, params, server, mechanism, jax.random.key(11))
    mesh = sharding.make_mesh(jax.devices()[:devices])
    state, batch = sharding.replicate(state, mesh), spread(data.clients(sizes=(0,) * 8), mesh, chunk_size)
    state, info = rounds.make_round(config, wide, server, mechanism, mesh)(state, batch)
    change = flat(state.params) - flat(params)
    assert len(change) > 90_000
    if clip_norm == 1.0:
        np.testing.assert_allclose((100 * change).var(), 1.0, rtol=0.02)
    else:
        np.testing.assert_allclose(change.std(), 0.005, rtol=0.01)
    assert abs(change.mean()) < 5 * clip_norm / 100 / np.sqrt(len(change))
    np.testing.assert_allclose(info.released.update_norm, np.linalg.norm(change), rtol=1e-3)


def test_noise_is_the_same_to_the_bit_whatever_the_layout_and_other_with_another_key():
    config = dataclasses.replace(ROUND, noise_multiplier=1.0)
    mechanism = noise.independent()
    clients, mesh = data.clients(sizes=(0,) * 8), sharding.make_mesh()
    results = []
    for key, devices in (1, 1), (1, 8), (2, 8):
        state = rounds.init(config, params0(), SERVER, mechanism, jax.random.key(key))
        if devices == 1:
            step, batch = rounds.make_round(config, CONFIG, SERVER, mechanism), pack(clients, chunk_size=8)
        else:
            step = rounds.make_round(config, CONFIG, SERVER, mechanism, mesh)
            state, batch = sharding.replicate(state, mesh), spread(clients, mesh)
        results.append(flat(step(state, batch)[0].params))
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.isclose(results[0], results[2]).all()


def test_the_clip_norm_follows_the_estimate_only_where_a_segment_starts():
    adaptive = rounds.AdaptiveClip(target=0.5, learning_rate=0.2, count_stddev=0.4)
    config = dataclasses.replace(ROUND, noise_multiplier=0.2, adaptive=adaptive)
    clients = data.clients()
    seen = {}
    for name, mechanism in (
        ("restarts", noise.tree(restarts=(2, 5))),
        ("none", None),
    ):
        this = config if mechanism else dataclasses.replace(config, noise_multiplier=0.0)
        key = jax.random.key(3) if mechanism else None
        state = rounds.init(this, params0(), SERVER, mechanism, key)
        step = rounds.make_round(this, CONFIG, SERVER, mechanism)
        seen[name] = []
        for _ in range(6):
            state, info = step(state, pack(clients))
            seen[name].append([float(x) for x in info.released[:3]])
    for name, released in seen.items():
        clips, estimates, fractions = (np.array(x) for x in zip(*released, strict=True))
        before = np.array([0.3, *estimates[:-1]])
        latched = {0, 2, 5} if name == "restarts" else set(range(6))
        want, current = [], 0.3
        for r in range(6):
            current = before[r] if r in latched else current
            want.append(current)
        np.testing.assert_allclose(clips, want, rtol=1e-6)
        np.testing.assert_allclose(estimates, before * np.exp(-0.2 * (fractions - 0.5)), rtol=1e-5)
    # Without noise the fraction is a count of small updates out of the report goal: present clients beyond it count
    # as halves, so that it lies on a grid.
    np.testing.assert_allclose(np.array(seen["none"])[:, 2] * 8 % 1, 0, atol=1e-5)


def test_divergence_is_seen():
    config = dataclasses.replace(ROUND, client_learning_rate=float("inf"))
    state, info = rounds.make_round(config, CONFIG, SERVER, None)(start(config), pack(data.clients()))
    assert rounds.diverged(info)
    np.testing.assert_array_equal(flat(state.params), flat(start().params))
    state, info = plain_step()(start(), pack(data.clients(sizes=(0, 0))))
    assert not rounds.diverged(info)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"report_goal": 0}, "report_goal"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"clip_norm": float("inf")}, "clip_norm"),
        ({"clip_norm": None, "noise_multiplier": 1.0}, "clip_norm"),
        ({"weigh_by_examples": True}, "weigh_by_examples"),
    ],
)
def test_settings_that_guarantee_nothing_are_refused(change, message):
    """Among them weights by example counts beside a clip norm (AC16)."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ROUND, **change)


def test_noise_without_a_mechanism_is_refused():
    config = dataclasses.replace(ROUND, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="mechanism"):
        rounds.make_round(config, CONFIG, SERVER, None)


@pytest.mark.parametrize(
    ("name", "num_rounds"), [("tiny", 5), pytest.param("small", 6, marks=pytest.mark.slow)]
)
def test_the_loss_of_the_shared_workload_is_that_of_other_frameworks(name, num_rounds):
    bench = importlib.import_module("tests.bench.bench_round")
    _, loss = bench.run(workload.WORKLOADS[name], "none", num_rounds)
    assert round(loss, 4) == workload.EXPECTED_LOSS[name][num_rounds]
