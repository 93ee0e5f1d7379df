"""Greedy and beam decoding against slow twins without cache or batch, and their edges."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainers.translation.test_model import teacher_forced, tiny
from trainers.common.errors import InputError
from trainers.translation import batches, decode
from trainers.translation import model as models

log_softmax = jax.jit(decode.log_softmax)


def next_log_probs(graphdef, params, source, pieces):
    """The slow way: the whole model again for every prefix."""
    batch = batches.make_batch([batches.Example(source, np.asarray(pieces, np.int32))], length=96)
    hidden, _ = teacher_forced(graphdef, params, batch.source, batch.inputs)
    return np.asarray(log_softmax(hidden[0, len(pieces)][None] @ params["embedding"].T))[0]


def slow_greedy(graphdef, params, source):
    pieces, total = [], 0.0
    limit = decode.length_limit(len(source) + 1)
    while True:
        log_probs = next_log_probs(graphdef, params, source, pieces)
        best = int(log_probs.argmax())
        total += log_probs[best]
        if best == models.END:
            return pieces, total / (len(pieces) + 1), True
        pieces.append(best)
        if len(pieces) == limit:
            return pieces, total / len(pieces), False


def slow_beam(graphdef, params, source, beams, penalty):
    """Every live prefix extended by every piece; the same stopping rule, over python lists."""
    live, ended = [(0.0, [])], []
    limit = decode.length_limit(len(source) + 1)
    for length in range(1, limit + 1):
        candidates = []
        for total, pieces in live:
            log_probs = next_log_probs(graphdef, params, source, pieces)
            candidates += [(total + float(lp), [*pieces, i]) for i, lp in enumerate(log_probs)]
        candidates = sorted(candidates, key=lambda c: -c[0])[: 2 * beams]
        for total, pieces in candidates:
            if pieces[-1] == models.END or length == limit:
                ended.append((total / length**penalty, pieces))
        ended = sorted(ended, key=lambda e: -e[0])[:beams]
        live = [c for c in candidates if c[1][-1] != models.END][:beams]
        bound = max(live[0][0] / (length + 1) ** penalty, live[0][0] / limit**penalty)
        if len(ended) == beams and bound <= ended[-1][0]:
            break
    score, pieces = ended[0]
    return [p for p in pieces if p != models.END], score


@pytest.fixture(scope="module")
def sharp():
    """A model whose outputs vary: an untrained one repeats a piece for ever."""
    graphdef, params = tiny(seed=3)
    params = jax.tree.map(lambda x: x * 1.6, params)
    bias = params["embedding"].at[models.END].multiply(1.4)
    return graphdef, {**params, "embedding": bias}


def sources(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(3, 60, n).astype(np.int32) for n in lengths]


def test_greedy_equals_its_twin(sharp):
    graphdef, params = sharp
    texts = sources(4, 1, 9, 2, 6)
    out = decode.search(decode.plain(graphdef), params, texts, rows=2)
    for text, hypothesis in zip(texts, out):
        pieces, score, finished = slow_greedy(graphdef, params, text)
        assert list(hypothesis.pieces) == pieces
        assert hypothesis.score == pytest.approx(score, abs=1e-4)
        assert hypothesis.finished == finished


@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0])
def test_beam_equals_its_twin(sharp, penalty):
    graphdef, params = sharp
    texts = sources(3, 5)
    out = decode.search(decode.plain(graphdef), params, texts, beams=3, length_penalty=penalty, rows=2)
    for text, hypothesis in zip(texts, out):
        pieces, score = slow_beam(graphdef, params, text, 3, penalty)
        assert hypothesis.score == pytest.approx(score, abs=1e-4)
        assert list(hypothesis.pieces) == pieces


@pytest.mark.parametrize("beams", [1, 4])
def test_result_does_not_depend_on_the_batch(sharp, beams):
    """Alone, and beside one of 200 pieces: the same pieces, scores equal to 1e-4 (AC51)."""
    graphdef, params = sharp
    short, long = sources(4, 200)
    stepper = decode.plain(graphdef)
    alone = decode.search(stepper, params, [short], beams=beams, rows=1)[0]
    beside = decode.search(stepper, params, [long, short], beams=beams, rows=2)[1]
    assert list(alone.pieces) == list(beside.pieces)
    assert alone.score == pytest.approx(beside.score, abs=1e-4)
    many = decode.search(stepper, params, [*sources(*range(1, 20)), short], beams=beams, rows=20)[-1]
    assert list(alone.pieces) == list(many.pieces)


def test_blank_lines_give_blank_lines(sharp):
    """In their places, and the lines beside them as when translated alone (AC50)."""
    graphdef, params = sharp
    a, b = sources(4, 6)
    empty = np.zeros(0, np.int32)
    out = decode.search(decode.plain(graphdef), params, [a, empty, empty, b], rows=4)
    assert [len(h.pieces) for h in out][1:3] == [0, 0]
    for text, hypothesis in ((a, out[0]), (b, out[3])):
        alone = decode.search(decode.plain(graphdef), params, [text], rows=4)[0]
        assert list(alone.pieces) == list(hypothesis.pieces)
    assert decode.search(decode.plain(graphdef), params, [], rows=4) == []


def constant(log_probs):
    """A stepper that always says the same."""
    table = jnp.log(jnp.asarray(log_probs))
    return decode.Stepper(
        lambda weights, source, max_length: source[:, :1],
        lambda weights, cache, pieces, position, active: (cache, jnp.tile(table[None], (len(pieces), 1))),
        lambda cache, rows: cache[rows],
    )


@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("beams", [1, 2])
def test_an_end_mark_first_has_length_one(penalty, beams):
    """Not 0, which no power divides by (AC52)."""
    stepper = constant([1e-9, 1e-9, 0.9, 0.05, 0.05])
    (out,) = decode.search(stepper, None, sources(3), beams=beams, length_penalty=penalty, rows=1)
    assert len(out.pieces) == 0
    assert out.finished
    assert out.score == pytest.approx(np.log(0.9), abs=1e-5)


def test_a_hypothesis_cut_at_its_limit_counts_its_pieces():
    """As many as have log-probabilities, as in a finished one, whose end mark has one (AC52)."""
    stepper = constant([1e-9, 1e-9, 1e-9, 0.7, 0.3])
    for beams in (1, 2):
        (out,) = decode.search(stepper, None, sources(3), beams=beams, length_penalty=1.0, rows=1)
        assert not out.finished
        assert len(out.pieces) == decode.length_limit(4)
        assert out.score == pytest.approx(np.log(0.7), abs=1e-5)


@pytest.mark.parametrize(("penalty", "pieces"), [(0.0, 0), (1.0, 1), (-1.0, 0)])
def test_the_penalty_ranks(penalty, pieces):
    """End first, 0.4, or a piece and then the end, 0.6 x 0.6: penalty 0 goes by log-probability alone (AC52)."""
    end = jnp.log(jnp.asarray([1e-9, 1e-9, 0.4, 0.6, 1e-9]))
    then = jnp.log(jnp.asarray([1e-9, 1e-9, 0.6, 0.2, 0.2]))
    stepper = dataclasses.replace(
        constant([1.0] * 5),
        step=lambda weights, cache, pieces, position, active: (
            cache,
            jnp.tile(jnp.where(position == 0, end, then)[None], (len(pieces), 1)),
        ),
    )
    (out,) = decode.search(stepper, None, sources(3), beams=2, length_penalty=penalty, rows=1)
    assert list(out.pieces) == [3] * pieces
    assert out.score == pytest.approx(np.log(0.36) / 2 if pieces else np.log(0.4), abs=1e-5)
    (greedy,) = decode.search(stepper, None, sources(3), length_penalty=penalty, rows=1)
    assert list(greedy.pieces) == [3]
    assert greedy.score == pytest.approx(np.log(0.36) / 2**penalty, abs=1e-5)


def test_no_recompilation_a_sentence(sharp):
    graphdef, params = sharp
    stepper = decode.plain(graphdef)
    decode.search(stepper, params, sources(*[9] * 4), rows=4)
    before = decode._greedy_run._cache_size()
    decode.search(stepper, params, sources(2, 3, 5, 8, 13, 1, 4, 6, 7), rows=4)
    assert decode._greedy_run._cache_size() == before


def test_long_sources_stand_in_small_batches_of_their_own(sharp):
    """Rows times padded length is bounded, ordinary batches stay as they were, and shapes are few."""
    shapes = []

    def start(weights, source, max_length):
        shapes.append(source.shape)  # once a compiled shape
        return source[:, :1]

    stepper = dataclasses.replace(constant([1e-9, 1e-9, 0.9, 0.05, 0.05]), start=start)
    texts = sources(*[5] * 70, *[100] * 20, 250, *[400] * 40, *[700] * 20, *[1800] * 5, 3000)
    out = decode.search(stepper, None, texts)
    assert len(out) == len(texts)
    ordinary = [(32, 16), (32, 256)]
    assert shapes == [*ordinary, (32, 512), (8, 512), (16, 1024), (4, 1024), (8, 2048), (1, 4096)]
    for beams in (1, 4, 64):
        for length in (16, 256, 512, 1024, 2048, 8192):
            rows = decode._rows_at_once(length, 32, beams)
            assert rows == 32 or length > 512 or length * beams > 2048
            assert rows == 1 or (rows * length <= 16_384 and rows * length * beams <= 65_536)


def test_a_long_source_takes_memory_linear_in_its_length(sharp):
    """2,048 positions would have 17 MB of scores a head at once, of which 2 MB are held."""
    graphdef, params = sharp

    def encoded(length):
        encode = jax.jit(lambda params, source: models.merge(graphdef, params).encode(source))
        lowered = encode.lower(params, jax.ShapeDtypeStruct((1, length), jnp.int32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    half, whole = encoded(2048), encoded(4096)
    assert half < 2 * 2048 * 2048 * 4 / 2
    assert whole < 2.5 * half


def test_a_source_that_is_too_long_is_named(sharp):
    texts = [*sources(3), np.full(decode.LONGEST, 5, np.int32)]
    with pytest.raises(InputError, match="sentence 2 has 8192 pieces, at most 8191"):
        decode.search(decode.plain(sharp[0]), sharp[1], texts)


def test_an_ensemble_of_one_is_the_model_and_of_two_the_mean(sharp):
    graphdef, params = sharp
    other = jax.tree.map(lambda x: x * 0.8, params)
    texts = sources(4, 7)
    stack = jax.tree.map(lambda a: a[None], params)
    one = decode.search(decode.ensemble(graphdef), stack, texts, rows=2)
    plain = decode.search(decode.plain(graphdef), params, texts, rows=2)
    assert [list(h.pieces) for h in one] == [list(h.pieces) for h in plain]
    two = jax.tree.map(lambda a, b: jnp.stack([a, b]), params, other)
    source = jnp.asarray(batches.pad(texts, 16))
    log_probs = []
    for weights, stepper in (
        (two, decode.ensemble(graphdef)),
        (params, decode.plain(graphdef)),
        (other, None),
    ):
        stepper = stepper or decode.plain(graphdef)
        cache = jax.jit(stepper.start, static_argnums=2)(weights, source, 4)
        start = jnp.full(2, models.END)
        step = jax.jit(stepper.step)
        log_probs.append(step(weights, cache, start, jnp.int32(0), jnp.ones(2, bool))[1])
    mean = (jnp.exp(log_probs[1]) + jnp.exp(log_probs[2])) / 2
    np.testing.assert_allclose(jnp.exp(log_probs[0]), mean, atol=1e-6)


def test_refusals(sharp):
    with pytest.raises(ValueError, match="beams"):
        decode.search(decode.plain(sharp[0]), sharp[1], sources(2), beams=0)
    with pytest.raises(ValueError, match="length_penalty must be from"):
        decode.search(decode.plain(sharp[0]), sharp[1], sources(2), length_penalty=-300.0)
