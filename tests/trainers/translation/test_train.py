"""Training: it learns, resumes to the bit, refuses other data; the vocabulary and the model folder."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.trainers.translation.test_model import TINY
from tests.trainers.translation.test_model import tiny as small
from trainers.common.errors import InputError
from trainers.common.pairs import Pair
from trainers.translation import batches, data, decode, train
from trainers.translation.config import ModelConfig

LAYERS = dict(encoder_layers=1, decoder_layers=1)
TINY = {**TINY, **LAYERS}


def tiny(**changes):
    return small(**{**LAYERS, **changes})


SHORT = train.Schedule(
    updates=12,
    learning_rate=3e-3,
    warmup=4,
    batch_tokens=64,
    max_length=8,
    concatenate=0.0,
    checkpoint_every=4,
    average=0.9,
)


def copies(count=40, seed=0):
    """A language in which the translation of a word is its successor."""
    rng = np.random.default_rng(seed)
    sides = [rng.integers(3, 59, rng.integers(4, 7)).astype(np.int32) for _ in range(count)]
    return [batches.Example(s, s + 1) for s in sides]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def test_a_killed_run_continues_to_the_same_bits(tmp_path, monkeypatch):
    graphdef, params = tiny(dropout=0.1)
    examples = copies()
    whole, info = train.fit(graphdef, params, examples, schedule=SHORT, seed=1, show=False)
    assert info.updates == 12
    load, calls = batches.load, []

    def killed(*args, **options):
        calls.append(0)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return load(*args, **options)

    monkeypatch.setattr(batches, "load", killed)
    with pytest.raises(KeyboardInterrupt):
        train.fit(graphdef, params, examples, schedule=SHORT, seed=1, folder=tmp_path, show=False)
    monkeypatch.setattr(batches, "load", load)
    resumed, again = train.fit(
        graphdef, params, examples, schedule=SHORT, seed=1, folder=tmp_path, show=False
    )
    assert equal(whole, resumed)
    assert again.updates == 12
    assert again.tokens == info.tokens
    finished, _ = train.fit(graphdef, params, examples, schedule=SHORT, seed=1, folder=tmp_path, show=False)
    assert equal(whole, finished)
    with pytest.raises(InputError, match="other data or settings"):
        train.fit(graphdef, params, copies(seed=9), schedule=SHORT, seed=1, folder=tmp_path, show=False)


def test_training_that_diverges_ends_in_one_line(tmp_path):
    graphdef, params = tiny()
    wild = dataclasses.replace(SHORT, learning_rate=1e30)
    with pytest.raises(
        InputError, match=r"some model: training diverged by update .* lower its learning rate"
    ):
        train.fit(
            graphdef, params, copies(), schedule=wild, seed=1, what="some model", folder=tmp_path, show=False
        )


def test_training_lowers_the_loss_and_leaves_the_start_alone():
    graphdef, params = tiny()
    before = jax.tree.map(np.array, params)
    schedule = train.Schedule(
        updates=150, learning_rate=1e-2, warmup=20, batch_tokens=128, max_length=8, concatenate=0.0
    )
    out, info = train.fit(graphdef, params, copies(200), schedule=schedule, seed=0, show=False)
    assert info.losses[-1][1] < info.losses[0][1] - 0.2
    assert equal(before, params)
    assert not equal(before, out)


def test_an_update_equals_muon_leaf_by_leaf():
    _, params = tiny()
    rng = np.random.default_rng(0)
    like = jax.tree.map(lambda p: jnp.asarray(0.01 * rng.standard_normal(p.shape), jnp.float32), params)

    def sides(tree):
        def of(path, leaf):
            hidden = leaf.ndim == 2 and "embedding" not in str(path)
            return optax.contrib.MuonDimensionNumbers() if hidden else None

        return jax.tree_util.tree_map_with_path(of, tree)

    plain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            1.0,
            adam_b2=0.98,
            eps=1e-9,
            nesterov=True,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=sides,
        ),
    )
    expected, _ = plain.update(like, plain.init(params), params)
    groups, _ = train.OPTIMIZER.update(
        train._grouped(like), train.OPTIMIZER.init(train._grouped(params)), train._grouped(params)
    )
    got = train._ungrouped(groups, like)
    hidden = [
        a is not None
        for a in jax.tree.leaves(sides(params), is_leaf=lambda x: x is None or isinstance(x, tuple))
    ]
    for is_hidden, a, b in zip(hidden, jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if is_hidden:
            assert np.allclose(a, -b, atol=2e-4)
        else:  # Adam's first step is the gradient's sign
            assert np.allclose(a, np.sign(a), atol=1e-3)


def test_too_long_pairs_are_refused_when_nothing_is_left():
    graphdef, params = tiny()
    long = [batches.Example(np.full(40, 5, np.int32), np.full(40, 6, np.int32))]
    with pytest.raises(InputError, match="none of 1 pairs"):
        train.fit(graphdef, params, long, schedule=SHORT, seed=0, show=False)


TEXTS = [
    f"das Haus Nummer {i} steht im Garten der {w}" for i in range(40) for w in ("Frau", "Tante", "Stadt")
]


@pytest.fixture(scope="module")
def vocabulary():
    return data.train_vocabulary(TEXTS, 340)


def test_vocabulary_round_trip(vocabulary):
    texts = ["das Haus", "", "   ", "Übergrößenträger μg ½ 漢字 🙂"]
    pieces = vocabulary.encode(texts)
    assert [len(p) for p in pieces][1:3] == [0, 0]
    assert all(0 < p < len(vocabulary) for s in pieces for p in s)
    assert not any((s == 1).any() for s in pieces)  # bytes, never the unknown piece
    assert vocabulary.decode(pieces) == ["das Haus", "", "", texts[3]]
    assert "\n" not in vocabulary.decode(vocabulary.encode(["a\nb"]))[0]
    (example,) = vocabulary.examples([Pair("das Haus", "der Garten")])
    assert vocabulary.decode(example) == ["das Haus", "der Garten"]


def test_vocabulary_refusals():
    with pytest.raises(InputError, match="vocabulary of 90000 pieces"):
        data.train_vocabulary(TEXTS, 90000)
    with pytest.raises(InputError, match="not a SentencePiece model"):
        data.Vocabulary(b"junk")


def test_model_folder(tmp_path, vocabulary):
    config = ModelConfig(**{**TINY, "vocabulary_size": len(vocabulary)})
    _, params = tiny(vocabulary_size=len(vocabulary))
    model = data.make(config, params, vocabulary)
    data.save(tmp_path / "m", model, updates=3)
    again = data.load(tmp_path / "m")
    assert equal(model.params, again.params)
    assert again.digest == model.digest
    text = vocabulary.encode(["das Haus steht"])
    for m in (model, again):
        out = decode.search(decode.plain(m.graphdef), m.params, text, rows=1)[0]
    assert out.score < 0
    other = data.make(config, jax.tree.map(lambda x: x + jnp.float32(1e-3), params), vocabulary)
    assert other.digest != model.digest
    data.save_params(tmp_path / "m" / data.WEIGHTS, other.params)
    with pytest.raises(InputError, match="differ from what"):
        data.load(tmp_path / "m")
    (tmp_path / "m" / data.WEIGHTS).write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(InputError, match=r"damaged|cannot be read"):
        data.load(tmp_path / "m")
    with pytest.raises(InputError, match="does not exist"):
        data.load(tmp_path / "n")
