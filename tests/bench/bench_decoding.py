"""Decoding with a memory: pieces a CPU second of the plain model and of each way to search, 178,000 records x
128.

Keys are clustered around the model's own representations, as a memory's are, so that shadows, cells and gates face
what they face in use; what each costs in BLEU is measured by `jaxpriv translation train` with --search and
--gate. FAISS is measured where it can be imported (pip install faiss-cpu).
"""

import importlib.util
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import knn, pq
from tests.bench.timing import table
from trainers.translation import batches, datastore, decode, memory, retrieval
from trainers.translation import model as models
from trainers.translation.config import ModelConfig

RECORDS, DIM, PIECES, SENTENCES = 178_000, 128, 6000, 32


def memories(keys: np.ndarray, values: np.ndarray, model: str) -> dict[str, datastore.Datastore]:
    """The same records with plain keys and with 64-byte codes."""
    codebook = jax.jit(pq.fit, static_argnames=("num_subspaces", "num_iterations"))(
        jax.random.key(0), jnp.asarray(keys[:20_000]), num_subspaces=64, num_iterations=5
    )
    made = {}
    for name, book in (("keys", None), ("codes", codebook)):
        facts = datastore.Facts(
            model=model,
            dim=DIM,
            width=DIM if book is None else 64,
            dtype="float32" if book is None else "uint8",
            coding="none" if book is None else "pq",
            codebook=datastore.codebook_digest(book),
            key="output",
            vocabulary_size=PIECES,
        )
        rows = datastore.encode(facts, book, keys)
        made[name] = datastore.Datastore(pathlib.Path("memory"), facts, rows, values, None, book)
    return made


def endless(stepper: decode.Stepper) -> decode.Stepper:
    """The same steps without an end mark, so that every way writes the same number of pieces in full batches."""

    def step(*args):
        cache, log_probs = stepper.step(*args)
        return cache, log_probs.at[:, models.END].set(-1e9)

    return decode.Stepper(stepper.start, step, stepper.select)


def main() -> None:
    rng = np.random.default_rng(0)
    shape = ModelConfig(vocabulary_size=PIECES, dim=DIM, ffn_dim=4 * DIM, encoder_layers=3, decoder_layers=2)
    graphdef, params = models.init(shape, jax.random.key(0))
    texts = [rng.integers(3, PIECES, 24).astype(np.int32) for _ in range(SENTENCES)]
    examples = [batches.Example(s, rng.integers(3, PIECES, 24).astype(np.int32)) for s in texts]
    own = retrieval.all_entries(graphdef, params, examples).keys
    keys = own[rng.integers(0, len(own), RECORDS)] + 0.3 * rng.normal(size=(RECORDS, DIM)).astype(np.float32)
    stores = memories(keys, rng.integers(3, PIECES, RECORDS).astype(np.int32), "bench")
    meta = knn.init_meta(jax.random.key(0), k=8)
    # The gate that half of the model's own steps pass, since an untrained model is never sure.
    sure = [np.exp(h.score) for h in decode.search(endless(decode.plain(graphdef)), params, texts)]
    half = float(np.median(sure))
    ways: list[tuple[str, str, memory.Search, float]] = [
        ("model alone", "", "exact", 1.0),
        ("every key", "keys", "exact", 1.0),
        ("every code", "codes", "exact", 1.0),
        ("keys, nearest blocks", "keys", "inverted", 1.0),
        ("codes, nearest blocks", "codes", "inverted", 1.0),
        ("codes, nearest blocks, half of the rows gated", "codes", "inverted", half),
        ("codes, 32-component shadow", "codes", "shadow", 1.0),
    ]
    faiss: list[tuple[str, str, memory.Search, float]] = [
        ("keys, FAISS inverted file", "keys", "faiss", 1.0),
        ("codes, FAISS inverted file", "codes", "faiss", 1.0),
    ]
    made, taken = {}, {}
    for name, which, search, gate in ways + (faiss if importlib.util.find_spec("faiss") else []):
        stepper, weights = decode.plain(graphdef), params
        if which:
            store = memory.searchable(stores[which], search, components=32)
            stepper = retrieval.stepper(graphdef, retrieval.Retrieval(k=8, gate=gate))
            weights = retrieval.Weights(params, store, jnp.float32(10.0), meta=meta)
        made[name], taken[name] = (endless(stepper), weights), []
    for _ in range(4):  # in turn, so that a busy machine is busy for all; the first call compiles
        for name, (stepper, weights) in made.items():
            start = time.process_time()
            found = decode.search(stepper, weights, texts)
            taken[name].append(time.process_time() - start)
    pieces = sum(len(h.pieces) for h in found)
    speeds = {name: pieces / float(np.median(times[1:])) for name, times in taken.items()}
    base = speeds["model alone"]
    rows = [[name, f"{v:.0f}", f"{v / base:.2f}", f"{taken[name][0]:.1f}"] for name, v in speeds.items()]
    table(["way", "pieces / CPU s", "of model", "first call, CPU s"], rows)
