"""Peak memory of a round over the size of its cohort: `python -m tests.bench memory`.

The paper's model (embedding 96, 670 units, 10,000 words, separate embeddings: 3.5 million parameters), clipping and
`tree_reduced` noise, clients of one batch of four short sentences, packed and run one at a time as the trainer
does. Each size in a process of its own, so that the peak (`ru_maxrss`) is its own; what a round itself adds is the
difference to the peak before the first.
"""

import json
import resource
import subprocess
import sys
import time

import jax
import numpy as np
import optax

from jaxpriv import noise
from tests.bench.timing import table
from trainers.keyboard import batches, model
from trainers.keyboard import round as rounds
from trainers.keyboard.config import PAPER

SIZES = ((100, 3), (1000, 3), (6500, 1))


def peak() -> float:
    """MiB, of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def clients(count: int, seed: int) -> list[np.ndarray]:
    """For each client four sentences of 3 to 6 words."""
    rng = np.random.default_rng(seed)
    out = np.zeros((count, PAPER.batch_size, PAPER.sequence_length + 1), np.int32)
    out[..., 0] = PAPER.vocabulary_size + 2
    words = 1 + np.minimum(rng.zipf(1.3, (count, PAPER.batch_size, 6)), PAPER.vocabulary_size) - 1
    length = rng.integers(3, 7, (count, PAPER.batch_size, 1))
    out[..., 1:7] = np.where(np.arange(6) < length, words, 0)
    return list(out)


def one(cohort: int, num_rounds: int) -> dict[str, float]:
    """Peak memory (MiB) and CPU seconds of rounds with `cohort` clients."""
    sizes = model.ModelConfig(
        num_tokens=PAPER.vocabulary_size + model.NUM_SPECIAL,
        embedding_size=PAPER.embedding_size,
        hidden_size=PAPER.hidden_size,
    )
    config = rounds.RoundConfig(
        report_goal=cohort,
        client_learning_rate=PAPER.client_learning_rate,
        local_epochs=1,
        clip_norm=PAPER.clip_norm,
        noise_multiplier=PAPER.noise_multiplier,
        adaptive=None,
    )
    mechanism, server = noise.tree_reduced(PAPER.rounds), optax.sgd(1.0, momentum=0.9)
    params = model.init_params(sizes, seed=0)
    state = rounds.init(config, params, server, mechanism, jax.random.key(0))
    num_params = sum(x.size for x in jax.tree.leaves(params))
    step = rounds.make_round(config, sizes, server, mechanism)
    jax.block_until_ready(state)
    before, seconds = peak(), []
    for t in range(num_rounds):
        start = time.process_time()
        batch = batches.pack_round(
            range(cohort),
            clients(cohort, t),
            batch_size=PAPER.batch_size,
            max_examples=PAPER.max_examples,
            chunk_size=1,
            num_clients=cohort,
        )
        state, _ = step(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.process_time() - start)
    return {
        "parameters": num_params,
        "before": before,
        "peak": peak(),
        "store": sum(x.nbytes for x in batch.store) / 2**20,
        "seconds": min(seconds),
    }


def main(sizes=SIZES):
    rows, model_size = [], 0.0
    for cohort, num_rounds in sizes:
        call = f"import json, tests.bench.bench_memory as b; print(json.dumps(b.one({cohort}, {num_rounds})))"
        done = subprocess.run([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        model_size = found["parameters"] * 4 / 2**20
        row = [cohort, num_rounds, *(f"{found[k]:.0f}" for k in ("before", "peak"))]
        rows.append([*row, f"{found['store']:.1f}", f"{found['seconds']:.1f}"])
        print("   ".join(map(str, rows[-1])), flush=True)
    print(f"{model_size:.1f} MiB a model; a tree of 2,000 rounds keeps 11 of them")
    table(["clients", "rounds", "MiB before", "MiB peak", "MiB of batches", "CPU s a round (fastest)"], rows)
