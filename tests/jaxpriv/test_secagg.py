"""Secure aggregation's arithmetic: norm bounds kept, sums exact, no wrap, nothing lost on the way back."""

import csv
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxpriv import clipping, secagg
from tests.oracles import secagg as twin

SMALL = secagg.Encoding(dimension=100, max_norm=1.0, scale=6.0, bits=16, num_clients=20)
FINE = dataclasses.replace(SMALL, scale=200.0)
PUBLIC = 77


@functools.cache
def public_signs(size=128):
    return jnp.asarray(np.random.default_rng(PUBLIC).choice([-1.0, 1.0], size), jnp.float32)


def updates(num, dimension=100, norm=0.999, seed=0):
    x = np.random.default_rng(seed).normal(size=(num, dimension))
    return jnp.asarray(norm * x / np.linalg.norm(x, axis=1, keepdims=True), jnp.float32)


@functools.cache
def encoder(encoding):
    one = functools.partial(secagg.encode, encoding=encoding)
    return jax.jit(jax.vmap(one, (0, 0, None)))


def encode_all(x, encoding, seed=0):
    return encoder(encoding)(jax.random.split(jax.random.key(seed), len(x)), x, public_signs(encoding.padded))


def test_rotation_is_the_hadamard_matrix_and_its_inverse():
    for dimension in (1, 5, 200):
        x = updates(1, dimension)[0]
        encoding = dataclasses.replace(SMALL, dimension=dimension)
        signs = secagg.random_signs(jax.random.key(PUBLIC), encoding)
        assert len(signs) == encoding.padded
        rotated = secagg.rotate(x, signs)
        np.testing.assert_allclose(rotated, twin.rotate(np.asarray(x, float), np.asarray(signs)), atol=1e-6)
        np.testing.assert_allclose(secagg.rotate_back(rotated, signs, dimension), x, atol=1e-6)


def test_signs_are_fair_and_their_keys_own():
    wide = dataclasses.replace(SMALL, dimension=2**14)
    signs = [np.asarray(secagg.random_signs(jax.random.key(k), wide)) for k in (0, 1)]
    for mean in (signs[0].mean(), signs[1].mean(), (signs[0] * signs[1]).mean()):
        assert abs(mean) < 4 / 128
    assert set(np.unique(signs)) == {-1.0, 1.0}


def test_rotation_spreads_a_single_coordinate():
    one = jnp.zeros(1000).at[3].set(1.0)
    np.testing.assert_allclose(np.abs(secagg.rotate(one, public_signs(1024))), 1 / 32, rtol=1e-5)


@pytest.mark.parametrize("encoding", [SMALL, FINE, dataclasses.replace(SMALL, beta=0.0)])
def test_every_message_keeps_the_integer_norm_bound(encoding):
    """Also the worst inputs: all weight on one coordinate, and every rotated coordinate halfway between integers."""
    spike = jnp.zeros((200, 100)).at[:, 0].set(1.0)
    halfway = secagg.rotate_back(jnp.full(128, 0.5 / encoding.scale), public_signs(), 100)
    halfway = jnp.broadcast_to(halfway / jnp.maximum(1, jnp.linalg.norm(halfway)), (200, 100))
    tries = []
    for x in (updates(200), spike, halfway):
        messages, info = encode_all(x, encoding)
        integers = np.asarray(secagg.unwrap(messages, encoding.bits))
        assert max(map(twin.exact_norm, integers)) <= encoding.integer_norm
        tries.append(np.asarray(info.tries).max())
    if encoding is SMALL:
        assert max(tries) > 1  # the bound bites, and rounding is drawn again


@pytest.mark.parametrize("bits", [12, 16, 20, 24, 32])
def test_what_clipping_leaves_at_its_bound_is_sent_whole(bits):
    """The finest scales leave rounding hardly any room above C: a norm measured badly would turn all clipped
    updates into zeros."""
    asked = dict(dimension=3000, max_norm=0.7, bits=bits, num_clients=20)
    encoding = secagg.Encoding(**asked, scale=secagg.choose_scale(**asked, noise_stddev=1.0))
    x = jax.vmap(lambda u: clipping.clip(u, 0.7)[0])(updates(20, 3000, norm=5.0))
    messages, info = encode_all(x, encoding)
    assert int(info.num_clamped.sum()) == 0
    assert int(info.tries.max()) < 10
    integers = np.asarray(secagg.unwrap(messages, bits))
    assert max(map(twin.exact_norm, integers)) <= encoding.integer_norm
    total = secagg.decode(secagg.modular_sum(messages, bits), public_signs(4096), encoding=encoding)
    error = np.asarray(total - x.sum(0))
    rounding = np.sqrt(20) / (2 * encoding.scale)
    assert error.std() < rounding + 1e-6 * np.abs(x.sum(0)).max()


def test_the_measured_norm_is_within_its_stated_error():
    """Against exact integers, on sums whose terms differ by twelve orders, and on equal terms."""
    draw = np.random.default_rng(0)
    spread = np.round(2.0 ** draw.uniform(0, 22, 200_000)) * draw.choice([-1, 1], 200_000)
    for integers in (spread, np.full(2**20, 3.0), np.full(100_001, 4_194_301.0)):
        exact = sum(int(v) ** 2 for v in integers)
        found = float(secagg._squared_norm(jnp.asarray(integers, jnp.float32)))
        assert abs(found / exact - 1) < secagg._SLACK


def test_unconditional_rounding_would_pass_the_conditional_bound():
    """So that the check above says something: without the retry some messages are longer."""
    halves = np.random.default_rng(0).integers(0, 2, (5000, 128))  # every coordinate halfway
    assert max(map(twin.exact_norm, halves)) > SMALL.integer_norm


def test_sum_is_unbiased_with_the_stated_error():
    x, decode = updates(20), jax.jit(functools.partial(secagg.decode, encoding=FINE))
    total = jnp.zeros(100)
    for seed in range(50):
        messages, info = encode_all(x, FINE, seed)
        assert int(info.num_clamped.sum()) == 0
        decoded = decode(secagg.modular_sum(messages, FINE.bits), public_signs())
        error = np.asarray(decoded - x.sum(0))
        assert error.std() < np.sqrt(20) / (2 * FINE.scale)
        total = total + error / 50
    spread = np.sqrt(20) / (2 * FINE.scale) / np.sqrt(50)
    assert np.abs(np.asarray(total)).max() < 4.5 * spread
    assert np.abs(np.asarray(total)).max() > 0.5 * spread  # rounding was really random


@given(bits=st.integers(2, 32), value=st.integers(0, 2**31 - 1), negative=st.booleans())
def test_wrap_and_unwrap_are_inverses(bits, value, negative):
    value %= 2 ** (bits - 1)
    value = jnp.array([-value if negative else value], jnp.int32)
    residue = secagg.wrap(value, bits)
    assert int(residue[0]) < 2**bits
    assert int(secagg.unwrap(residue, bits)[0]) == int(value[0])


@pytest.mark.parametrize(("bits", "num_clients"), [(8, 30), (16, 7), (32, 70_000)])
def test_a_sum_of_clamped_messages_cannot_wrap_and_one_more_would(bits, num_clients):
    encoding = dataclasses.replace(SMALL, bits=bits, num_clients=num_clients)
    largest = encoding.largest
    assert largest * num_clients <= 2 ** (bits - 1) - 1 < (largest + 1) * num_clients
    for value in (largest, -largest):
        messages = jnp.broadcast_to(secagg.wrap(jnp.int32([value]), bits), (num_clients, 1))
        assert int(secagg.unwrap(secagg.modular_sum(messages, bits), bits)[0]) == value * num_clients


def test_clamping_is_counted_and_keeps_the_sum_in_range():
    encoding = dataclasses.replace(SMALL, bits=8, num_clients=30, scale=60.0)
    assert encoding.largest == 4
    messages, info = encode_all(updates(30), encoding)
    assert int(info.num_clamped.sum()) > 0
    assert np.abs(secagg.unwrap(messages, 8)).max() == 4


def test_int32_overflows_where_a_modulus_beyond_32_bits_would():
    """70,000 times 65,536 is 4,587,520,000: a modulus of 2^32 wraps as it should, a larger one is refused (AC17)."""
    assert not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    values = jnp.full(70_000, 65_536, jnp.int32)
    assert int(values.sum()) == 292_552_704  # not 4,587,520,000, and no warning
    for bits in 32, 31, 20:
        total = secagg.modular_sum(secagg.wrap(values, bits)[:, None], bits)
        assert int(total[0]) == 4_587_520_000 % 2**bits
    with pytest.raises(ValueError, match="bits must be from 2 to 32, got 33"):
        dataclasses.replace(SMALL, bits=33)
    encoding = dataclasses.replace(SMALL, bits=32, num_clients=70_000)
    assert encoding.largest < 65_536


def test_chosen_scale_serves_or_is_refused_with_the_numbers():
    """16 bits, 16 clients, C = 3 and 2^24 parameters do fit: after the rotation a coordinate is small (AC18)."""
    asked = dict(dimension=2**24, max_norm=3.0, bits=16, num_clients=16, noise_stddev=3.0)
    scale = secagg.choose_scale(**asked)
    encoding = secagg.Encoding(dimension=2**24, max_norm=3.0, scale=scale, bits=16, num_clients=16)
    assert np.sqrt(16) / (2 * scale) < 0.001 * 3.0  # the error of rounding, far below the noise
    assert 16 * encoding.largest <= 2**15 - 1  # the sum's range
    assert encoding.inflated_norm < 3.001
    assert 8 * scale * 3.0 / 2**12 < encoding.largest
    with pytest.raises(
        ValueError, match=r"8 bits, 200 clients and dimension 1000 leave each coordinate \+-0"
    ):
        secagg.choose_scale(**(asked | dict(bits=8, num_clients=200, dimension=1000)))
    with pytest.raises(
        ValueError, match=r"10 bits, 100 clients and dimension 1000 .* above the noise .* take more bits"
    ):
        secagg.choose_scale(**(asked | dict(bits=10, num_clients=100, dimension=1000, noise_stddev=0.1)))
    with pytest.raises(ValueError, match="inflate the norm bound"):
        secagg.choose_scale(**(asked | dict(bits=10, num_clients=100, dimension=1000, noise_stddev=1e6)))


def test_chosen_scale_clamps_rarely():
    scale = secagg.choose_scale(dimension=5000, max_norm=1.0, bits=16, num_clients=20, noise_stddev=1.0)
    encoding = secagg.Encoding(dimension=5000, max_norm=1.0, scale=scale, bits=16, num_clients=20)
    spikes = jnp.eye(20, 5000) * 0.999
    for x in (updates(20, 5000), spikes):
        messages, info = encode_all(x, encoding)
        assert int(info.num_clamped.sum()) == 0
        used = np.abs(secagg.unwrap(messages, 16)).max()
        assert used > 0.05 * encoding.largest or x is spikes  # and the range is not wasted


def test_inflated_norms_match_the_reference_table(shared):
    with open(shared / "oracle" / "accounting" / "secagg_sensitivity.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 30
    for row in rows:
        encoding = secagg.Encoding(
            dimension=int(row["dim"]), max_norm=float(row["l2_clip"]), scale=float(row["scale"]), bits=32,
            num_clients=1, beta=float(row["beta"]),
        )  # fmt: skip
        assert encoding.padded == int(row["dim_padded_pow2"])
        assert encoding.inflated_norm == pytest.approx(float(row["inflated_l2_clip"]), rel=1e-9)


def test_what_is_not_finite_or_too_long_becomes_zero():
    x = updates(3).at[0, 5].set(jnp.nan).at[1, 7].set(jnp.inf).at[2].multiply(3.0)
    messages, _ = encode_all(x, FINE)
    assert not np.asarray(messages).any()


def test_encoding_eager_jitted_and_batched_agree():
    x = updates(3)
    batched, _ = encode_all(x, FINE)
    for i, key in enumerate(jax.random.split(jax.random.key(0), 3)):
        alone, _ = secagg.encode(key, x[i], public_signs(), encoding=FINE)
        # A rotated coordinate may fall on either side of its uniform by float32's last bit.
        assert (np.asarray(alone) == np.asarray(batched[i])).mean() > 0.98


def test_distributed_noise_adds_up_to_its_stddev():
    """20 shares of variance s^2: the sum's noise is 20 s^2, wherever the updates are."""
    encoding, x, noise = dataclasses.replace(FINE, share_stddev=8.0), updates(20), []
    assert encoding.largest < FINE.largest  # headroom for the noise
    for seed in range(20):
        noisy, quiet = (encode_all(x, e, seed)[0] for e in (encoding, FINE))
        lifted = [secagg.unwrap(secagg.modular_sum(m, FINE.bits), FINE.bits) for m in (noisy, quiet)]
        noise.append(np.asarray(lifted[0] - lifted[1]))
    smooth = np.concatenate(noise) + np.random.default_rng(0).random(20 * 128) - 0.5  # integers spread evenly
    p = [stats.kstest(smooth, stats.norm(scale=f * 8.0 * np.sqrt(20)).cdf).pvalue for f in (1.0, 0.85, 1.18)]
    assert p[0] > 1e-3
    assert max(p[1:]) < 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dimension=0), "dimension must be at least 1"),
        (dict(num_clients=0), "num_clients must be at least 1"),
        (dict(max_norm=0.0), "max_norm must be positive"),
        (dict(scale=float("nan")), "scale must be positive"),
        (dict(beta=1.0), r"beta must be in \[0, 1\)"),
        (dict(share_stddev=-1.0), "share_stddev"),
        (dict(bits=1), "bits must be from 2"),
        (dict(bits=5, num_clients=16), "5 bits cannot hold a sum of 16 clients' integers of dimension 100"),
        (dict(bits=8, share_stddev=100.0), "8 bits cannot hold"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_an_update_of_another_dimension_is_refused():
    with pytest.raises(ValueError, match="update has 99 parameters, the encoding 100"):
        secagg.encode(jax.random.key(0), jnp.zeros(99), public_signs(), encoding=SMALL)
