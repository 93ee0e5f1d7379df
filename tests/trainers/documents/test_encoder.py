"""The encoder: equal to the reference, bitwise a function of each sentence alone, cached, strict about folders."""

import json
import shutil

import numpy as np
import pytest

from trainers.common.errors import InputError
from trainers.documents import encoder as encoders
from trainers.documents import encoder_model, preparation


@pytest.fixture(scope="module")
def minilm():
    try:
        return preparation.open_encoder("minilm")
    except InputError as error:
        pytest.skip(f"MiniLM cannot be fetched here: {error}")


def test_minilm_equals_the_reference(minilm, shared):
    case = np.load(shared / "oracle/sentdp/minilm_check.npz")
    texts = list(map(str, case["texts"]))
    for ids, row, mask in zip(minilm.token_ids(texts), case["ids"], case["mask"]):
        assert ids == row[mask == 1].tolist()
    np.testing.assert_allclose(minilm.encode(texts), case["emb"], atol=1e-5)


SENTENCES = [
    "The ship was in the harbour.",
    "Butter and flour.",
    "The judge was on the island with a captain and a witness for the trial of the storm.",
    "Unknownword elsewhere.",
    "The appeal.",
] * 7


def test_a_sentence_is_bitwise_the_same_alone_among_others_and_in_any_order(toy_encoder):
    encoder = encoders.SentenceEncoder(toy_encoder)
    sentences = [f"{s} {'the ' * (i % 6)}" for i, s in enumerate(SENTENCES)]
    together = encoder.encode(sentences)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-5)
    order = np.random.default_rng(0).permutation(len(sentences))
    assert (encoder.encode([sentences[i] for i in order]) == together[order]).all()
    for i in (0, 2, 17):
        assert (encoder.encode([sentences[i]])[0] == together[i]).all()
    changed = list(sentences)
    changed[3] = "The verdict was a plea."
    others = np.arange(len(sentences)) != 3
    assert (encoder.encode(changed)[others] == together[others]).all()


def test_nothing_to_encode_and_things_that_are_not_text(toy_encoder, tmp_path):
    """Nothing is no rows of the right length and type (AC38)."""
    for encoder in (
        encoders.SentenceEncoder(toy_encoder, cache=tmp_path),
        encoders.SentenceEncoder(toy_encoder),
    ):
        empty = encoder.encode([])
        assert empty.shape == (0, encoder.dim) == (0, 32)
        assert empty.dtype == np.float32
    assert np.isfinite(encoder.encode(["", "😀", "語"])).all()
    with pytest.raises(InputError, match="text"):
        encoder.encode(["fine", None])


def test_composed_and_decomposed_forms_agree(toy_encoder, tmp_path):
    """NFC comes first, as `encode` says: both are the word that the vocabulary has composed (AC39)."""
    knows = shutil.copytree(toy_encoder, tmp_path / "encoder")
    words = (knows / "tokenizer.json").read_text(encoding="utf-8")
    (knows / "tokenizer.json").write_text(words.replace('"ship"', '"caf\u00e9"'), encoding="utf-8")
    encoder = encoders.SentenceEncoder(knows)
    composed, decomposed, unknown = encoder.encode(
        ["caf\u00e9 is open.", "cafe\u0301 is open.", "cafe is open."]
    )
    assert (composed == decomposed).all()
    assert (composed != unknown).any()
    first, second = encoder.token_ids(["caf\u00e9", "cafe\u0301"])
    assert first == second


def test_long_sentences_are_cut_at_the_limit(toy_encoder):
    encoder = encoders.SentenceEncoder(toy_encoder)
    assert len(encoder.token_ids(["the " * 500])[0]) == 64
    one, two = encoder.encode(["ship " * 500, "ship " * 499 + "oven"])
    assert (one == two).all()


def test_cached_vectors_are_the_same_bits_and_belong_to_one_model(toy_encoder, tmp_path):
    fresh = encoders.SentenceEncoder(toy_encoder).encode(SENTENCES)
    cached = encoders.SentenceEncoder(toy_encoder, cache=tmp_path)
    assert (cached.encode(SENTENCES) == fresh).all()
    again = encoders.SentenceEncoder(toy_encoder, cache=tmp_path)
    again._batches = None  # whatever is not in the cache would now fail
    assert (again.encode(SENTENCES[::-1]) == fresh[::-1]).all()
    other = tmp_path / "other"
    shutil.copytree(toy_encoder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    (other / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    assert encoders.SentenceEncoder(other).digest != again.digest


def test_every_length_has_a_bucket_and_a_full_batch():
    for length in range(1, 257):
        width = encoders.bucket(length)
        assert width >= length
        assert encoders.batch_size(width) >= 8
    assert encoders.bucket(9) == 12


def test_mpnet_without_a_bias_is_bert_and_its_bias_counts(toy_encoder, tmp_path):
    """The same weights under MPNet's names, positions from row 2 on, the one token type inside the words."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(toy_encoder, tmp_path / "mpnet")
    renamed = {"self.query": "attn.q", "self.key": "attn.k", "self.value": "attn.v", "output.dense": "attn.o"}
    renamed = {f"attention.{old}": f"attention.{new}" for old, new in renamed.items()}
    renamed["attention.output.LayerNorm"] = "attention.LayerNorm"
    tensors = {}
    for name, value in load_file(toy_encoder / "model.safetensors").items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        tensors[name] = value
    types = tensors.pop("embeddings.token_type_embeddings.weight")
    tensors["embeddings.word_embeddings.weight"] = tensors["embeddings.word_embeddings.weight"] + types[0]
    positions = tensors["embeddings.position_embeddings.weight"]
    tensors["embeddings.position_embeddings.weight"] = np.concatenate([0 * positions[:2], positions])
    config = json.loads((toy_encoder / "config.json").read_text())
    config |= {"model_type": "mpnet", "architectures": ["MPNetModel"], "max_position_embeddings": 66}
    (tmp_path / "mpnet" / "config.json").write_text(json.dumps(config))
    expected = encoders.SentenceEncoder(toy_encoder).encode(SENTENCES[:3])
    for bias, same in ((np.zeros((32, 4)), True), (np.random.default_rng(0).normal(size=(32, 4)), False)):
        tensors["encoder.relative_attention_bias.weight"] = bias.astype(np.float32)
        save_file(tensors, tmp_path / "mpnet" / "model.safetensors")
        encoder = encoders.SentenceEncoder(tmp_path / "mpnet")
        assert encoder.config.max_length == 64
        assert np.allclose(encoder.encode(SENTENCES[:3]), expected, atol=1e-5) == same


def test_buckets_of_relative_positions_are_those_of_the_released_weights():
    buckets = encoder_model.relative_buckets(256, 32)
    assert buckets[100, [100, 99, 93, 92, 84, 0]].tolist() == [0, 1, 7, 8, 10, 15]
    assert buckets[0, [1, 7, 8, 16, 127, 255]].tolist() == [17, 23, 24, 26, 31, 31]


def test_refuses_folders_that_it_cannot_compute(toy_encoder, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        encoders.SentenceEncoder(tmp_path / "absent")
    with pytest.raises(InputError, match=r"config\.json"):
        encoders.SentenceEncoder(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(toy_encoder, broken)
    config = json.loads((broken / "config.json").read_text())
    for change, words in (({"model_type": "mpnet"}, "mpnet"), ({"hidden_act": "silu"}, "silu")):
        (broken / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=words):
            encoders.SentenceEncoder(broken)
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(InputError, match=r"layer\.2"):
        encoders.SentenceEncoder(broken)
    (broken / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(InputError, match="cannot be read"):
        encoders.SentenceEncoder(broken)
