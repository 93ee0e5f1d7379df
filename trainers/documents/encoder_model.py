"""BERT- and MPNet-type sentence encoders as an NNX module, and their weights from safetensors.

Post-layer-norm transformer with erf GELU (Devlin et al. 2019, arXiv:1810.04805), in MPNet with a learned bias for
each bucket of relative positions (Song et al. 2020, arXiv:2004.09297), pooled over the mask and scaled to unit L2
norm (Reimers & Gurevych 2019, arXiv:1908.10084).
"""

import json
import math
import pathlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from trainers.common import tensors
from trainers.common.errors import InputError

ARCHITECTURES = {"bert": ("BertModel", "BertForMaskedLM"), "mpnet": ("MPNetModel", "MPNetForMaskedLM")}
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
    first_position: row of the position table that the first token takes (MPNet keeps two for padding).
    relative_buckets: rows of the table of relative positions, 0 for a model without one.
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
    first_position: int = 0
    relative_buckets: int = 0


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
        self,
        x: Float[Array, "batch length dim"],
        mask: Bool[Array, "batch length"],
        bias: Float[Array, "heads length length"] | None = None,
    ) -> Float[Array, "batch length dim"]:
        batch, length, dim = x.shape
        qkv = self.qkv(x.reshape(-1, dim)).reshape(batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = jnp.moveaxis(qkv, (2, 3), (0, 2))  # each [batch, heads, length, head_dim]
        scores = jnp.einsum("bhqe,bhke->bhqk", q, k) / np.sqrt(dim // self.num_heads).astype(np.float32)
        if bias is not None:
            scores = scores + bias[None]
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
        if config.relative_buckets:
            self.relative = nnx.Embed(config.relative_buckets, config.num_heads, rngs=rngs)
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
        first, length = self.config.first_position, ids.shape[1]
        positions = self.positions.embedding[first : first + length]
        x = self.norm(self.words(ids) + positions[None] + self.token_type[...][None, None])
        bias = None
        if self.config.relative_buckets:
            buckets = relative_buckets(length, self.config.relative_buckets)
            bias = jnp.moveaxis(self.relative(jnp.asarray(buckets)), 2, 0)
        graph, stacked = nnx.split(self.blocks)
        return jax.lax.scan(lambda x, one: (nnx.merge(graph, one)(x, mask, bias), None), x, stacked)[0]

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


def relative_buckets(length: int, num_buckets: int, *, max_distance: int = 128) -> np.ndarray:
    """Bucket of every (query, key) pair: near distances one each, far ones by their logarithm, each side its own half.

    In float32, as the released weights were trained.
    """
    offsets = np.arange(length)[None, :] - np.arange(length)[:, None]
    half, distance = num_buckets // 2, np.abs(offsets)
    exact = half // 2
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    far = exact + (ratio / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)).astype(int)
    return np.where(distance < exact, distance, np.minimum(far, half - 1)) + half * (offsets > 0)


def read_config(folder: pathlib.Path) -> EncoderConfig:
    """The sizes in a sentence-transformers folder.

    Raises:
      InputError: a file is missing, or the model is of a kind that this encoder does not compute.
    """
    config = _read_json(folder / "config.json")
    kind = str(config.get("model_type"))
    architecture = (config.get("architectures") or ["none named"])[0]
    if architecture not in ARCHITECTURES.get(kind, ()):
        raise InputError(
            f"{folder}: model type {kind!r} ({architecture}) is not supported; give a sentence-transformers folder "
            "of the BERT family (all-MiniLM, bge, gte, e5) or of MPNet (all-mpnet-base)"
        )
    mpnet = kind == "mpnet"
    first_position = 2 if mpnet else 0
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
    positions = int(config["max_position_embeddings"]) - first_position
    max_length = positions
    if (folder / "sentence_bert_config.json").exists():
        max_length = int(_read_json(folder / "sentence_bert_config.json").get("max_seq_length") or max_length)
    return EncoderConfig(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        vocabulary_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        max_length=min(max_length, positions, 256),
        norm_epsilon=config.get("layer_norm_eps", 1e-12),
        activation=config["hidden_act"],
        pooling=pooling,
        first_position=first_position,
        relative_buckets=int(config.get("relative_attention_num_buckets", 32)) if mpnet else 0,
    )


def load(folder: pathlib.Path) -> Encoder:
    """The encoder of a sentence-transformers folder, with its weights in float32.

    Raises:
      InputError: `model.safetensors` is missing or lacks a tensor, named in the message.
    """
    config = read_config(folder)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise InputError(f"encoder folder {folder} holds no model.safetensors; save the model in that format")
    try:
        weights = {
            k.removeprefix("bert.").removeprefix("mpnet."): v.astype(np.float32)
            for k, v in tensors.read(path)[0].items()
        }
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}; fetch the model again") from error
    try:
        weights = _arrange(weights, config)
    except KeyError as error:
        raise InputError(
            f"{path} lacks the tensor {error.args[0]!r}; it is not an encoder of the type that its config names"
        ) from error
    encoder = nnx.eval_shape(lambda: Encoder(config, nnx.Rngs(0)))
    graph, state = nnx.split(encoder)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, weights))
    return nnx.merge(graph, state)


def _arrange(tensors: dict[str, np.ndarray], config: EncoderConfig) -> dict:
    """Torch's names and [out, in] kernels as this module's tree, layers stacked first."""

    def stacked(*names: str, transpose: bool = False) -> np.ndarray:
        layers = []
        for i in range(config.num_layers):
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

    if config.relative_buckets:
        qkv, out, first_norm = (
            [f"attention.attn.{n}" for n in "qkv"],
            "attention.attn.o",
            "attention.LayerNorm",
        )
        others = {
            "relative": {"embedding": tensors["encoder.relative_attention_bias.weight"]},
            "token_type": np.zeros(config.hidden_size, np.float32),
        }
    else:
        qkv = [f"attention.self.{n}" for n in ("query", "key", "value")]
        out, first_norm = "attention.output.dense", "attention.output.LayerNorm"
        others = {"token_type": tensors["embeddings.token_type_embeddings.weight"][0]}
    return {
        "words": {"embedding": tensors["embeddings.word_embeddings.weight"]},
        "positions": {"embedding": tensors["embeddings.position_embeddings.weight"]},
        "norm": {
            "scale": tensors["embeddings.LayerNorm.weight"],
            "bias": tensors["embeddings.LayerNorm.bias"],
        },
        "blocks": {
            "qkv": linear(*qkv),
            "out": linear(out),
            "attention_norm": norm(first_norm),
            "up": linear("intermediate.dense"),
            "down": linear("output.dense"),
            "output_norm": norm("output.LayerNorm"),
        },
    } | others


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
