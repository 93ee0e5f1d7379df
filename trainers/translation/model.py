"""A Transformer encoder-decoder (Vaswani et al. 2017, pre-norm) that also yields datastore keys.

Everything after construction is functional: `split` gives `(graphdef, params)`, and each public function here
takes them and is pure. Source rows end in the end mark; target inputs start with it (no separate start mark),
so piece 0 is padding, on both sides and nowhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from trainers.translation.config import ModelConfig

PAD, UNK, END = 0, 1, 2
WHOLE, PART = 1024, 256
"""Positions that attend at once, and how many of a longer row do: the memory of attention is linear in its length."""
Params = Any


class Cache(NamedTuple):
    """What a decoding step needs of the past: an array a decoder layer, rows first.

    One array a layer, because a slice of a stacked one would be copied at every step.

    self_keys, self_values: `[rows, heads, max_length, head_dim]`, filled up to the present position.
    cross_keys, cross_values: the same over source positions, computed once.
    source_mask: `[rows, source_length]`, True for real source pieces.
    """

    self_keys: tuple[Float[Array, "rows heads length head_dim"], ...]
    self_values: tuple[Float[Array, "rows heads length head_dim"], ...]
    cross_keys: tuple[Float[Array, "rows heads source head_dim"], ...]
    cross_values: tuple[Float[Array, "rows heads source head_dim"], ...]
    source_mask: Bool[Array, "rows source"]


def positions(index: Int[Array, " length"], dim: int) -> Float[Array, "length dim"]:
    """Sinusoidal position codes: sines in the first half, cosines in the second; any length."""
    rates = jnp.exp(-np.log(10_000.0) * jnp.arange(dim // 2) / (dim // 2))
    angles = index.astype(jnp.float32)[:, None] * rates[None, :]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def dropout(x: Float[Array, "*shape"], rate: float, key: Key[Array, ""] | None) -> Float[Array, "*shape"]:
    """Zeroes entries with probability `rate` (to 1/256) and rescales the rest; the identity without a key.

    Eight random bits an entry, because threefry on a CPU otherwise takes a tenth of a training step.
    """
    cut = round(rate * 256)
    if key is None or cut == 0:
        return x
    keep = jax.random.bits(key, x.shape, jnp.uint8) >= cut
    return jnp.where(keep, x * (256 / (256 - cut)), 0.0)


def _attend(query, key, value, mask):
    """Softmax attention; `query [rows, heads, q, d]`, `key`/`value [rows, heads, k, d]`, mask broadcastable
    to scores.
    """
    length = query.shape[2]
    if length <= WHOLE:
        return _attend_at_once(query, key, value, mask)
    queries = _parts(query)
    if mask.shape[2] == 1:
        seen = jax.lax.map(lambda q: _attend_at_once(q, key, value, mask), queries)
    else:
        seen = jax.lax.map(
            lambda part: _attend_at_once(part[0], key, value, part[1]), (queries, _parts(mask))
        )
    parts, rows, heads, _, dim = seen.shape
    return jnp.moveaxis(seen, 0, 2).reshape(rows, heads, parts * PART, dim)[:, :, :length]


def _parts(x):
    """`[parts, rows, heads, PART, n]` of `[rows, heads, length, n]`, the last part filled up with zeros."""
    rows, heads, length, n = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -length % PART), (0, 0)))
    return jnp.moveaxis(x.reshape(rows, heads, -1, PART, n), 2, 0)


def _attend_at_once(query, key, value, mask):
    scores = jnp.einsum("rhqd,rhkd->rhqk", query, key) * query.shape[-1] ** -0.5
    # A finite floor, not -inf: a padded row may have nothing to attend to, and must stay finite.
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("rhqk,rhkd->rhqd", weights, value)


class _Attention(nnx.Module):
    def __init__(self, dim: int, heads: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.xavier_uniform()
        self.heads = heads
        self.query = nnx.Linear(dim, dim, use_bias=False, kernel_init=init, rngs=rngs)
        self.key_value = nnx.Linear(dim, 2 * dim, use_bias=False, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(dim, dim, kernel_init=init, rngs=rngs)

    def split_heads(self, x):
        rows, length, dim = x.shape
        return x.reshape(rows, length, self.heads, dim // self.heads).transpose(0, 2, 1, 3)

    def queries(self, x):
        return self.split_heads(self.query(x))

    def keys_values(self, x):
        keys, values = jnp.split(self.key_value(x), 2, -1)
        return self.split_heads(keys), self.split_heads(values)

    def merge(self, x):
        rows, heads, length, dim = x.shape
        return self.out(x.transpose(0, 2, 1, 3).reshape(rows, length, heads * dim))

    def __call__(self, x, memory, mask):
        keys, values = self.keys_values(memory)
        return self.merge(_attend(self.queries(x), keys, values, mask))


class _FeedForward(nnx.Module):
    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.xavier_uniform()
        self.up = nnx.Linear(dim, hidden, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(hidden, dim, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


class _EncoderLayer(nnx.Module):
    def __init__(self, c: ModelConfig, *, rngs: nnx.Rngs):
        self.attention = _Attention(c.dim, c.num_heads, rngs=rngs)
        self.feed_forward = _FeedForward(c.dim, c.ffn_dim, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(c.dim, rngs=rngs)
        self.feed_forward_norm = nnx.LayerNorm(c.dim, rngs=rngs)


class _DecoderLayer(nnx.Module):
    def __init__(self, c: ModelConfig, *, rngs: nnx.Rngs):
        self.attention = _Attention(c.dim, c.num_heads, rngs=rngs)
        self.cross = _Attention(c.dim, c.num_heads, rngs=rngs)
        self.feed_forward = _FeedForward(c.dim, c.ffn_dim, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(c.dim, rngs=rngs)
        self.cross_norm = nnx.LayerNorm(c.dim, rngs=rngs)
        self.feed_forward_norm = nnx.LayerNorm(c.dim, rngs=rngs)


class Transformer(nnx.Module):
    """Encoder, decoder and the one embedding matrix they share with the softmax."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), (config.vocabulary_size, config.dim)) * config.dim**-0.5
        )
        self.encoder = nnx.List([_EncoderLayer(config, rngs=rngs) for _ in range(config.encoder_layers)])
        self.decoder = nnx.List([_DecoderLayer(config, rngs=rngs) for _ in range(config.decoder_layers)])
        self.encoder_norm = nnx.LayerNorm(config.dim, rngs=rngs)
        self.decoder_norm = nnx.LayerNorm(config.dim, rngs=rngs)

    def embed(self, pieces, index):
        dim = self.config.dim
        return self.embedding[...][pieces] * dim**0.5 + positions(index, dim)[None]

    def logits(self, hidden):
        return hidden @ self.embedding[...].T

    def _keys_of(self, hidden, ffn_input):
        return hidden if self.config.key == "output" else ffn_input

    def encode(self, source, key=None):
        """Memory `[rows, source, dim]` of padded source pieces."""
        drop = _Dropper(self.config.dropout, key)
        mask = (source != PAD)[:, None, None, :]
        x = drop(self.embed(source, jnp.arange(source.shape[1])))
        for layer in self.encoder:
            h = layer.attention_norm(x)
            x = x + drop(layer.attention(h, h, mask))
            x = x + drop(layer.feed_forward(layer.feed_forward_norm(x)))
        return self.encoder_norm(x)

    def decode(self, memory, source_mask, target, key=None):
        """Teacher-forced `(hidden, keys)`, both `[rows, length, dim]`: softmax input and datastore key a
        position.
        """
        drop = _Dropper(self.config.dropout, key)
        length = target.shape[1]
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
        cross_mask = source_mask[:, None, None, :]
        x = drop(self.embed(target, jnp.arange(length)))
        h = x
        for layer in self.decoder:
            h = layer.attention_norm(x)
            x = x + drop(layer.attention(h, h, causal))
            x = x + drop(layer.cross(layer.cross_norm(x), memory, cross_mask))
            h = layer.feed_forward_norm(x)
            x = x + drop(layer.feed_forward(h))
        hidden = self.decoder_norm(x)
        return hidden, self._keys_of(hidden, h)

    def start(self, memory, source_mask, max_length: int) -> Cache:
        """An empty cache for `max_length` target positions."""
        head_dim = self.config.dim // self.config.num_heads
        shape = (memory.shape[0], self.config.num_heads, max_length, head_dim)
        empty = tuple(jnp.zeros(shape, memory.dtype) for _ in self.decoder)
        cross_keys, cross_values = zip(*(layer.cross.keys_values(memory) for layer in self.decoder))
        return Cache(empty, empty, cross_keys, cross_values, source_mask)

    def step(self, cache: Cache, pieces, position):
        """One target position for every row: `(cache, hidden [rows, dim], keys [rows, dim])`."""
        x = self.embed(pieces[:, None], position[None])
        past = (jnp.arange(cache.self_keys[0].shape[2]) <= position)[None, None, None]
        cross_mask = cache.source_mask[:, None, None, :]
        self_keys, self_values = [], []
        h = x
        for i, layer in enumerate(self.decoder):
            h = layer.attention_norm(x)
            key, value = layer.attention.keys_values(h)
            start = (0, 0, position, 0)
            self_keys.append(jax.lax.dynamic_update_slice(cache.self_keys[i], key, start))
            self_values.append(jax.lax.dynamic_update_slice(cache.self_values[i], value, start))
            seen = _attend(layer.attention.queries(h), self_keys[i], self_values[i], past)
            x = x + layer.attention.merge(seen)
            query = layer.cross.queries(layer.cross_norm(x))
            x = x + layer.cross.merge(_attend(query, cache.cross_keys[i], cache.cross_values[i], cross_mask))
            h = layer.feed_forward_norm(x)
            x = x + layer.feed_forward(h)
        hidden = self.decoder_norm(x)
        keys = self._keys_of(hidden, h)
        cache = cache._replace(self_keys=tuple(self_keys), self_values=tuple(self_values))
        return cache, hidden[:, 0], keys[:, 0]


class _Dropper:
    """Dropout with a fresh key at every call, or none."""

    def __init__(self, rate, key):
        self.rate, self.key = rate, key

    def __call__(self, x):
        if self.key is None or self.rate == 0:
            return x
        self.key, use = jax.random.split(self.key)
        return dropout(x, self.rate, use)


def init(config: ModelConfig, key: Key[Array, ""]) -> tuple[nnx.GraphDef, Params]:
    """A fresh model as `(graphdef, params)`; `params` is a pytree of float32 arrays."""

    @jax.jit
    def draw(key):
        return nnx.to_pure_dict(nnx.split(Transformer(config, rngs=nnx.Rngs(params=key)), nnx.Param)[1])

    return abstract(config)[0], draw(key)


def abstract(config: ModelConfig) -> tuple[nnx.GraphDef, Params]:
    """What `init` returns, with shapes in the place of arrays; draws nothing."""
    made = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(params=jax.random.key(0))))
    graphdef, params = nnx.split(made, nnx.Param)
    return graphdef, nnx.to_pure_dict(params)


def merge(graphdef: nnx.GraphDef, params: Params) -> Transformer:
    """The module with these parameters."""
    return nnx.merge(graphdef, nnx.State(jax.tree.map(nnx.Param, params)))


def num_parameters(params: Params) -> int:
    """Parameters in all, the shared embedding counted once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
