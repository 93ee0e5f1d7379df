"""CPU seconds and bytes of a federated round with secure aggregation's integers, against plain float32 sums.

Two sizes of 100 clients; the same clients in every row. `rounding` is what the integers add to the sum of the
first round: root mean square a coordinate, over the standard deviation of one Gaussian of the noise
(z = 1). The masked-sum protocol beneath is `python -m tests.bench secagg`.
"""

import statistics
import time

import jax
import numpy as np
import optax

from jaxpriv import noise
from tests.bench import workload
from tests.bench.timing import table
from trainers.keyboard import batches, model, secure_sum
from trainers.keyboard import round as rounds

CLIENTS, NUM_ROUNDS = 100, 4  # the first round compiles
SIZES = {
    "hidden 64, 2,000 words": (2000, 64, 64),
    "irc: hidden 256, 4,000 words": (4000, 96, 256),
}
VARIANTS = {"plain": None, "12 bits": (12, False), "16 bits": (16, False), "20 bits": (20, False)}
VARIANTS |= {"20 bits, clients' noise": (20, True)}


def run(
    name: str, how: tuple[int, bool] | None
) -> tuple[list[float], np.ndarray, secure_sum.SecureSum | None]:
    """`(CPU seconds of each round, parameters after the first, encoding)`."""
    words, embed, hidden = SIZES[name]
    w = workload.Workload(
        name=name,
        vocab=words,
        embed=embed,
        hidden=hidden,
        clients_per_round=CLIENTS,
        min_examples=4,
        batch_size=4,
    )
    sizes = model.ModelConfig(num_tokens=words, embedding_size=embed, hidden_size=hidden)
    secure = None
    if how is not None:
        secure = secure_sum.choose(
            dimension=model.num_params(sizes), bits=how[0], report_goal=CLIENTS, noise_multiplier=1.0,
            distributed=how[1], seed=0,
        )  # fmt: skip
    config = rounds.RoundConfig(
        report_goal=CLIENTS, client_learning_rate=0.5, local_epochs=1, clip_norm=1.0, noise_multiplier=1.0,
        adaptive=None, secure=secure,
    )  # fmt: skip
    mechanism, server = noise.independent(), optax.sgd(1.0)
    state = rounds.init(config, model.init_params(sizes, seed=0), server, mechanism, jax.random.key(0))
    step = rounds.make_round(config, sizes, server, mechanism)
    clients, seconds, first = workload.make_clients(w), [], np.zeros(0)
    for t, chosen in enumerate(workload.schedule(w, NUM_ROUNDS)):
        start = time.process_time()
        batch = batches.pack_round(
            chosen,
            [clients[i] for i in chosen],
            batch_size=4,
            max_examples=64,
            chunk_size=1,
            num_clients=CLIENTS,
        )
        state, _ = step(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.process_time() - start)
        if t == 0:
            first = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(state.params)])
    return seconds, first, secure


def main():
    for name in SIZES:
        rows, base, plain = [], 0.0, np.zeros(0)
        for variant, how in VARIANTS.items():
            seconds, first, secure = run(name, how)
            median = statistics.median(seconds[1:])
            if secure is None:
                base, plain = median, first
            shared = secure is None or secure.distributed
            rounding = "" if shared else f"{np.std(first - plain) * CLIENTS:.1e}"
            inflation = 1.0 if secure is None else secure.encoding.inflated_norm
            up = 4 * first.size if secure is None else secure.bytes_up
            rows.append(
                [
                    variant, f"{median:.2f}", f"{median / base:.2f}", f"{inflation:.6f}", rounding, f"{up / 1e6:.2f}",
                    f"{4 * first.size / 1e6:.2f}",
                ]
            )  # fmt: skip
        print(f"{name}, {plain.size:,} parameters, {CLIENTS} clients")
        table(["one round", "CPU s", "x plain", "inflation", "rounding / noise", "MB up", "MB down"], rows)
