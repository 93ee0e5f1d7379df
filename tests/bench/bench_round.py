"""CPU seconds of a federated round, without and with privacy, beside pfl (PyTorch) in the same run.

`python -m tests.bench round`. For numbers to quote use one core, the same for both: `taskset -c 1` with
OMP_NUM_THREADS=1 and XLA_FLAGS=--xla_cpu_multi_thread_eigen=false. The peer runs where PFL_PYTHON names a Python that
has pfl 0.6 and torch and the reference scripts lie beside the checkout (../shared/bench/peers); rounds of both
alternate, since the machine may not be idle. A time counts only if the loss is right.
"""

import json
import os
import pathlib
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import noise
from tests.bench import setup, workload
from tests.bench.timing import cpu_seconds, table
from trainers.keyboard import model
from trainers.keyboard import round as rounds

NUM_ROUNDS = 6  # the first compiles
REPEATS = 2
PEERS = pathlib.Path(__file__).resolve().parents[3] / "shared" / "bench" / "peers"


def run(
    w: workload.Workload, variant: str, num_rounds: int, chunk_size: int = 1
) -> tuple[list[float], float]:
    """`(CPU seconds of each round, loss after them)`.

    Variants: `none`, and with privacy (`setup.make`) `independent` and `tree_reduced`.
    """
    private, mechanism = variant != "none", None
    if private:
        mechanism = noise.independent() if variant == "independent" else noise.tree_reduced(num_rounds=64)
    made = setup.make(w, private=private, chunk_size=chunk_size)
    state = rounds.init(
        made.config, made.params, made.server, mechanism, jax.random.key(0) if private else None
    )
    step = rounds.make_round(made.config, made.sizes, made.server, mechanism)
    schedule = workload.schedule(w, num_rounds)
    seconds = []
    for chosen in schedule:
        start = time.process_time()
        batch = made.pack(chosen)
        state, _ = step(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.process_time() - start)
    tokens = np.concatenate([made.clients[i] for i in schedule[0]])[:256].T
    loss = jax.jit(model.loss, static_argnames="cell")(state.params, tokens[:-1], tokens[1:], cell="lstm")
    return seconds, float(loss)


def peer(w: workload.Workload, variant: str, num_rounds: int) -> tuple[list[float], float] | None:
    """The same from pfl's script, one process; its record holds the median and the first round."""
    python = os.environ.get("PFL_PYTHON")
    if not python or not (PEERS / "pfl_round.py").exists():
        return None
    command = [python, str(PEERS / "pfl_round.py"), w.name, variant, str(num_rounds - 1)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PEERS)
    record = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return [record["first_cpu_s"], record["round_cpu_s_median"]], record["eval_loss"]


def matmul_peak() -> float:
    """FLOP a second of a 1024 x 1024 x 1024 float32 product, by CPU time."""
    x = jnp.ones((1024, 1024))
    seconds, _ = cpu_seconds(jax.jit(lambda x: x @ x), x, repeats=15)
    return 2 * 1024**3 / seconds


def main():
    w = workload.WORKLOADS["small"]
    clients = workload.make_clients(w)
    counts = [
        sum(-(-len(clients[i]) // w.batch_size) for i in chosen)
        for chosen in workload.schedule(w, NUM_ROUNDS)[1:]
    ]
    flop = workload.dense_flop(w, statistics.median(counts))
    runs = {
        "jaxpriv, no privacy": lambda: run(w, "none", NUM_ROUNDS),
        "pfl, no privacy (peer)": lambda: peer(w, "none", NUM_ROUNDS),
        "jaxpriv, clip + quantile + independent": lambda: run(w, "independent", NUM_ROUNDS),
        "jaxpriv, clip + quantile + tree_reduced": lambda: run(w, "tree_reduced", NUM_ROUNDS),
        "pfl, adaptive clip + Gaussian (peer)": lambda: peer(w, "adaptive", NUM_ROUNDS),
    }
    found: dict[str, list] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, call in runs.items():
            result = call()
            if result is not None:
                found[name].append(result)
    peak = matmul_peak()
    base = {
        private: statistics.median(s for seconds, _ in found[name] for s in seconds[1:])
        if found[name]
        else None
        for private, name in [
            (False, "pfl, no privacy (peer)"),
            (True, "pfl, adaptive clip + Gaussian (peer)"),
        ]
    }
    rows = []
    for name, results in found.items():
        if not results:
            continue
        median = statistics.median(s for seconds, _ in results for s in seconds[1:])
        against = base["no privacy" not in name]
        rows.append(
            [
                name,
                f"{median:.3f}",
                f"{median / against:.2f}" if against else "no peer",
                f"{flop / median / 1e9:.0f}",
                f"{100 * flop / median / peak:.0f} %",
                f"{results[0][0][0] - median:.1f}",
                f"{results[0][1]:.4f}",
            ]
        )
    want = workload.EXPECTED_LOSS["small"][NUM_ROUNDS]
    print(
        f"{w.name}: {w.clients_per_round} clients, {statistics.median(counts):.0f} batches; one core's matmul peak"
    )
    print(
        f"{peak / 1e9:.0f} GFLOP/s. GFLOP/s count every padded position ({flop / 1e9:.0f} GFLOP a round), which"
    )
    print(f"jaxpriv does not compute. Without privacy the loss must be {want}.")
    table(["one round", "CPU s", "x pfl", "GFLOP/s", "of peak", "compile s", "loss"], rows)
