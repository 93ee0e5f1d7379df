"""One federated round of a keyboard-sized language model as a workload: numpy only, seeded, for any framework.

Clients hold different numbers of sentences (log-uniform) of different lengths, in a Zipf-like vocabulary shifted by
client; one local epoch of SGD on batches of 16; the server averages the updates by examples. Same seed, same bytes.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes and learning rates; token 0 is padding, 1 begins a sentence, words start at 3."""

    name: str
    vocab: int
    embed: int
    hidden: int
    population: int = 200
    clients_per_round: int = 50
    seq_len: int = 20
    min_examples: int = 16
    max_examples: int = 64
    batch_size: int = 16
    client_lr: float = 0.5
    server_lr: float = 1.0
    server_momentum: float = 0.9
    seed: int = 0


WORKLOADS = {
    "tiny": Workload(name="tiny", vocab=1000, embed=32, hidden=64, clients_per_round=20, population=100),
    "small": Workload(name="small", vocab=2000, embed=96, hidden=256),
    "gboard": Workload(
        name="gboard", vocab=10_000, embed=96, hidden=670, clients_per_round=20, population=60
    ),
}
# {rounds: loss on the first 256 sentences of round 0's clients after them}, the same in four frameworks.
EXPECTED_LOSS = {"tiny": {5: 6.6375}, "small": {4: 7.2764, 6: 6.6534}}


def make_clients(w: Workload) -> list[np.ndarray]:
    """For each client int32 tokens [sentences, seq_len + 1]."""
    rng = np.random.default_rng(w.seed)
    low, high = np.log(w.min_examples), np.log(w.max_examples + 1)
    zipf = 1.0 / np.arange(1, w.vocab - 2)
    zipf /= zipf.sum()
    clients = []
    for _ in range(w.population):
        n = int(np.exp(rng.uniform(low, high)))
        ids = 3 + np.roll(np.arange(w.vocab - 3), int(rng.integers(0, 50)))
        words = ids[rng.choice(w.vocab - 3, size=(n, w.seq_len), p=zipf)]
        lengths = rng.integers(4, w.seq_len + 1, size=n)
        words = np.where(np.arange(w.seq_len)[None] < lengths[:, None], words, 0)
        clients.append(np.concatenate([np.full((n, 1), 1), words], 1).astype(np.int32))
    return clients


def schedule(w: Workload, num_rounds: int) -> list[list[int]]:
    """Clients of each round, drawn without replacement."""
    rng = np.random.default_rng(w.seed + 1)
    return [
        [int(i) for i in rng.choice(w.population, w.clients_per_round, replace=False)]
        for _ in range(num_rounds)
    ]


def init_params(w: Workload, gates: int = 4) -> dict[str, np.ndarray]:
    """The same start for everyone, under the names of `trainers.keyboard.model`; the embedding is shared."""
    rng = np.random.default_rng(w.seed + 2)

    def kernel(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    return {
        "embedding": (0.1 * rng.standard_normal((w.vocab, w.embed))).astype(np.float32),
        "input_kernel": kernel(w.embed, gates * w.hidden),
        "recurrent_kernel": kernel(w.hidden, gates * w.hidden),
        "bias": np.zeros(gates * w.hidden, np.float32),
        "projection": kernel(w.hidden, w.embed),
        "projection_bias": np.zeros(w.embed, np.float32),
        "output_bias": np.zeros(w.vocab, np.float32),
    }


def dense_flop(w: Workload, batches: float, gates: int = 4) -> float:
    """Floating-point operations of the matrix products of a round, every padded position computed."""
    a_token = gates * w.hidden * (w.embed + w.hidden) + w.hidden * w.embed + w.vocab * w.embed
    return 3 * 2.0 * a_token * w.batch_size * w.seq_len * batches
