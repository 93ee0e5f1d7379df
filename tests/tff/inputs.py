"""What TFF and jaxpriv are both given. numpy only, exact in float32, the same in every environment."""

import numpy as np

SHAPES = {"a": (3,), "b": (2, 4)}
CLIENTS = 5

# Sums and averages without noise.
CLIP_NORM, SUM_ROUNDS = 1.5, 6
# Adaptive clipping without noise: restarts after rounds 4, 11 and 18.
ADAPTIVE = {"initial_l2_norm_clip": 0.5, "target_unclipped_quantile": 0.6, "clip_learning_rate": 0.3}
WARMUP, PERIOD, ADAPTIVE_ROUNDS = 4, 7, 20
# The quantile alone.
QUANTILE = {"initial_estimate": 10.0, "target_quantile": 0.7, "learning_rate": 0.2}
QUANTILE_ROUNDS, VALUES = 40, 16
# Noise: coordinates are repetitions.
NOISE_CLIP, NOISE_ROUNDS, COORDINATES = 0.5, 18, 100_000
# Adaptive with noise: restarts after rounds 5 and 13. Updates are zero, so that every bit says "within".
NOISE_WARMUP, NOISE_PERIOD, NOISE_MULTIPLIER, COUNT_STDDEV, EXPECTED_CLIENTS = 5, 8, 1.25, 4.0, 20.0


def restarts(warmup: int, period: int, rounds: int) -> tuple[int, ...]:
    """Rounds after which TFF's periodic indicator restarts, as jaxpriv writes them."""
    return tuple(range(warmup, rounds, period))


def updates(round: int) -> list[dict[str, np.ndarray]]:
    """One update a client: multiples of 1/256 up to 1.2 and, for client 0 of every third round, zero."""
    out = []
    for client in range(CLIENTS):
        update, at = {}, 0
        for name, shape in SHAPES.items():
            i = at + np.arange(np.prod(shape))
            whole = (i * 7919 + client * 104_729 + round * 1_299_709 + i * i * 31) % 613 - 306
            scale = 0.0 if client == 0 and round % 3 == 0 else (client + 1) / CLIENTS
            update[name] = (np.round(whole * scale) / 256).astype(np.float32).reshape(shape)
            at += len(i)
        out.append(update)
    return out


def values(round: int) -> np.ndarray:
    """Positive numbers, multiples of 1/16; some equal to the first estimate."""
    i = np.arange(VALUES)
    return (((i * 7919 + round * 104_729) % 251 + 1) / 16 + 10.0 * (i == 0)).astype(np.float32)


def client_data() -> list[tuple[str, str, list[dict]]]:
    """`(split, client, examples)`: text beyond ASCII, negative and large numbers, several splits, one empty client."""
    text = ["how are you", "", "grüße aus köln", "日本語 テキスト", "emoji 🙂", "a\tb\nc", "x" * 3000]
    clients = []
    for c in range(12):
        examples = [
            {
                "tokens": text[(c + e) % len(text)],
                "score": (-1) ** e * 10 ** ((c + 3 * e) % 17),
                "weight": [float(c), e / 4, -0.5],
            }
            for e in range(c % 5)
        ]
        clients.append((("train", "test")[c % 4 == 3], f"client {c}", examples))
    return clients
