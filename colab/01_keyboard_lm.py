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
# # A keyboard that learns from everybody and tells on nobody
#
# A next-word model trained by simulated federated learning with DP-FTRL, the way Gboard's deployed models are
# (Xu et al. 2023), then used for what a keyboard does: suggestions, completions, and understanding noisy typing.

# %%
import importlib.util
import pathlib

found = importlib.util.find_spec("jaxpriv")
if found is None or found.origin is None:  # a folder of that name beside the notebook is no package
    # The project's folder, cloned or uploaded beside this notebook, or around it; the jax that is here stays.
    source = next(p for p in ("jaxpriv", ".", "..") if pathlib.Path(p, "pyproject.toml").exists())
    # %pip install -q ./{source}

# %%
import dataclasses
import os
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np

import accounting

FAST = bool(os.environ.get("JAXPRIV_FAST"))  # smaller sizes where nobody looks at the pictures
print("jax", jax.__version__, jax.devices())
folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## The text
# Docstrings of installed Python packages: every machine has them. One module is one device; the words are chosen by
# *other* packages, so that the vocabulary costs no device any privacy.

# %%
from trainers.common import command
from trainers.keyboard import corpus
from trainers.keyboard.config import DEMO, TINY

command.keep_compilations()  # in the user's cache: running this again starts at once
base = dataclasses.replace(
    TINY if FAST else DEMO,
    run_dir=str(folder / "private"),
    compare=False,
    **({"rounds": 6, "evaluate_every": 3} if FAST else {"rounds": 120, "server_cooldown": 40}),
)
data = corpus.load(base)
print(
    f"{data.num_clients} devices, {len(data.vocabulary)} words, {len(data.test)} examples of unseen devices"
)
print("an example:", " ".join(data.vocabulary.decode(t for t in data.train[0][0] if t)))
fig, ax = plt.subplots(figsize=(5, 3))
ax.hist([len(client) for client in data.train], bins=30, log=True)
ax.set_xlabel("examples of a device")
ax.set_ylabel("devices")
plt.show()

# %% [markdown]
# ## Three runs
# Without noise; with the noise *per device* of the deployment; and the same with a clip norm that follows the
# median of the updates' norms, itself found privately. Only the adaptive one restarts its tree, since the clip
# norm may change only then. Running the cell again goes on with what was interrupted and reads what is done: no
# round is released twice.

# %%
from trainers.common import metrics
from trainers.keyboard import session, stated

restart = base.rounds // 3
settings = {
    "no noise": dataclasses.replace(base, mechanism="none", run_dir=str(folder / "no_noise")),
    "fixed clip": base,
    "adaptive clip": dataclasses.replace(
        base, clip="adaptive", clip_norm=0.1, restarts=(restart,), run_dir=str(folder / "adaptive")
    ),
}
if FAST:
    del settings["no noise"]
results = {}
for name, config in settings.items():
    begun = pathlib.Path(config.run_dir).exists()
    results[name], _ = session.train(dataclasses.replace(config, resume=begun))
logs = {
    name: metrics.read(pathlib.Path(config.run_dir, "metrics.jsonl")) for name, config in settings.items()
}

# %%
fig, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 3.4))
for name, rows in logs.items():
    scored = [r for r in rows if "evaluation" in r]
    x = [r["round"] + 1 for r in scored]
    left.plot(x, [r["evaluation"]["top1_words"] for r in scored], label=name)
    middle.plot(x, [r["smart_compose"]["trigger_rate"] for r in scored], label=name)
    if scored[0]["rho"] is not None:
        right.plot(x, [r["rho"] for r in scored], label=name)
left.set_ylabel("top-1 words, %")
middle.set_ylabel("completions shown, % of positions")
right.set_ylabel("rho (zCDP) spent")
for axis in (left, middle, right):
    axis.set_xlabel("round")
    axis.legend()
plt.show()

# %% [markdown]
# The clip norm in force changes at the restart only; the private estimate moves every round.

# %%
rounds = [r for r in logs["adaptive clip"] if "clip_norm" in r]
fig, ax = plt.subplots(figsize=(5, 3))
ax.plot([r["clip_norm"] for r in rounds], label="clip norm in force")
ax.plot([r["estimate"] for r in rounds], label="private estimate of the median")
ax.set_xlabel("round")
ax.legend()
plt.show()

# %% [markdown]
# ## What it guarantees
# The run's own statement, made from its own log. A few dozen devices a round cannot hide anybody at this noise:
# epsilon is huge, and the statement says so. The same noise per device, in rounds of 6,500 out of millions, is what
# was deployed.

# %%
statement = stated.write(folder / "private")
print(statement.sentence, "\n")
both = statement.data["rho"] + stated.write(folder / "adaptive").data["rho"]
print(f"Both private runs used the same devices, so they add up: rho {accounting.round_up(both)} together.\n")
print("A projection, not this run:", statement.data["deployment"]["sentence"])

# %% [markdown]
# ## One price, many mechanisms
# At equal rho, which mechanism leaves least noise on the model? 2,000 rounds, 313 rounds between two participations, at
# most six of them: Gboard's Spanish model. The bars are the noise of the running sum in its worst round.

# %%
gboard = accounting.TreeAggregation(
    noise_multiplier=7.0, num_rounds=2000, rounds_between=313, max_participations=6, adjacency="zero-out"
)
print(
    f"rho {accounting.rho(gboard):.4f}, epsilon {accounting.epsilon(gboard, delta=1e-10):.3f} at delta 1e-10"
)
compared = accounting.compare(
    num_rounds=2000,
    min_separation=314,
    max_participations=6,
    noise_multiplier=7.0,
    delta=1e-10,
    adjacency="zero-out",
    optimized=not FAST,
)
fig, ax = plt.subplots(figsize=(7, 3))
ax.barh([c.mechanism for c in compared], [c.max_ratio for c in compared])
ax.set_xlabel("noise at equal rho, relative to the Honaker tree")
plt.show()

# %% [markdown]
# ## Suggestions as you type
# The model leaves the run as one file: parameters, words and statement, nothing secret. A phone keeps the LSTM's
# state, so that a word costs one step, and letters of the next one nothing.

# %%
from trainers.keyboard import released
from trainers.keyboard.suggest import Suggester

(folder / "keyboard.safetensors").unlink(missing_ok=True)  # an export overwrites nothing
released.export(folder / "private", folder / "keyboard.safetensors")
phone = released.load(folder / "keyboard.safetensors")
print(
    f"{(folder / 'keyboard.safetensors').stat().st_size / 1e6:.2f} MB;",
    phone.statement["sentence"][:80],
    "...",
)
suggester = Suggester(phone)
for text in ("", "return ", "return the ", "return the n", "return the number of "):
    letters = suggester.read(text)
    print(f"{text!r:26} {suggester.suggest(letters)}   steps of the model so far: {suggester.steps}")

# %% [markdown]
# ## Completions of several words
# Shown only where the product of the words' probabilities reaches a threshold. A low one shows many and often wrong
# ones. (Measured on devices never trained on; their text is covered by no guarantee, nor are these numbers.)

# %%
from trainers.keyboard import compose

few = data.test[: 200 if FAST else 2000]
points = compose.measure(
    phone.params, few, phone.sizes, thresholds=np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.5])
)
fig, ax = plt.subplots(figsize=(5, 3))
ax.plot([p.trigger_rate for p in points], [p.accuracy for p in points], marker="o")
for p in points:
    ax.annotate(f" {p.threshold:g}", (p.trigger_rate, p.accuracy), fontsize=8)
ax.set_xlabel("completions shown, % of positions")
ax.set_ylabel("word for word right, %")
plt.show()
suggester.read("return the number of ")
print(compose.complete(phone, suggester, threshold=0.02))

# %% [markdown]
# ## What did those fingers mean?
# Taps fall around their keys with a Gaussian error. The nearest word is often not the one meant; the model knows
# what would make sense. Its weight is tuned on validation devices.

# %%
from trainers.keyboard import rescore

words = rescore.tappable(phone.vocabulary.words)
most = 300 if FAST else 3000
tuning, cases = (
    rescore.cases(phone.params, part, phone.sizes, words, most=most) for part in (data.validation, data.test)
)
errors = (0.3, 0.4, 0.5, 0.6)
ratios = [rescore.measure(tuning, cases, words, stddev=e, seed=0) for e in errors]
fig, ax = plt.subplots(figsize=(5, 3))
for way, label in (
    ("taps", "taps alone"),
    ("taps_and_rank", "and rank in vocabulary"),
    ("taps_and_model", "and model"),
):
    ax.plot(errors, [getattr(r, way) for r in ratios], marker="o", label=label)
ax.set_xlabel("standard deviation of a tap, key widths")
ax.set_ylabel("words to be modified, %")
ax.legend()
plt.show()
speed = rescore.speed(cases, phone.vocabulary.words)
print(f"picked before the first letter: {speed.picked_rate:.1f} %")
print(
    f"keystrokes a word {speed.keystrokes_plain:.2f} -> {speed.keystrokes:.2f}: at most {speed.words_per_minute:.1f}"
)
print(f"words a minute instead of {rescore.SPEED}")

# %% [markdown]
# In the terminal: `jaxpriv keyboard train`, then `jaxpriv keyboard suggest`, `compose`, `rescore` and `export`.
# `04_for_privacy_analysts` stays with the accounting.
