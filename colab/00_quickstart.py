# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A round of DP-FTRL, its noise, its guarantee
#
# Federated learning on devices that cannot be sampled uniformly needs another route to differential privacy than
# DP-SGD's amplification: *correlated* noise, so that the noise of later rounds cancels part of that of earlier ones
# (DP-FTRL). This notebook takes one federated task through it: sum the clipped updates, add tree noise, step, and
# state what that guarantees.

# %%
import importlib.util
import pathlib

found = importlib.util.find_spec("jaxpriv")
if found is None or found.origin is None:  # a folder of that name beside the notebook is no package
    # The project's folder, cloned or uploaded beside this notebook, or around it; the jax that is here stays.
    source = next(p for p in ("jaxpriv", ".", "..") if pathlib.Path(p, "pyproject.toml").exists())
    # %pip install -q ./{source}

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import accounting
from jaxpriv import cohort, keys, noise

FAST = bool(os.environ.get("JAXPRIV_FAST"))  # smaller sizes where nobody looks at the pictures
print("jax", jax.__version__, jax.devices())

# %% [markdown]
# ## A population
# 2,000 devices, each with a few noisy measurements of the same linear model. A client is a plain function from the
# model it is sent to an update; a cohort is many of them, and the only thing that leaves is a sum of clipped updates.

# %%
NUM_DEVICES, DIM, EXAMPLES = 2000, 16, 8
public = keys.root(0)  # schedules and data of the simulation; never the noise
truth = jax.random.normal(keys.stream(public, "truth"), (DIM,))
features = jax.random.normal(keys.stream(public, "features"), (NUM_DEVICES, EXAMPLES, DIM))
targets = features @ truth + 0.1 * jax.random.normal(keys.stream(public, "targets"), (NUM_DEVICES, EXAMPLES))


def client(params, data, key):
    """One epoch of SGD, an example at a time; returns the update and what the operator may log."""
    x, y = data

    def step(w, example):
        return w - 0.02 * jax.grad(lambda w: 0.5 * (example[0] @ w - example[1]) ** 2)(w), None

    local, _ = jax.lax.scan(step, params, (x, y))
    return local - params, {}


# %% [markdown]
# ## A round
# Clip, sum, add this round's noise, divide by the *public* cohort size, let any optax optimizer step. The order
# never changes. The noise key comes from the operating system: who has it can subtract the noise. Running the next cell
# again draws a new secret and is a new release on the same devices: its cost adds to the first one's.

# %%
ROUNDS, REPORT_GOAL, MAX_NORM, NOISE_MULTIPLIER = 32 if FAST else 64, 100, 0.5, 4.0
MIN_SEPARATION = NUM_DEVICES // REPORT_GOAL  # a device waits 20 rounds
secret = jax.random.wrap_key_data(jnp.asarray(np.frombuffer(os.urandom(8), np.uint32)))
server = optax.sgd(1.0, momentum=0.5)


def train(mechanism, noise_key):
    """Released models of all rounds, [rounds, dim]."""

    @jax.jit
    def federated_round(carry, ids):
        params, opt_state, noise_state = carry
        one_chunk = jax.tree.map(lambda x: x[None], (features[ids], targets[ids]))
        real = jnp.ones((1, REPORT_GOAL), bool)
        group = cohort.Cohort(ids[None], real, EXAMPLES * real.astype(jnp.int32), one_chunk)
        total, _ = cohort.clipped_sum(client, params, group, public, max_norm=MAX_NORM)
        noise_state, z = mechanism.step(noise_state, stddev=NOISE_MULTIPLIER * MAX_NORM)
        mean = (total.update + z) / REPORT_GOAL
        updates, opt_state = server.update(-mean, opt_state)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, noise_state), params

    order = jax.random.permutation(keys.stream(public, "order"), NUM_DEVICES).reshape(
        MIN_SEPARATION, REPORT_GOAL
    )
    schedule = order[jnp.arange(ROUNDS) % MIN_SEPARATION]
    start = jnp.zeros(DIM)
    carry = (start, server.init(start), mechanism.init(noise_key, start))
    return jax.lax.scan(federated_round, carry, schedule)[1]


num_tree_runs = globals().get("num_tree_runs", 0) + 2  # this cell makes two more, every time it runs
mechanisms = {
    "independent": noise.independent(),
    "tree": noise.tree(),
    "tree, Honaker": noise.tree_reduced(ROUNDS),
}
models = {}
for name, mechanism in mechanisms.items():
    released = models[name] = train(
        mechanism, keys.stream(secret, name)
    )  # a key is used once, so each run has its own
    error = jnp.linalg.norm(released - truth[None], axis=1)
    plt.plot(1 + np.arange(ROUNDS), error, label=name)
plt.xlabel("round")
plt.ylabel("distance from the true model")
plt.yscale("log")
plt.legend()
plt.show()

# %% [markdown]
# ## The noise as a picture
# Every mechanism's increments are `N w` with `w` independent Gaussians, and `noise.matrix` is that `N`. What a model
# feels is the noise of the running *sum*: its variance grows with the round for independent noise, with the
# logarithm of it for trees.

# %%
size = 32
figure, axes = plt.subplots(1, 4, figsize=(15, 3.4))
for axis, (name, mechanism) in zip(axes, mechanisms.items()):
    prefix = np.cumsum(noise.matrix(mechanism, size), axis=0)
    axis.imshow(prefix @ prefix.T, cmap="magma")
    axis.set_title(f"{name}: covariance of prefix noise", fontsize=9)
    axes[3].plot(1 + np.arange(size), np.sqrt((prefix**2).sum(1)), label=name)
axes[3].set_xlabel("rounds summed")
axes[3].set_ylabel("standard deviation, in z C")
axes[3].legend()
plt.show()

# %% [markdown]
# ## What it guarantees
# Equal noise per node is not equal privacy: a device's update enters several nodes of the tree. `accounting` needs no
# JAX: describe what ran, read the number. The worst case over every schedule that keeps the separation is computed
# exactly.

# %%
run = accounting.TreeAggregation(
    noise_multiplier=NOISE_MULTIPLIER,
    num_rounds=ROUNDS,
    min_separation=MIN_SEPARATION,
    max_participations=None,
    adjacency="zero-out",
)
print("squared sensitivity", accounting.squared_sensitivity(run), " rho", accounting.rho(run))
print("epsilon at delta 1e-6:", accounting.epsilon(run, delta=1e-6), "for one such run")
# All the tree runs used the same devices: they add up (the run with independent noise would come on top).
together = accounting.compose([run] * num_tree_runs, delta=1e-6)
print(f"epsilon of all {num_tree_runs} tree runs so far:", together.epsilon)
print(accounting.statement(run, delta=1e-6, clip_norm=MAX_NORM, report_goal=REPORT_GOAL).sentence)

# %% [markdown]
# The deployed Spanish next-word model of Gboard (Xu et al. 2023): 2,000 rounds, at least 313 rounds between two
# participations of a device, at most six of them, noise multiplier 7.

# %%
gboard = accounting.TreeAggregation(
    noise_multiplier=7.0, num_rounds=2000, rounds_between=313, max_participations=6, adjacency="zero-out"
)
rho = accounting.rho(gboard)
assert round(rho, 2) == 0.81  # as published
print(f"rho {rho:.5f}, epsilon {accounting.epsilon(gboard, delta=1e-10):.6f} at delta 1e-10")

# %% [markdown]
# Next: `jaxpriv keyboard train` does this for a language model; `04_for_privacy_analysts` stays with the accounting.
