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
# # Translating with everybody's memory
#
# Several organisations hold parallel text in their own domain and will not hand it over. FedNN (federated
# nearest-neighbour translation) lets each send, once, an encrypted *memory*: for every target position the
# public
# model's representation, product-quantized, and the true next piece. Everyone then translates with the union.
# This
# notebook makes the memories, passes them through the protocol, compares FedNN with its baselines, and says
# plainly what is protected: **no differential privacy, epsilon: none.**

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
import json
import os
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxpriv import knn
from trainers.common import files, metrics, parallel_text
from trainers.translation import (
    crypto,
    data,
    datastore,
    facts,
    protocol,
    report,
    retrieval,
    session,
    store_command,
)
from trainers.translation.config import PRESETS

FAST = bool(os.environ.get("JAXPRIV_FAST"))  # smaller sizes where nobody looks at the scores
print("jax", jax.__version__, jax.devices())

# %% [markdown]
# ## The text
# Message catalogues of Python packages: the server has web applications, the clients genealogy, business and
# health.
# It is little text, and the scores will be low; the point is the difference between the ways to share.

# %%
sets = parallel_text.load_default()
LIMIT = 150 if FAST else 10**9
here = pathlib.Path("translation-data")
here.mkdir(exist_ok=True)
for name, splits in sets.items():
    for part, pairs in zip(("train", "valid", "test"), splits):
        pairs = [p for p in pairs if not FAST or len(p.source) < 20]
        rows = [
            json.dumps({"en": p.source, "de": p.target}) for p in pairs[: LIMIT if part == "train" else 100]
        ]
        (here / f"{name}.{part}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
print({name: len(splits.train) for name, splits in sets.items()})

# %% [markdown]
# ## The comparison
# One call trains the public model, fine-tunes, averages, builds memories and scores. The run folder keeps
# every stage:
# running this cell again continues, or only reads. (A few minutes at full size on two cores.)

# %%
config = dataclasses.replace(
    PRESETS["tiny" if FAST else "demo"],
    server=(f"{here}/general.train.jsonl",),
    client=tuple(f"{name}={here}/{name}.train.jsonl" for name in sets if name != "general"),
    methods=("p_nmt", "ft", "fednn") if FAST else PRESETS["demo"].methods,
    vocabulary_size=400 if FAST else 4000,
    test_sentences=4 if FAST else 100,
    run_dir="translation-run",
    resume=True,
)
result, text = session.train(config)
print(text)

# %%
records = metrics.read("translation-run/metrics.jsonl")
bleu = report.mean_scores(records, "non_iid")
fig, ax = plt.subplots(figsize=(8, 3.5))
domains = list(bleu["fednn"])
for i, (method, row) in enumerate(bleu.items()):
    ax.bar(
        np.arange(len(domains)) + 0.08 * i, [row.get(d, 0) for d in domains], 0.08, label=report.NAMES[method]
    )
ax.set_xticks(np.arange(len(domains)) + 0.35, domains)
ax.set_ylabel("BLEU")
ax.legend(fontsize=7)
plt.show()

# %% [markdown]
# ## One round, role by role
# Members make keys; one of them (never the server) makes the round: a fresh data key, wrapped for each
# member. Each
# seals its records one by one; the server checks signatures and quotas and shuffles what it cannot read. Running the
# cell again is another round, with new keys.

# %%
model = data.load("translation-run/public")
codebook = datastore.load_codebook("translation-run/public/codebook.npz")
form = facts.facts_of(model, codebook)
secrets = {name: crypto.generate(name) for name in sets if name != "general"}
members = [secret.public() for secret in secrets.values()]
round_folder = (
    tempfile.TemporaryDirectory()
)  # a round's keys live in this process alone, and so does its folder
work = pathlib.Path(round_folder.name)
maker = next(iter(secrets.values()))
protocol.make_round(work / "round.json", maker, members, form, quota=1_000_000)
made = protocol.read_round(work / "round.json")
for name, secret in secrets.items():
    pairs = sets[name].train[: 60 if FAST else 2000]
    with files.new_folder(work / f"{name}.store") as folder:  # whole or absent
        store_command.write_store(folder, model, codebook, model.vocabulary.examples(pairs))
    store = datastore.open_store(work / f"{name}.store", facts=made.facts)
    key = protocol.join(made, secret, members)
    print(name, protocol.share(work / f"{name}.upload", made, key, secret, store))
uploads = [work / f"{name}.upload" for name in secrets]
print("server", protocol.shuffle(work / "shuffled", made, uploads))
key = protocol.join(made, maker, members)
print("member", protocol.open_shuffled(work / "joint", made, key, work / "shuffled", codebook))
joint = datastore.open_store(work / "joint", model=model.digest)
print(joint.count, "records in the joint memory")

# %% [markdown]
# ## What a member sees
# A member who guesses a sentence pair can encode it and look for its codes: product quantization compresses,
# it does
# not hide. Here are the nearest records of one private pair of another member, and they are exactly there.

# %%
victim = model.vocabulary.examples(sets["health"].train[:1])
guess = retrieval.all_entries(model.graphdef, model.params, victim)
codes = datastore.encode(form, codebook, guess.keys)
found = [bool((joint.keys == code).all(1).any()) for code in codes]
print(f"{sum(found)} of {len(found)} guessed records are in the joint memory: membership is certain")
near = knn.search(datastore.on_device(joint), jnp.asarray(guess.keys), k=1)
print("nearest values:", model.vocabulary.decode([np.asarray(near.values)[:, 0]]))
print(report.GUARANTEE["fednn"])
