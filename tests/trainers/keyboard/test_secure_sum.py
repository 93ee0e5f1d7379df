"""Secure aggregation in the trainer: the same sums through integers, the account told, the protocol's sum the same."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import accounting
from accounting import reporting
from jaxpriv import cohort, keys, noise, secagg, sharding
from tests.trainers.keyboard import data, toy
from tests.trainers.keyboard.test_client import by_hand
from tests.trainers.keyboard.test_round import CONFIG, ROUND, SERVER, flat, pack, params0, spread
from tests.trainers.keyboard.test_train import final_state, killed_after, one_line, run, same_run
from trainers import cli
from trainers.common import metrics
from trainers.common import secagg_protocol as protocol
from trainers.keyboard import model, secure_sum
from trainers.keyboard import round as rounds

DIMENSION = model.num_params(CONFIG)


def secured(bits=20, **more):
    asked = dict(dimension=DIMENSION, bits=bits, report_goal=8, noise_multiplier=1.0, seed=3)
    return secure_sum.choose(**(asked | dict(distributed=False) | more))


def one_round(config, batch, mechanism=None, key=7, mesh=None):
    state = rounds.init(config, params0(), SERVER, mechanism, jax.random.key(key))
    if mesh is not None:
        state = sharding.replicate(state, mesh)
    return compiled(config, mechanism, mesh)(state, batch)


@functools.cache
def compiled(config, mechanism, mesh):
    return rounds.make_round(config, CONFIG, SERVER, mechanism, mesh)


def test_the_number_of_parameters():
    assert len(flat(params0())) == DIMENSION


@pytest.fixture(scope="module")
def plain():
    return one_round(ROUND, pack(data.clients()))


@pytest.mark.parametrize("bits", [12, 20])
def test_the_sum_through_integers_is_the_sum_but_for_rounding(plain, bits):
    this = secured(bits)
    state, info = one_round(dataclasses.replace(ROUND, secure=this), pack(data.clients()))
    error = flat(state.params) - flat(plain[0].params)
    largest = ROUND.clip_norm * np.sqrt(6) / (2 * this.encoding.scale) / ROUND.report_goal
    assert int(info.operator.num_clipped) > 0  # updates at the bound are sent, too
    assert 0.1 * largest < error.std() < largest + 1e-8
    assert int(info.operator.encoding["num_clamped"]) == 0
    assert 0 <= int(info.operator.encoding["num_retried"]) <= 6
    # Rounding is drawn from the secret key, by round; nothing of it follows from the public seed.
    other, _ = one_round(dataclasses.replace(ROUND, secure=this), pack(data.clients()), key=8)
    assert not np.array_equal(flat(other.params), flat(state.params))


@pytest.mark.parametrize("layout", ["shuffled", "8 devices"])
def test_layout_changes_rounding_only(layout):
    config = dataclasses.replace(ROUND, secure=secured())
    clients = data.clients(2, sizes=(3, 9, 0, 1, 5, 2, 7, 4))
    reference, _ = one_round(config, pack(clients))
    mesh = sharding.make_mesh() if layout == "8 devices" else None
    if layout == "shuffled":
        order = [3, 1, 7, 0, 2, 6, 5, 4]
        batch = pack([clients[i] for i in order], ids=order)
    else:
        batch = spread(clients, mesh)
    state, _ = one_round(config, batch, mesh=mesh)
    if layout == "shuffled":
        np.testing.assert_array_equal(flat(state.params), flat(reference.params))  # integers have no order
    change = np.linalg.norm(flat(reference.params) - flat(params0()))
    assert np.linalg.norm(flat(state.params) - flat(reference.params)) <= 1e-5 * change


def signs(this):
    return secure_sum.signs(this, jnp.int32(0))


def messages(this, clients, key=7):
    """Every client's vector, made one by one as a device would."""
    clip_norm = jnp.float32(ROUND.clip_norm)
    own = keys.stream(jax.random.key(key), "secure aggregation")
    encode = jax.jit(secure_sum.encoder(this, own, signs(this), jnp.int32(0), clip_norm))
    made = {}
    for i, rows in enumerate(clients):
        update = by_hand(params0(), rows, learning_rate=0.5, epochs=1, batch_size=4)
        norm = np.linalg.norm(flat(update))
        update = jax.tree.map(
            lambda x, n=norm: x * jnp.float32(min(1.0, 0.3 * (1 - 2**-16) / max(n, 1e-30))), update
        )
        made[i] = np.asarray(encode(jnp.int32(i), update, jnp.float32(0.5 if norm <= 0.3 else -0.5))[0])
    return made


def test_the_masked_sum_protocol_gives_what_the_round_released(plain):
    """Every client's vector masked and summed by the protocol, one client gone after its last message."""
    this = secured()
    vectors = messages(this, data.clients())
    assert all(len(v) == this.length for v in vectors.values())
    setting = protocol.Setting(
        session=b"round 0", length=this.length, bits=20, neighbours=4, threshold=3, min_survivors=3
    )
    found = protocol.secure_sum(vectors, setting, drop_after_mask=(2,))
    modular = secagg.modular_sum(jnp.asarray(list(vectors.values())), 20)
    np.testing.assert_array_equal(found.total, modular)
    assert found.bytes_up > len(vectors) * this.bytes_up  # keys and shares on top
    sums = secure_sum.recover(
        this, cohort.EncodedSum(jnp.asarray(found.total)), signs(this), jnp.float32(0.3), like=params0()
    )
    state, _ = one_round(dataclasses.replace(ROUND, secure=this), pack(data.clients()))
    released = (flat(state.params) - flat(params0())) * ROUND.report_goal
    # A device's own gradients differ from the packed ones by float32's last bits, which moves few integers by one.
    assert np.linalg.norm(released - flat(sums.update)) < 1e-4 * np.linalg.norm(released)
    norms = [
        np.linalg.norm(flat(by_hand(params0(), rows, learning_rate=0.5, epochs=1, batch_size=4)))
        for rows in data.clients()
    ]
    assert float(sums.below) == sum(0.5 if n <= 0.3 else -0.5 for n in norms)


def test_clip_bits_come_through_exactly():
    adaptive = rounds.AdaptiveClip(target=0.5, learning_rate=0.2, count_stddev=0.4)
    config = dataclasses.replace(ROUND, adaptive=adaptive, clip_norm=10.0)
    fractions = [
        float(one_round(c, pack(data.clients()))[1].released.fraction)
        for c in (config, dataclasses.replace(config, secure=secured()))
    ]
    assert fractions == [0.5 + (5 * 0.5 - 0.5) / 8] * 2  # five small updates and an empty client


def test_the_clients_shares_add_up_to_the_noise():
    """Empty clients send nothing but their share; a wrong factor on the noise is seen."""
    wide = model.ModelConfig(num_tokens=504, embedding_size=24, hidden_size=12)
    this = secured(bits=24, dimension=model.num_params(wide), distributed=True, noise_multiplier=0.8)
    config = dataclasses.replace(ROUND, noise_multiplier=0.8, clip_norm=0.5, secure=this)
    params, mechanism = model.init_params(wide, seed=0), noise.independent()
    state = rounds.init(config, params, SERVER, mechanism, jax.random.key(1))
    step = rounds.make_round(config, wide, SERVER, mechanism)
    changes = []
    for _ in range(2):
        before = flat(state.params)
        state, _ = step(state, pack(data.clients(sizes=(0,) * 8)))
        changes.append(flat(state.params) - before)
    first = changes[0]
    assert len(first) > 24_000
    np.testing.assert_allclose(first.std(), 0.8 * 0.5 / 8, rtol=0.02)  # 1 / sqrt(2 n) is 0.0045
    second = changes[1] - 0.9 * first  # less the momentum
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03  # fresh every round
    np.testing.assert_allclose(second.std(), 0.8 * 0.5 / 8, rtol=0.02)


def test_clamping_is_counted():
    fine = secured(12)
    coarse = dataclasses.replace(
        fine, encoding=dataclasses.replace(fine.encoding, scale=20 * fine.encoding.scale)
    )
    _, info = one_round(dataclasses.replace(ROUND, secure=coarse), pack(data.clients()))
    assert int(info.operator.encoding["num_clamped"]) > 0


def test_rounds_that_cannot_be_encoded_are_refused():
    with pytest.raises(ValueError, match="clip_norm"):
        dataclasses.replace(ROUND, clip_norm=None, secure=secured())
    shares = secured(24, distributed=True)
    adaptive = rounds.AdaptiveClip(target=0.5, learning_rate=0.2, count_stddev=0.4)
    with pytest.raises(ValueError, match="fixed clip norm"):
        dataclasses.replace(ROUND, adaptive=adaptive, secure=shares)
    with pytest.raises(ValueError, match="independent"):
        rounds.make_round(dataclasses.replace(ROUND, secure=shares), CONFIG, SERVER, None)
    with pytest.raises(ValueError, match="noise_key"):
        rounds.init(dataclasses.replace(ROUND, secure=secured()), params0(), SERVER, None, None)


ADAPTIVE = dict(
    secure_aggregation="secagg",
    secagg_bits=7,
    clip="adaptive",
    clip_norm=0.05,
    restarts=(2, 5),
    noise_multiplier=0.3,
    clipped_count_stddev=0.5,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    config = toy.config(tmp_path_factory.mktemp("secure"), **ADAPTIVE)
    return config, run(config)


def test_a_run_states_the_inflated_bound_with_adaptive_clipping(whole):
    config, (result, text) = whole
    folder = pathlib.Path(config.run_dir)
    facts = json.loads((folder / "mechanism.json").read_text())["secure_aggregation"]
    stated = reporting.report(folder).data
    updates, _ = stated["mechanisms"]
    inflation = accounting.inflated_norm(
        1.0, facts["scale"] * config.clip_norm, facts["dimension"], facts["beta"]
    )
    assert updates["kind"] == "SecureAggregation"
    assert updates["inflation"] == pytest.approx(inflation, rel=1e-12)
    assert 1.001 < inflation < 1.1
    plain = accounting.TreeAggregation(
        noise_multiplier=0.3,
        num_rounds=6,
        min_separation=updates["min_separation"],
        max_participations=updates["max_participations"],
        restarts=(2, 5),
        adjacency="zero-out",
    )
    # Of the split z^-2 = z_delta^-2 + (2 sigma_b)^-2 only the updates' part grows.
    share = 0.3**2 / (2 * 0.5) ** 2
    assert stated["rho"] == pytest.approx(
        accounting.rho(plain) * (share + (1 - share) * inflation**2), rel=1e-9
    )
    assert "Inflated L2 bound" in (folder / "privacy.md").read_text()
    assert result["bytes_up"] < result["bytes_down"] == 4 * facts["dimension"]
    assert "MB a round" in text
    lines = metrics.read(folder / "operator.jsonl")
    assert all(line["num_clamped"] == 0 for line in lines)
    assert all(0 <= line["num_retried"] <= 4 for line in lines)
    released = [r for r in metrics.read(folder / "metrics.jsonl") if "clip_norm" in r]
    assert len({r["clip_norm"] for r in released}) == 3


def test_a_killed_run_goes_on_to_the_same_bits(whole, tmp_path, monkeypatch):
    config = toy.config(tmp_path, **ADAPTIVE)
    killed_after(monkeypatch, config, 3)
    run(dataclasses.replace(config, resume=True))
    same_run(whole[0], config)


def test_other_secrets_round_otherwise_on_the_same_seed(whole, tmp_path):
    """Without noise the model differs only through the rounding, which the public seed must not settle."""
    states = []
    for secret in (5, 6):
        config = toy.config(
            tmp_path, f"s{secret}", mechanism="none", secure_aggregation="secagg", secagg_bits=12, rounds=2,
            server_cooldown=1, insecure_noise_seed=secret,
        )  # fmt: skip
        run(config)
        states.append(final_state(config))
    assert states[0] != states[1]


def test_a_run_with_the_clients_noise_is_stated(tmp_path):
    changes = dict(mechanism="independent", noise_multiplier=0.5, secure_aggregation="distributed")
    config = toy.config(tmp_path, **changes, rounds=8, min_separation=4)
    run(config)
    stated = reporting.report(config.run_dir).data
    (only,) = stated["mechanisms"]
    assert only["kind"] == "DistributedDiscreteGaussian"
    assert stated["rho"] == pytest.approx(
        only["max_participations"] * only["inflation"] ** 2 / (2 * 0.25), rel=1e-9
    )
    assert stated["epsilon"] > accounting.epsilon_from_rho(stated["rho"], delta=1e-10, known="gaussian")
    assert stated["observed"]["rho"] == pytest.approx(
        stated["rho"] * stated["observed"]["max_participations"] / only["max_participations"]
    )
    assert stated["deployment"]["noise_multiplier"] == pytest.approx(0.5 * 6500 / 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"secure_aggregation": "distributed"}, "--mechanism independent"),
        (
            {"secure_aggregation": "distributed", "mechanism": "independent", "clip": "adaptive"},
            "--clip fixed",
        ),
        ({"secure_aggregation": "secagg", "secagg_bits": 4}, "--secagg-bits 4"),
        ({"secure_aggregation": "secagg", "secagg_bits": 33}, "--secagg-bits must be at most 32"),
        ({"secure_aggregation": "secagg", "secagg_bits": 6, "noise_multiplier": 5.0}, "take more bits"),
        (
            {
                "secure_aggregation": "distributed",
                "mechanism": "independent",
                "secagg_bits": 10,
                "noise_multiplier": 90.0,
            },
            "--secagg-bits 10",
        ),
    ],
)
def test_settings_that_cannot_be_served_are_refused(tmp_path, capsys, changes, says):
    config = toy.config(tmp_path, **changes)
    assert cli.main(["keyboard", *toy.argv(config)]) == 2
    assert says in one_line(capsys)
    assert not pathlib.Path(config.run_dir).exists()
