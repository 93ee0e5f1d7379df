"""Sizes and settings of a translation run, as frozen dataclasses; the presets stand in one table at the
end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from trainers.common.errors import InputError
from trainers.translation import dealing

MAX_K, MAX_BEAMS, MAX_WINDOW = 1024, 64, 64
"""Neighbours, hypotheses, an attack's pieces at most: more cost memory by the gigabyte and improve nothing."""
MOST_PENALTY = 5.0
_MOST = {
    "k": MAX_K,
    "beams": MAX_BEAMS,
    "vocabulary_size": 1_000_000,
    "dim": 4096,
    "encoder_layers": 64,
    "decoder_layers": 64,
    "batch_tokens": 262_144,
    "max_length": 8192,
}

Required = Annotated[str, tyro.conf.arg(help_behavior_hint="(required)")]
RequiredMany = Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(required)")]


def check_length_penalty(value: float) -> None:
    """Refuses an exponent under which scores leave float32, or every hypothesis is worse than none."""
    if not abs(value) <= MOST_PENALTY:
        raise InputError(f"--length-penalty must be from {-MOST_PENALTY:g} to {MOST_PENALTY:g}, got {value}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the Transformer (pre-norm encoder-decoder, one embedding matrix for both sides and the
    softmax).
    """

    vocabulary_size: int
    """Pieces of the joint SentencePiece vocabulary."""
    dim: int = 192
    """Width of the residual stream, and of a datastore key."""
    num_heads: int = 4
    """Attention heads; must divide `dim`."""
    ffn_dim: int = 768
    """Hidden width of the feed-forward blocks."""
    encoder_layers: int = 3
    decoder_layers: int = 2
    dropout: float = 0.1
    """Rate on the embeddings and on each block's output, in training only."""
    key: Literal["output", "ffn_input"] = "output"
    """What a datastore key is: the last decoder layer's (normed) output, or the input of its feed-forward
    block.
    """

    def __post_init__(self):
        sizes = ("vocabulary_size", "dim", "num_heads", "ffn_dim", "encoder_layers", "decoder_layers")
        for name in sizes:
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        if self.dim % self.num_heads:
            raise ValueError(f"num_heads must divide dim, got {self.num_heads=} and {self.dim=}")
        if self.dim % 2:
            raise ValueError(f"dim must be even (sines and cosines), got {self.dim=}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout=}")
        if self.key not in ("output", "ffn_input"):
            raise ValueError(f"key must be 'output' or 'ffn_input', got {self.key=}")


METHODS = (
    "p_nmt",
    "c_nmt",
    "fedavg_1",
    "fedavg_inf",
    "fedavg_1_server",
    "fedavg_inf_server",
    "ft_ensemble",
    "ft",
    "ak_mt",
    "fednn",
    "fednn_fixed",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Train a public translation model, build private memories and compare FedNN with the other ways to
    share.
    """

    server: tuple[str, ...]
    """The server's public pairs: FILE or FILE:sub=a,b (several join); `catalogs` for the embedded
    messages.
    """
    client: tuple[str, ...]
    """Private pairs, NAME=FILE or NAME=FILE:sub=a,b, one word a client; none with `--server catalogs`."""
    held_out: tuple[str, ...]
    """Public pairs that the model is not trained on, FILE or FILE:sub=a,b: memory and questions for the
    Meta-k network. Without it a tenth of the server's pairs."""
    source_field: str
    """Field (or language) of the source side."""
    target_field: str
    """Field (or language) of the target side."""
    run_dir: str
    """Folder for everything the run writes; it must not exist, unless --resume is given."""
    public_model: str | None
    """Folder of a finished public model to start from, instead of training one."""

    vocabulary_size: int
    """Pieces of the joint vocabulary."""
    dim: int
    """Width of the model and of the keys."""
    encoder_layers: int
    """Encoder layers."""
    decoder_layers: int
    """Decoder layers."""
    key: Literal["output", "ffn_input"]
    """Datastore key: last decoder layer's output, or the input of its feed-forward block."""
    updates: int
    """Updates of the public model."""
    batch_tokens: int
    """Padded target pieces an update."""
    max_length: int
    """Longest row in pieces that models are trained on: single pairs, or joined ones."""
    learning_rate: float
    """Peak rate of the public model's training."""

    settings: tuple[str, ...]
    """How pairs are dealt: non_iid, iid, non_iid:N, iid:N, alpha:X; each is run."""
    methods: tuple[str, ...]
    """What is compared, of: p_nmt c_nmt fedavg_1 fedavg_inf fedavg_1_server fedavg_inf_server ft_ensemble ft
    ak_mt fednn fednn_fixed (one fixed weight, tuned on everybody's validation pairs)."""
    trials: int
    """Seeds a setting; dealing and fine-tuning differ, the public model does not."""
    epochs: int
    """Local epochs of fine-tuning, rounds of FedAvg_1, and epochs of C-NMT."""
    local_learning_rate: float
    """Rate of fine-tuning."""
    client_pairs: int
    """Train pairs a domain that clients hold at most, a fixed sample; 0 takes all."""
    server_sample: int
    """Server pairs that C-NMT and the FedAvg variants with server data see an epoch."""

    key_encryption: Literal["pq", "pca", "none"]
    """What happens to keys before they leave a client: product quantization, principal components,
    nothing.
    """
    subspaces: int
    """Bytes of a PQ code (must divide `dim`); components with pca."""
    k: int
    """Neighbours a query."""
    gate: float
    """The memory is asked only where the model's best piece has a probability below this; 1 asks always."""
    search: Literal["exact", "inverted", "shadow", "faiss"]
    """How a memory is searched: every record; the blocks of records nearest to the query; every record in few
    components, the nearest ones exactly; or the nearest cells of FAISS's inverted file (needs faiss-cpu)."""
    shadow: int
    """Components of the first pass with --search shadow."""
    test_sentences: int
    """Test sentences a domain; 0 takes all."""
    beams: int
    """Beam width; 1 is greedy."""
    length_penalty: float
    """Exponent of the length in a hypothesis' score (beam search), from -5 to 5."""

    seed: int
    """Of everything public: initialisation, order, dealing."""
    skip_bad: bool = False
    """Leave bad records out and count them, rather than stop at the first."""
    resume: bool = False
    """Continue the run in --run-dir."""
    json: bool = False
    """Print one JSON object as the last line; everything else goes to standard error."""

    def __post_init__(self):
        unknown = [m for m in self.methods if m not in METHODS]
        if unknown:
            raise InputError(f"unknown method {unknown[0]!r}; choose of {' '.join(METHODS)}")
        for setting in self.settings:
            dealing.parse(setting)
        for name, given in (("settings", self.settings), ("methods", self.methods)):
            if not given or len(set(given)) < len(given):
                raise InputError(f"--{name} must be at least one, each once, got {' '.join(given) or 'none'}")
        least = {
            "shadow": self.search == "shadow",
            "client_pairs": 0,
            "test_sentences": 0,
            "server_sample": 0,
        }
        least |= dict.fromkeys(
            ("vocabulary_size", "updates", "batch_tokens", "max_length", "trials", "epochs"), 1
        )
        least |= dict.fromkeys(("subspaces", "k", "beams", "encoder_layers", "decoder_layers"), 1)
        for name, value in least.items():
            if getattr(self, name) < value:
                raise InputError(
                    f"--{name.replace('_', '-')} must be at least {+value}, got {getattr(self, name)}"
                )
        for name, value in _MOST.items():
            if getattr(self, name) > value:
                raise InputError(
                    f"--{name.replace('_', '-')} must be at most {value}, got {getattr(self, name)}"
                )
        for name in ("learning_rate", "local_learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}")
        check_length_penalty(self.length_penalty)
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed must be in [0, 2^32), got {self.seed}: jax reads 32 bits of it")
        if not 0 < self.gate <= 1:
            raise InputError(f"--gate must be in (0, 1], got {self.gate}")
        if self.public_model is not None:  # its width is what counts: `checks.before_writing`
            return
        if self.dim < 4 or self.dim % 4:
            raise InputError(f"--dim must be a multiple of 4 (the attention heads), got {self.dim}")
        if self.key_encryption == "pq" and self.dim % self.subspaces:
            raise InputError(f"--subspaces must divide --dim {self.dim}, got {self.subspaces}")


_DEMO = Config(
    server=("catalogs",),
    client=(),
    held_out=(),
    source_field="en",
    target_field="de",
    run_dir="runs/translation",
    public_model=None,
    vocabulary_size=4000,
    dim=128,
    encoder_layers=2,
    decoder_layers=2,
    key="output",
    updates=600,
    batch_tokens=1024,
    max_length=128,
    learning_rate=1e-2,
    settings=("non_iid",),
    methods=METHODS[:-1],
    trials=1,
    epochs=2,
    local_learning_rate=3e-3,
    client_pairs=0,
    server_sample=3000,
    key_encryption="pq",
    subspaces=64,
    k=8,
    gate=1.0,
    search="inverted",
    shadow=32,
    test_sentences=100,
    beams=1,
    length_penalty=1.0,
    seed=0,
)

# One table: what a preset changes of `demo`.
PRESETS = {
    "demo": _DEMO,
    "tiny": replace(
        _DEMO,
        vocabulary_size=500,
        dim=16,
        encoder_layers=1,
        decoder_layers=1,
        updates=30,
        batch_tokens=512,
        max_length=24,
        epochs=1,
        server_sample=100,
        subspaces=4,
        k=4,
        search="exact",
        test_sentences=8,
    ),
    "paper": replace(
        _DEMO,
        vocabulary_size=6000,
        dim=192,
        encoder_layers=3,
        updates=3300,
        batch_tokens=2048,
        trials=3,
        epochs=3,
        server_sample=10_000,
        test_sentences=0,
    ),
}
