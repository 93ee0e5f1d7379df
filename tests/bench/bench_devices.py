"""One round with its clients spread over the cores of a CPU, beside the same round on one of them.

`python -m tests.bench devices`. The small workload of `bench_round` without privacy, packed and run one client at a
time on each device; rounds of both alternate. Wall time says something only on an idle machine; the sum of CPU
seconds and the balance of the parts hold on any.
"""

import os
import statistics
import subprocess
import sys
import time

NUM_ROUNDS = 7  # the first compiles


def compare(num_devices: int) -> None:
    """Runs both and prints a table; in a process whose CPU has `num_devices` devices."""
    import jax
    import jax.numpy as jnp

    from jaxpriv import sharding
    from tests.bench import setup, workload
    from tests.bench.timing import table
    from trainers.keyboard import batches
    from trainers.keyboard import round as rounds

    w = workload.WORKLOADS["small"]
    made = setup.make(w, private=False)
    mesh = sharding.make_mesh(jax.devices()[:num_devices])
    alone = rounds.make_round(made.config, made.sizes, made.server, None)
    spread = rounds.make_round(made.config, made.sizes, made.server, None, mesh)
    start = lambda: rounds.init(made.config, jax.tree.map(jnp.copy, made.params), made.server, None, None)
    one, many = start(), sharding.replicate(start(), mesh)
    found: dict[str, list[tuple[float, float]]] = {"one device": [], f"{num_devices} devices": []}
    balance = []
    for chosen in workload.schedule(w, NUM_ROUNDS):
        examples = [made.clients[i] for i in chosen]
        for name, times in found.items():
            wall, cpu = time.perf_counter(), time.process_time()
            if name == "one device":
                one, _ = alone(one, made.pack(chosen))
                jax.block_until_ready(one)
            else:
                parts = batches.pack_parts(chosen, examples, num_parts=num_devices, **made.packing)
                many, _ = spread(many, sharding.place_parts(parts, mesh))
                jax.block_until_ready(many)
                work = [part.cohort.data.count.sum() for part in parts]
                balance.append(max(work) * num_devices / sum(work))
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
    far = max(
        float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (one.params, many.params)))
    )
    rows = []
    for name, times in found.items():
        walls, cpus = zip(*times[1:])
        rows.append(
            [name, f"{statistics.median(cpus):.3f}", f"{statistics.median(walls):.3f}", f"{min(walls):.3f}"]
        )
    table(["one round", "CPU s", "wall s", "wall s, fastest"], rows)
    print(
        f"longest part over the mean: {max(balance):.3f}; largest difference of a parameter at the end: {far:.1e}"
    )


def main():
    count = min(2, os.cpu_count() or 1)
    flags = f"--xla_force_host_platform_device_count={count} --xla_cpu_multi_thread_eigen=false"
    code = f"from tests.bench import bench_devices; bench_devices.compare({count})"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=os.environ | {"XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"},
    )
