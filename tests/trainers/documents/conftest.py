"""A toy sentence-transformers folder and labelled documents, so that commands run in seconds and without a network."""

import json

import numpy as np
import pytest

from trainers import cli

WORDS = {
    "sea": ["ship", "wave", "sail", "harbour", "tide", "anchor", "captain", "island", "storm", "deck"],
    "kitchen": ["oven", "flour", "sugar", "butter", "recipe", "salt", "pan", "onion", "bake", "soup"],
    "law": [
        "court",
        "judge",
        "appeal",
        "verdict",
        "statute",
        "clause",
        "witness",
        "counsel",
        "plea",
        "trial",
    ],
}
COMMON = ["the", "a", "of", "and", "was", "in", "to", "with", "for", "on"]


@pytest.fixture(scope="session")
def toy_encoder(tmp_path_factory):
    """A BERT of two layers and 32 dimensions whose words have random vectors; one token a word."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp("toy-encoder")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", *COMMON, *(w for ws in WORDS.values() for w in ws)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=128)  # as released models have it: the loader must switch it off
    tokenizer.save(str(folder / "tokenizer.json"))
    dim, inner, layers = 32, 64, 2
    config = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": dim, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": len(names),
        "max_position_embeddings": 64, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def normal(*shape, scale):
        return rng.normal(size=shape, scale=scale).astype(np.float32)

    tensors = {
        "embeddings.word_embeddings.weight": normal(len(names), dim, scale=1.0),
        "embeddings.position_embeddings.weight": normal(64, dim, scale=0.02),
        "embeddings.token_type_embeddings.weight": normal(2, dim, scale=0.02),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(layers):
        at = f"encoder.layer.{i}"
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
        shapes = {"attention.self.query": (dim, dim), "attention.self.key": (dim, dim)}
        shapes |= {"attention.self.value": (dim, dim), "attention.output.dense": (dim, dim)}
        shapes |= {"intermediate.dense": (inner, dim), "output.dense": (dim, inner)}
        for name, shape in shapes.items():
            tensors[f"{at}.{name}.weight"] = normal(*shape, scale=0.05)
            tensors[f"{at}.{name}.bias"] = normal(shape[0], scale=0.05)
    for name in norms:
        tensors |= {f"{name}.weight": np.ones(dim, np.float32), f"{name}.bias": np.zeros(dim, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    return folder


AWKWARD = {
    "doc_empty.txt": "",
    "doc_blank.txt": "  \n\t\n\u00a0\n",
    "doc_one.txt": "Only one sentence here.\n",
    "doc_unicode.txt": (
        "A family \U0001f468\u200d\U0001f469\u200d\U0001f467 and a flag \U0001f1ef\U0001f1f5\U0001f1f3\U0001f1f4! "
        "\u202b\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645.\u202c "
        "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd. \u200f\u0646\u0635 \u062b\u0627\u0646\u061f "
        "\u4eca\u65e5\u306f\u6674\u308c\u3067\u3059\u3002\u660e\u65e5\u306f\u96e8\u3067\u3057\u3087\u3046\u3002 "
        "\u092f\u0939 \u092a\u0939\u0932\u093e \u0935\u093e\u0915\u094d\u092f \u0939\u0948\u0964 "
        "\u092f\u0939 \u0926\u0942\u0938\u0930\u093e \u0939\u0948\u0964 caf\u00e9 is open. cafe\u0301 is open. "
        "Zero\u200bwidth and soft\u00adhyphen. "
        "Stacked Z\u0351\u0343\u0306\u0357a\u0310\u0350\u0342l\u030dgo. \U0001f600\U0001f600\U0001f600\n"
    ),
}
"""Files without a sentence, with one, and with a dozen in scripts whose sentences end otherwise."""


def make_document(rng, label, num_sentences):
    sentences = []
    for _ in range(num_sentences):
        words = [*rng.choice(WORDS[label], 4), *rng.choice(COMMON, 3)]
        rng.shuffle(words)
        sentences.append(" ".join(words).capitalize() + ".")
    return " ".join(sentences)


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory):
    """docs_train.jsonl with its validation and test files: 40, 20 and 20 documents a label."""
    folder, rng = tmp_path_factory.mktemp("toy-data"), np.random.default_rng(1)
    for split, size in (("train", 40), ("val", 20), ("test", 20)):
        with open(folder / f"docs_{split}.jsonl", "w") as file:
            for label in WORDS:
                for _ in range(size):
                    text = make_document(rng, label, int(rng.integers(2, 14)))
                    file.write(json.dumps({"text": text, "label": label}) + "\n")
    return folder / "docs_train.jsonl"


SMALL = [
    "--preset", "tiny", "--num-candidates", "40", "--num-clusters", "4", "--num-directions", "10", "--num-axes", "5",
    "--insecure-noise-seed", "1", "--epsilons", "10", "--devices", "1",
]  # fmt: skip


@pytest.fixture(scope="session")
def fitted(toy_encoder, toy_data, tmp_path_factory):
    """A fitted folder of the toy documents."""
    folder = tmp_path_factory.mktemp("runs") / "fit"
    arguments = [
        "documents",
        "fit",
        *SMALL,
        "--data",
        toy_data,
        "--encoder",
        toy_encoder,
        "--run-dir",
        folder,
    ]
    methods = ("deepcandidate", "bounded_sum", "low_rank")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPRIV_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        assert cli.main([*map(str, arguments), "--methods", *methods]) == 0
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch, request):
    """Toy embeddings stay out of the user's cache; tests of the real encoder use it, for the package they fetch."""
    if "minilm" not in request.fixturenames:
        monkeypatch.setenv("JAXPRIV_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
