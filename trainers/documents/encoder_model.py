"""BERT-type sentence encoders as an NNX module, and their weights from safetensors.

Post-layer-norm transformer with erf GELU (Devlin et al. 2019, arXiv:1810.04805), pooled over the mask and
scaled to unit L2 norm (Reimers & Gurevych 2019, arXiv:1908.10084).
"""

import json
import pathlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from trainers.common.errors import InputError

ARCHITECTURES = ("BertModel", "BertForMaskedLM")
ACTIVATIONS = {"gelu": lambda x: jax.nn.gelu(x, approximate=False), "relu": jax.nn.relu}


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes of an encoder, as its folder states them.

    hidden_size, intermediate_size, num_layers, num_heads, vocabulary_size: of the transformer.
    max_positions: rows of the position table.
    max_length: tokens a sentence keeps, [CLS] and [SEP] among them.
    norm_epsilon: added to the variance in each layer norm.
    activation: key of ACTIVATIONS.
    pooling: "mean", "cls" or "max".
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocabulary_size: int
    max_positions: int
    max_length: int
    norm_epsilon: float
    activation: str
    pooling: str


class Block(nnx.Module):
    """One post-layer-norm transformer layer; query, key and value share one product."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        d, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.activation = config.activation
        self.qkv = nnx.Linear(d, 3 * d, rngs=rngs)
        self.out = nnx.Linear(d, d, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(d, epsilon=config.norm_epsilon, rngs=rngs)
        self.up = nnx.Linear(d, inner, rngs=rngs)
        self.down = nnx.Linear(inner, d, rngs=rngs)
        self.output_norm = nnx.LayerNorm(d, epsilon=config.norm_epsilon, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch length dim"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch length dim"]:
        batch, length, dim = x.shape
        qkv = self.qkv(x.reshape(-1, dim)).reshape(batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = jnp.moveaxis(qkv, (2, 3), (0, 2))  # each [batch, heads, length, head_dim]
        scores = jnp.einsum("bhqe,bhke->bhqk", q, k) / np.sqrt(dim // self.num_heads).astype(np.float32)
        scores = jnp.where(mask[:, None, None, :], scores, jnp.finfo(scores.dtype).min)
        mixed = jnp.einsum("bhqk,bhke->bhqe", jax.nn.softmax(scores, axis=-1), v)
        mixed = jnp.swapaxes(mixed, 1, 2).reshape(-1, dim)
        x = self.attention_norm(x.reshape(-1, dim) + self.out(mixed))
        x = self.output_norm(x + self.down(ACTIVATIONS[self.activation](self.up(x))))
        return x.reshape(batch, length, dim)


class Encoder(nnx.Module):
    """Token ids to one unit vector a sentence; the layers are stacked and scanned, so one is compiled."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.words = nnx.Embed(config.vocabulary_size, config.hidden_size, rngs=rngs)
        self.positions = nnx.Embed(config.max_positions, config.hidden_size, rngs=rngs)
        self.token_type = nnx.Param(jnp.zeros(config.hidden_size))
        self.norm = nnx.LayerNorm(config.hidden_size, epsilon=config.norm_epsilon, rngs=rngs)
        self.blocks = Block(config, rngs)
        graph, one = nnx.split(self.blocks)
        stacked = jax.tree.map(lambda x: jnp.repeat(x[None], config.num_layers, 0), one)
        self.blocks = nnx.merge(graph, stacked)

    def __call__(
        self, ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch dim"]:
        return self.normalise(self.pool(self.hidden(ids, mask), mask))

    def hidden(
        self, ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch length dim"]:
        """The last layer's vector of every token."""
        positions = self.positions.embedding[: ids.shape[1]]
        x = self.norm(self.words(ids) + positions[None] + self.token_type[...][None, None])
        graph, stacked = nnx.split(self.blocks)
        return jax.lax.scan(lambda x, one: (nnx.merge(graph, one)(x, mask), None), x, stacked)[0]

    def pool(
        self, x: Float[Array, "batch length dim"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch dim"]:
        """One vector a sentence; the mean of an all-padding row is zero, not NaN."""
        if self.config.pooling == "cls":
            return x[:, 0]
        if self.config.pooling == "max":
            return jnp.where(mask[..., None], x, jnp.finfo(x.dtype).min).max(1)
        return jnp.where(mask[..., None], x, 0).sum(1) / jnp.maximum(mask.sum(1, keepdims=True), 1)

    def normalise(self, x: Float[Array, "batch dim"]) -> Float[Array, "batch dim"]:
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def read_config(folder: pathlib.Path) -> EncoderConfig:
    """The sizes in a sentence-transformers folder.

    Raises:
      InputError: a file is missing, or the model is of a kind that this encoder does not compute.
    """
    config = _read_json(folder / "config.json")
    architecture = (config.get("architectures") or ["BertModel"])[0]
    if config.get("model_type") != "bert" or architecture not in ARCHITECTURES:
        raise InputError(
            f"{folder}: model type {config.get('model_type')!r} ({architecture}) is not supported; "
            "give a BERT-type sentence-transformers folder (all-MiniLM, bge, gte, e5 of the BERT family)"
        )
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise InputError(f"{folder}: only absolute position embeddings are supported")
    if config["hidden_act"] not in ACTIVATIONS:
        raise InputError(f"{folder}: activation {config['hidden_act']!r} is not one of {sorted(ACTIVATIONS)}")
    pooling, modules = "mean", folder / "modules.json"
    if modules.exists():
        for module in json.loads(modules.read_text(encoding="utf-8")):
            kind = module["type"].rpartition(".")[2]
            if kind == "Pooling":
                pooling = _pooling(_read_json(folder / module["path"] / "config.json"), folder)
            elif kind not in ("Transformer", "Normalize"):
                raise InputError(
                    f"{folder}: module {kind} is not supported; only Transformer, Pooling, Normalize"
                )
    max_length = int(config["max_position_embeddings"])
    if (folder / "sentence_bert_config.json").exists():
        max_length = int(_read_json(folder / "sentence_bert_config.json").get("max_seq_length") or max_length)
    return EncoderConfig(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        vocabulary_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        max_length=min(max_length, config["max_position_embeddings"], 256),
        norm_epsilon=config.get("layer_norm_eps", 1e-12),
        activation=config["hidden_act"],
        pooling=pooling,
    )


def load(folder: pathlib.Path) -> Encoder:
    """The encoder of a sentence-transformers folder, with its weights in float32.

    Raises:
      InputError: `model.safetensors` is missing or lacks a tensor, named in the message.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    config = read_config(folder)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise InputError(f"encoder folder {folder} holds no model.safetensors; save the model in that format")
    try:
        tensors = {k.removeprefix("bert."): v.astype(np.float32) for k, v in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}; fetch the model again") from error
    try:
        weights = _arrange(tensors, config.num_layers)
    except KeyError as error:
        raise InputError(
            f"{path} lacks the tensor {error.args[0]!r}; it is not a BERT-type encoder"
        ) from error
    encoder = nnx.eval_shape(lambda: Encoder(config, nnx.Rngs(0)))
    graph, state = nnx.split(encoder)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, weights))
    return nnx.merge(graph, state)


def _arrange(tensors: dict[str, np.ndarray], num_layers: int) -> dict:
    """Torch's names and [out, in] kernels as this module's tree, layers stacked first."""

    def stacked(*names: str, transpose: bool = False) -> np.ndarray:
        layers = []
        for i in range(num_layers):
            parts = [tensors[f"encoder.layer.{i}.{name}"] for name in names]
            layers.append(np.concatenate([p.T if transpose else p for p in parts], axis=-1))
        return np.stack(layers)

    def linear(*names: str) -> dict:
        return {
            "kernel": stacked(*(f"{n}.weight" for n in names), transpose=True),
            "bias": stacked(*(f"{n}.bias" for n in names)),
        }

    def norm(name: str) -> dict:
        return {"scale": stacked(f"{name}.weight"), "bias": stacked(f"{name}.bias")}

    return {
        "words": {"embedding": tensors["embeddings.word_embeddings.weight"]},
        "positions": {"embedding": tensors["embeddings.position_embeddings.weight"]},
        "token_type": tensors["embeddings.token_type_embeddings.weight"][0],
        "norm": {
            "scale": tensors["embeddings.LayerNorm.weight"],
            "bias": tensors["embeddings.LayerNorm.bias"],
        },
        "blocks": {
            "qkv": linear(*(f"attention.self.{n}" for n in ("query", "key", "value"))),
            "out": linear("attention.output.dense"),
            "attention_norm": norm("attention.output.LayerNorm"),
            "up": linear("intermediate.dense"),
            "down": linear("output.dense"),
            "output_norm": norm("output.LayerNorm"),
        },
    }


def _read_json(path: pathlib.Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); give a sentence-transformers folder") from error


def _pooling(config: dict, folder: pathlib.Path) -> str:
    modes = {k.removeprefix("pooling_mode_"): v for k, v in config.items() if k.startswith("pooling_mode")}
    names = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}
    on = [k for k, v in modes.items() if v]
    if len(on) != 1 or on[0] not in names:
        raise InputError(f"{folder}: pooling {on} is not supported; one of {sorted(names)}")
    return names[on[0]]
