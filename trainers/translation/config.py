"""Sizes and settings of a translation run, as frozen dataclasses; the presets stand in one table at the
end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
        if self.dim % self.num_heads:
            raise ValueError(f"num_heads must divide dim, got {self.num_heads=} and {self.dim=}")
        if self.dim % 2:
            raise ValueError(f"dim must be even (sines and cosines), got {self.dim=}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout=}")
        if self.key not in ("output", "ffn_input"):
            raise ValueError(f"key must be 'output' or 'ffn_input', got {self.key=}")
