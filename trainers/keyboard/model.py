"""The keyboard's language model: one LSTM layer between an embedding and a projection back to it.

CIFG couples the input gate to the forget gate (`i = 1 - f`), which saves a quarter of the recurrent weights; it
is what the deployed models use. The plain LSTM is there to compare with others.

    z = x W_x + h W_h + b                      x: embedding of the token
    c' = f c + (1 - f) tanh(z_g)               f = sigmoid(z_f + 1), o = sigmoid(z_o)
    h' = o tanh(c')
    logits = (h' P + p) E^T + e                E: output embedding, shared with the input's or its own

Tokens: 0 is padding, words 1..V, then out-of-vocabulary V + 1, begin V + 2, end V + 3.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

Params = dict[str, Float[Array, "..."]]

PAD = 0
NUM_SPECIAL = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model.

    num_tokens: rows of the embedding, special tokens included (`V + 4` for a vocabulary of V words).
    """

    num_tokens: int
    embedding_size: int
    hidden_size: int
    cell: Literal["cifg", "lstm"] = "cifg"
    shared_embeddings: bool = False

    def __post_init__(self):
        for name in ("num_tokens", "embedding_size", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.cell not in _GATE_ORDER:
            raise ValueError(f"cell must be one of {sorted(_GATE_ORDER)}, got {self.cell!r}")


# f: forget, o: output, i: input (sigmoids; the forget gate's is shifted by 1), g: candidate (tanh).
_GATE_ORDER = {"cifg": "fgo", "lstm": "ifgo"}


class KeyboardLM(nnx.Module):
    """Next-word logits for token ids; construct, `split_params`, then use the functions of this module."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        tokens, embed, hidden = config.num_tokens, config.embedding_size, config.hidden_size
        gates = len(_GATE_ORDER[config.cell])
        small, lecun = nnx.initializers.normal(0.1), nnx.initializers.lecun_normal()
        square = nnx.initializers.orthogonal()
        self.config = config
        self.embedding = nnx.Param(small(rngs.params(), (tokens, embed)))
        self.input_kernel = nnx.Param(lecun(rngs.params(), (embed, gates * hidden)))
        recurrent = [square(rngs.params(), (hidden, hidden)) for _ in range(gates)]
        self.recurrent_kernel = nnx.Param(jnp.concatenate(recurrent, 1))
        self.bias = nnx.Param(jnp.zeros(gates * hidden))
        self.projection = nnx.Param(lecun(rngs.params(), (hidden, embed)))
        self.projection_bias = nnx.Param(jnp.zeros(embed))
        if not config.shared_embeddings:
            self.output_embedding = nnx.Param(small(rngs.params(), (tokens, embed)))
        self.output_bias = nnx.Param(jnp.zeros(tokens))

    def __call__(self, inputs: Int[Array, "time rows"]) -> Float[Array, "time rows tokens"]:
        return logits(split_params(self), inputs, cell=self.config.cell)


def split_params(model: KeyboardLM) -> Params:
    """The parameters as a plain dict of arrays, what everything after construction works on."""
    return nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])


def num_params(config: ModelConfig) -> int:
    """Parameters of the model, without making them."""
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: init_params(config, seed=0))))


def init_params(config: ModelConfig, *, seed: int) -> Params:
    """Public initial values: a function of the sizes and `seed` alone."""
    return split_params(KeyboardLM(config, rngs=nnx.Rngs(params=jax.random.key(seed))))


def output_embedding(params: Params) -> Float[Array, "tokens embed"]:
    """The output layer's table; the input's where they are shared."""
    return params.get("output_embedding", params["embedding"])


def step_cell(cell: str, z: Float[Array, "rows gates"], c: Float[Array, "rows hidden"]):
    """`(h', c')` from the gates' inputs `z = x W_x + h W_h + b` and the cell state."""
    # sigmoid(x) = tanh(x / 2) / 2 + 1/2: one tanh over all gates is several times faster than four functions.
    names, hidden = _GATE_ORDER[cell], c.shape[1]
    scale = np.repeat(np.array([1.0 if gate == "g" else 0.5 for gate in names], np.float32), hidden)[None]
    shift = np.repeat(np.array([0.5 if gate == "f" else 0.0 for gate in names], np.float32), hidden)[None]
    gates = jnp.tanh(z * scale + shift) * scale + (1.0 - scale)
    if cell == "cifg":
        f, g, o = jnp.split(gates, 3, -1)
        c = f * c + (1.0 - f) * g
    else:
        i, f, g, o = jnp.split(gates, 4, -1)
        c = f * c + i * g
    return o * jnp.tanh(c), c


def hidden_states(
    params: Params, inputs: Int[Array, "time rows"], *, cell: str
) -> Float[Array, "time rows hidden"]:
    """The LSTM's outputs from a zero state, time first."""
    hidden = params["recurrent_kernel"].shape[0]
    z = params["embedding"][inputs] @ params["input_kernel"] + params["bias"][None, None]

    def step(carry, zt):
        h, c = step_cell(cell, zt + carry[0] @ params["recurrent_kernel"], carry[1])
        return (h, c), h

    zeros = jnp.zeros((inputs.shape[1], hidden), z.dtype)
    return lax.scan(step, (zeros, zeros), z)[1]


def output_logits(params: Params, hidden: Float[Array, "... hidden"]) -> Float[Array, "... tokens"]:
    """Projection and output layer."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    y = flat @ params["projection"] + params["projection_bias"][None]
    out = y @ output_embedding(params).T + params["output_bias"][None]
    return out.reshape(*hidden.shape[:-1], -1)


def logits(params: Params, inputs: Int[Array, "time rows"], *, cell: str) -> Float[Array, "time rows tokens"]:
    """Logits of the token that follows each input; time first."""
    return output_logits(params, hidden_states(params, inputs, cell=cell))


def loss(
    params: Params, inputs: Int[Array, "time rows"], targets: Int[Array, "time rows"], *, cell: str
) -> Float[Array, ""]:
    """Cross entropy in nats, averaged over the batch's targets that are not padding; 0 if there is none."""
    scores = logits(params, inputs, cell=cell)
    # Faster than log_softmax, which writes every log probability.
    nll = jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    real = targets != PAD
    return jnp.sum(jnp.where(real, nll, 0.0)) / jnp.maximum(jnp.sum(real), 1)
