"""Time of the samplers beside jax.random in the same run: CPU time of the process, median of several."""

import jax
import jax.numpy as jnp

from jaxpriv import sampling
from tests.bench.timing import cpu_seconds, table

SIZE = 5_000_000


def main():
    draws = {
        "jax.random.normal (peer)": lambda key: jax.random.normal(key, (SIZE,)),
        "jax.random.bits (peer)": lambda key: jax.random.bits(key, (SIZE,)),
        "sampling.normal": lambda key: sampling.normal(key, (SIZE,)),
        "jax.random.laplace (peer)": lambda key: jax.random.laplace(key, (SIZE,)),
        "sampling.laplace": lambda key: sampling.laplace(key, (SIZE,)),
        "sampling.exponential": lambda key: sampling.exponential(key, (SIZE,)),
        "sampling.discrete_gaussian, stddev 100": lambda key: sampling.discrete_gaussian(
            key, (SIZE,), stddev=100.0
        ),
        "sampling.direction, dim 50": lambda key: sampling.direction(key, (SIZE // 50, 50)),
    }
    rows, peer = [], None
    for name, draw in draws.items():
        seconds, compile_seconds = cpu_seconds(jax.jit(draw), jax.random.key(0))
        peer = peer or seconds
        rows.append([name, f"{1e3 * seconds:.1f}", f"{seconds / peer:.2f}", f"{compile_seconds:.2f}"])
    counts = jnp.ones((1000, 9), jnp.int32)
    weights = jnp.asarray(sampling.level_weights(0.5, 9))
    choose = jax.jit(jax.vmap(sampling.categorical_by_level, (0, 0, None)))
    seconds, compile_seconds = cpu_seconds(choose, jax.random.split(jax.random.key(0), 1000), counts, weights)
    rows.append(
        ["categorical_by_level, 1,000 x 9 levels", f"{1e3 * seconds:.1f}", "", f"{compile_seconds:.2f}"]
    )
    table([f"{SIZE:,} values", "CPU ms", "x jax.random.normal", "compile s"], rows)
