"""Cost of one round of each noise mechanism: 5 M parameters, jitted, state donated, CPU time, median.

In units of one draw of our own sampler, measured before and after each mechanism; jax_privacy's mechanisms
(JAX's own sampler) beside them. Trees are averaged over 64 successive rounds, whose costs differ. A draw is
bound by arithmetic and a banded round reads the noise of the last rounds while it computes, so that both
together cost hardly more than the larger: the last row is that reading by itself, and what the banded state
holds is checked to have the variance that its strategy asks for.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import noise, sampling
from tests.bench.timing import cpu_seconds, table

SIZE = 5_000_000
ROUNDS = 64


class Blt3:
    """Three buffers of the size that a run of 2,000 rounds asks for; the cost does not depend on them."""

    theta = np.array([0.98, 0.7, 0.1])
    omega = np.array([0.05, 0.2, 0.25])


def cpu_seconds_a_round(mechanism, like):
    state = mechanism.init(jax.random.key(0), like)
    step = jax.jit(lambda state: mechanism.step(state, stddev=1.0), donate_argnums=0)
    state, out = step(state)  # compiles
    jax.block_until_ready((state, out))
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        state, out = step(state)
        jax.block_until_ready((state, out))
        times.append(time.process_time() - start)
    return times, state


def peer_seconds(privatizer, like):
    state = privatizer.init(like)
    update = jax.jit(lambda grads, state: privatizer.update(grads, state), donate_argnums=1)
    _, state = update(like, state)
    times = []
    for _ in range(15):
        start = time.process_time()
        out, state = update(like, state)
        jax.block_until_ready((state, out))
        times.append(time.process_time() - start)
    return float(np.median(times))


def main():
    like = jnp.zeros(SIZE)
    own = jax.jit(lambda key: sampling.normal(key, (SIZE,)))
    draw_seconds = lambda: cpu_seconds(own, jax.random.key(0))[0]
    jax_draw, _ = cpu_seconds(jax.jit(lambda key: jax.random.normal(key, (SIZE,))), jax.random.key(0))
    before = draw_seconds()
    rows = [
        ["one draw, sampling.normal", f"{1e3 * before:.1f}", "1.00", f"{before / jax_draw:.2f}"],
        ["one draw, jax.random.normal (peer)", f"{1e3 * jax_draw:.1f}", f"{jax_draw / before:.2f}", "1.00"],
    ]

    def row(name, seconds):
        nonlocal before
        after = draw_seconds()
        unit, before = (before + after) / 2, after
        rows.append([name, f"{1e3 * seconds:.1f}", f"{seconds / unit:.2f}", f"{seconds / jax_draw:.2f}"])

    bands = 0.8 ** np.arange(16)
    mechanisms = {
        "independent": (noise.independent(), np.median),
        "tree": (noise.tree(), np.mean),
        "tree_reduced": (noise.tree_reduced(2048), np.mean),
        "blt, 3 buffers": (noise.blt(Blt3), np.median),
        "banded, 16 bands": (noise.banded(bands), np.median),
    }
    for name, (mechanism, average) in mechanisms.items():
        times, state = cpu_seconds_a_round(mechanism, like)
        row(name, average(times))
        if name.startswith("banded"):
            _check_banded(mechanism, state)
        del state
    for name, privatizer in peers().items():
        row(f"jax_privacy {name} (peer)", peer_seconds(privatizer, like))
    held = jnp.ones((len(bands) - 1, SIZE))
    add = jax.jit(lambda held, weights: sum(w * h for w, h in zip(weights, held, strict=True)))
    row(f"(reading {len(bands) - 1} copies)", cpu_seconds(add, held, jnp.ones(len(bands) - 1))[0])
    table([f"{SIZE:,} parameters", "CPU ms a round", "x own draw", "x jax.random.normal"], rows)


def _check_banded(mechanism, state):
    """What the slots hold has the variance of the last rows of `N`: no work was left out."""
    last = np.linalg.norm(mechanism.matrix(ROUNDS + 1)[-1])
    found = float(jnp.std(state.buffers[0][ROUNDS % state.buffers[0].shape[0]]))
    if abs(found / last - 1) > 0.01:
        raise ValueError(f"banded noise has standard deviation {found:.4f}, expected {last:.4f}")


def peers():
    from jax_privacy import matrix_factorization, noise_addition

    blt = matrix_factorization.buffered_toeplitz.BufferedToeplitz(
        buf_decay=jnp.asarray(Blt3.theta), output_scale=jnp.asarray(Blt3.omega)
    )
    return {
        "blt, 3 buffers": noise_addition.matrix_factorization_privatizer(
            blt.inverse_as_streaming_matrix(), stddev=1.0, prng_key=jax.random.key(0)
        ),
        "banded, 16 bands": noise_addition.matrix_factorization_privatizer(
            matrix_factorization.toeplitz.inverse_as_streaming_matrix(jnp.asarray(0.8 ** np.arange(16))),
            stddev=1.0,
            prng_key=jax.random.key(0),
        ),
    }
