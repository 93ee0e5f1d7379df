"""CPU seconds of a federated round on one core, beside pfl (PyTorch) in the same run where it is installed.

`python -m tests.bench round`. Pin it to one idle core: `taskset -c 1`, with OMP_NUM_THREADS=1 and
XLA_FLAGS=--xla_cpu_multi_thread_eigen=false.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.bench import workload
from trainers.keyboard import batches, model
from trainers.keyboard import round as rounds


def run(w: workload.Workload, variant: str, num_rounds: int, chunk_size: int = 1):
    """`(CPU seconds of each round, loss after them)`; variant `none` (weighted mean) or `clip`."""
    clients = workload.make_clients(w)
    private = variant != "none"
    config = rounds.RoundConfig(
        report_goal=w.clients_per_round,
        client_learning_rate=w.client_lr,
        local_epochs=1,
        clip_norm=1.0 if private else None,
        noise_multiplier=0.0,
        adaptive=None,
        weigh_by_examples=not private,
    )
    sizes = model.ModelConfig(
        num_tokens=w.vocab,
        embedding_size=w.embed,
        hidden_size=w.hidden,
        cell="lstm",
        shared_embeddings=True,
    )
    server = optax.sgd(w.server_lr, momentum=w.server_momentum)
    state = rounds.init(config, jax.tree.map(jnp.asarray, workload.init_params(w)), server, None, None)
    step = rounds.make_round(config, sizes, server, None)
    schedule = workload.schedule(w, num_rounds)
    seconds = []
    for chosen in schedule:
        start = time.process_time()
        batch = batches.pack_round(
            chosen,
            [clients[i] for i in chosen],
            batch_size=w.batch_size,
            max_examples=w.max_examples,
            chunk_size=chunk_size,
            num_clients=w.clients_per_round,
        )
        state, _ = step(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.process_time() - start)
    tokens = np.concatenate([clients[i] for i in schedule[0]])[:256].T
    loss = jax.jit(model.loss, static_argnames="cell")(state.params, tokens[:-1], tokens[1:], cell="lstm")
    return seconds, float(loss)


def main():
    seconds, loss = run(workload.WORKLOADS["small"], "none", 6)
    print(f"small: {statistics.median(seconds[1:]):.3f} CPU s a round, loss {loss:.4f}")
