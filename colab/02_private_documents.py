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
# # A document that any sentence could have been swapped in
#
# A review or a mail becomes one embedding that a server may keep, while every single sentence of it could have been
# any other: *sentence privacy* (Meehan, Mrini, Chaudhuri 2022). The trick is to release not the document's own
# embedding but that of a *public* document, drawn by how well it stands in for the private one.

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

import accounting
from jaxpriv import depth, selection

FAST = bool(os.environ.get("JAXPRIV_FAST"))  # smaller sizes where nobody looks at the pictures
print("jax", jax.__version__, jax.devices())

# %% [markdown]
# ## Depth: how central a candidate is
# Twelve sentences in a plane, and public candidates around them. A candidate's depth is the least number of sentences
# on one side of a line through it, over a handful of public directions. Replacing one sentence moves it by at most 1.

# %%
rng = np.random.default_rng(3)
sentences = jnp.float32(rng.normal(size=(12, 2)))
candidates = jnp.float32(rng.normal(size=(400, 2)) * 2)
angles = np.linspace(0, np.pi, 20, endpoint=False)
directions = jnp.float32(np.stack([np.cos(angles), np.sin(angles)], 1))
everything = jnp.ones(len(sentences), bool)
depths = depth.depth(sentences, candidates, directions, where=everything)
fig, ax = plt.subplots(figsize=(5, 4))
shown = ax.scatter(*np.asarray(candidates).T, c=np.asarray(depths), s=18, cmap="viridis")
ax.scatter(*np.asarray(sentences).T, color="crimson", marker="x", label="sentences")
ax.legend()
fig.colorbar(shown, label="depth")
plt.show()

# %% [markdown]
# ## The draw, and what it hides
# The exponential mechanism draws a candidate with probability proportional to $e^{\varepsilon u / 2}$.
# *Permute-and-flip* has the same guarantee and picks better ones. Replace a sentence by one far away: no candidate
# becomes more than $e^\varepsilon$ times as likely, exactly.

# %%
EPSILON = 4.0
moved = sentences.at[0].set(jnp.array([9.0, 9.0]))
other = depth.depth(moved, candidates, directions, where=everything)
print("largest change of a depth:", int(jnp.abs(depths - other).max()))
for law in (selection.log_probs, selection.permute_and_flip_log_probs):
    one, two = (law(u, epsilon=EPSILON, sensitivity=1) for u in (depths, other))
    mean_depth = float(jnp.exp(one) @ depths)
    print(
        f"{law.__name__:28s} expected depth {mean_depth:.2f} of {int(depths.max())}, "
        f"largest log ratio between the two documents {float(jnp.abs(one - two).max()):.3f} <= {EPSILON}"
    )

# %% [markdown]
# The sampler spends 128 random bits on a choice. Adding float32 Gumbel noise and taking the largest would never draw a
# candidate some 21 nats down, and what can never be drawn from one of two neighbours breaks the guarantee.

# %%
draw_keys = jax.random.split(
    jax.random.key(0), 2000 if FAST else 20_000
)  # a demonstration: real keys are secret
drawn = jax.jit(
    jax.vmap(
        lambda key: selection.sample(
            key, depths, epsilon=EPSILON, sensitivity=1, max_score=6, mechanism="permute_and_flip"
        )
    )
)(draw_keys)
law = jnp.exp(selection.permute_and_flip_log_probs(depths, epsilon=EPSILON, sensitivity=1))
levels = np.arange(int(depths.max()) + 1)
width = 0.4
fig, ax = plt.subplots(figsize=(5, 3))
ax.bar(levels - width / 2, [float((depths[drawn] == j).mean()) for j in levels], width, label="drawn")
ax.bar(levels + width / 2, [float(law[depths == j].sum()) for j in levels], width, label="exact law")
ax.set_xlabel("depth of the released candidate")
ax.legend()
plt.show()

# %% [markdown]
# ## Real sentences
# A sentence encoder (all-MiniLM-L6-v2, in JAX, read from safetensors) and text that every installation has: docstrings,
# labelled by their package. A summed, clipped cosine between sentences and candidates is a utility of its own, bounded
# a sentence at a time; it has the range $k$ instead of $k/2$, and does better than depth.

# %%
from trainers.documents import data, mechanisms, networks, preparation
from trainers.documents.public import unit

PER_LABEL = 15 if FAST else 120
encoder = preparation.open_encoder("minilm")
splits, _ = data.load("docstrings")
classes = sorted(set(splits["train"].labels))
public_part, private_part = (
    data.encode(
        preparation.first_of_each_label(splits[name], size), encoder, splitter="sentencex", classes=classes
    )
    for name, size in (("train", PER_LABEL), ("test", max(5, PER_LABEL // 3)))
)
print(
    f"{len(public_part.ids)} public and {len(private_part.ids)} private documents of {len(classes)} packages"
)

# %%
rows = np.flatnonzero(public_part.counts >= 3)
means = public_part.means[rows]
cosines = public_part.vectors[:1000] @ unit(means).T
low, high = np.percentile(cosines, [50, 99.9])
utility = mechanisms.bounded_scores(private_part, unit(means), low=low, high=high, num_steps=32)
epsilons = (1.0, 5.0, 10.0, 30.0)
keys = jax.random.split(jax.random.key(1), len(private_part.ids))  # a demonstration again
right = []
for epsilon in epsilons:
    drawn = mechanisms.select(
        keys,
        utility,
        epsilon=epsilon,
        sensitivity=32,
        max_score=32 * int(private_part.counts.max()),
        mechanism="permute_and_flip",
    )
    labels = public_part.labels[rows][drawn]
    right.append(networks.macro_f1(private_part.labels, labels, len(classes)))
fig, ax = plt.subplots(figsize=(5, 3))
ax.plot(epsilons, right, marker="o", label="label of the released candidate")
ax.axhline(
    networks.random_guess(public_part.labels, len(classes)), ls="--", color="0.4", label="random guess"
)
ax.set_xlabel("epsilon")
ax.set_ylabel("macro-F1, %")
ax.legend()
plt.show()

# %% [markdown]
# What a person would see of a private document is the public one that was released in its place:

# %%
longest = int(np.argmax(private_part.counts))
print("private:", private_part.texts[longest][:300], "...\n")
print("released instead:", public_part.texts[rows[drawn[longest]]][:300], "...")

# %% [markdown]
# ## The guarantee in words

# %%
release = accounting.PureDP(epsilon=5.0, releases=1, adjacency="replace-one", unit="sentence")
distance = selection.residual(len(rows), max_score=32 * int(private_part.counts.max()))
delta = (1 + np.exp(5.0)) * distance  # both documents' draws are that near to the exact law
statement = accounting.statement(release, delta=delta, approximation=delta)
print(statement.sentence)
print("Two documents of 10 sentences that differ in all of them:")
print("  by depth", accounting.document_epsilon(5.0, num_sentences=10, utility="strict_depth"))
print("  by the bounded sum", accounting.document_epsilon(5.0, num_sentences=10, utility="bounded_sum"))

# %% [markdown]
# `jaxpriv documents fit`, `release` and `evaluate` do this for files of documents, count what each has spent, and
# compare all methods at equal epsilon.
