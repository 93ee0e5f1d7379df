"""Documents: depth and releases a document beside NumPy and torch, memory at the extremes, sentences a CPU second.

torch, sentence-transformers and the encoder are measured where they are installed or can be fetched.
"""

import importlib.util
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import depth
from tests.bench.timing import cpu_seconds, table
from trainers.common.errors import InputError
from trainers.documents import data, encoder, mechanisms, preparation

CANDIDATES, SENTENCES, DIRECTIONS, DIM, DOCUMENTS = 5000, 16, 50, 384, 64


def main() -> None:
    depths()
    releases()
    encodings()


def depths() -> None:
    """The same integers by four ways: milliseconds of CPU a document."""
    rng = np.random.default_rng(0)
    sentences = rng.normal(size=(DOCUMENTS, SENTENCES, DIM)).astype(np.float32)
    candidates = rng.normal(size=(CANDIDATES, DIM)).astype(np.float32)
    directions = rng.normal(size=(DIRECTIONS, DIM)).astype(np.float32)
    prepared = jax.jit(depth.prepare)(candidates, directions)
    where = jnp.ones(SENTENCES, bool)
    ours = jax.jit(
        lambda s, prepared: jax.lax.map(lambda x: depth.depth_prepared(prepared, x, where=where), s)
    )
    heights = directions @ candidates.T
    seconds, first = cpu_seconds(ours, jnp.asarray(sentences), prepared)
    rows = [["jaxpriv", f"{seconds / DOCUMENTS * 1e3:.3f}", "1.00", f"first call {first:.2f} s"]]
    expected = np.asarray(ours(sentences[:4], prepared))
    others = {"NumPy, uint8 loop": _numpy_loop, "NumPy, broadcast": _numpy_broadcast}
    if importlib.util.find_spec("torch"):
        others["torch, int8 batch"] = _torch
    for name, function in others.items():
        found = function(sentences[:4], directions, heights)
        assert np.abs(found - expected).max() <= 1  # a float edge between two ways to multiply
        times = []
        for _ in range(3):
            start = time.process_time()
            function(sentences[:8], directions, heights)
            times.append((time.process_time() - start) / 8)
        other = float(np.median(times))
        rows.append([name, f"{other * 1e3:.3f}", f"{other / (seconds / DOCUMENTS):.2f}", ""])
    print(f"depth: m {CANDIDATES}, k {SENTENCES}, p {DIRECTIONS}, d {DIM}")
    table(["way", "CPU ms a document", "times ours", ""], rows)


def _numpy_loop(sentences, directions, heights):
    out = []
    for s in sentences:
        above = np.zeros(heights.shape, np.uint8)
        for row in s @ directions.T:
            above += row[:, None] > heights
        out.append(np.minimum(above, len(s) - above).min(0))
    return np.stack(out).astype(int)


def _numpy_broadcast(sentences, directions, heights):
    out = []
    for s in sentences:
        above = ((s @ directions.T)[:, :, None] > heights[None]).sum(0)
        out.append(np.minimum(above, len(s) - above).min(0))
    return np.stack(out)


def _torch(sentences, directions, heights):
    import torch

    with torch.no_grad():
        projected = torch.from_numpy(sentences) @ torch.from_numpy(directions).T
        level = torch.from_numpy(heights)
        above = torch.zeros((len(sentences), *heights.shape), dtype=torch.int8)
        for i in range(sentences.shape[1]):
            above += projected[:, i, :, None] > level[None]
        return torch.minimum(above, sentences.shape[1] - above).amin(1).numpy().astype(int)


def releases() -> None:
    """Scores and draws from cached embeddings, 10,000 documents and one of 10,000 sentences, with memory."""
    rng = np.random.default_rng(1)
    prepared = jax.jit(depth.prepare)(
        rng.normal(size=(CANDIDATES, DIM)).astype(np.float32),
        rng.normal(size=(DIRECTIONS, DIM)).astype(np.float32),
    )
    rows = []
    for name, counts in (("10,000 documents of 16", [16] * 10_000), ("one document of 10,000", [10_000])):
        offsets = np.concatenate([[0], np.cumsum(counts)])
        vectors = rng.normal(size=(offsets[-1], DIM)).astype(np.float32)
        ids = [""] * len(counts)
        documents = data.Encoded(ids, ids, np.zeros(len(counts), np.int32), (), vectors, offsets)
        _release(documents.take(np.arange(min(300, len(counts)))), prepared)  # compiles
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start, cpu = time.perf_counter(), time.process_time()
        for first in range(0, len(counts), 2048):
            _release(documents.take(np.arange(first, min(first + 2048, len(counts)))), prepared)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        rows.append(
            [
                name,
                f"{len(counts) / cpu:,.0f}",
                f"{len(counts) / wall:,.0f}",
                f"{grown:.0f} MiB more at the peak",
            ]
        )
    print("\nreleases: depth scores, exponential mechanism at epsilon 10")
    table(["", "documents a CPU second", "a second", "memory"], rows)


def _release(documents: data.Encoded, prepared: depth.Prepared) -> np.ndarray:
    scores = mechanisms.depth_scores(documents, prepared, num_directions=(DIRECTIONS,))[DIRECTIONS]
    keys = jax.random.split(jax.random.key(0), len(scores))
    most = int(documents.counts.max()) // 2
    return mechanisms.select(
        keys, scores, epsilon=10.0, sensitivity=1, max_score=most, mechanism="exponential"
    )


def encodings() -> None:
    """MiniLM on sentences of 6 to 60 words, lengths as in newsgroup posts."""
    try:
        model = preparation.open_encoder("minilm")
    except InputError as error:
        print(f"\nencoder: not measured ({error})")
        return
    rng = np.random.default_rng(2)
    words = [
        "the",
        "a",
        "ship",
        "court",
        "oven",
        "harbour",
        "judge",
        "flour",
        "sails",
        "before",
        "appeal",
        "recipe",
        "with",
        "captain",
    ]
    lengths = np.clip(rng.lognormal(2.75, 0.6, 2000), 3, 60).astype(int)
    sentences = [" ".join(rng.choice(words, n)) + "." for n in lengths]
    fresh = encoder.SentenceEncoder(model.folder)  # no cache
    seconds, first = cpu_seconds(fresh.encode, sentences, repeats=3)
    rows = [["jaxpriv", f"{len(sentences) / seconds:.0f}", f"first call {first:.1f} s"]]
    if importlib.util.find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer

        peer = SentenceTransformer(str(model.folder), device="cpu")
        peer.encode(sentences[:64])
        start = time.process_time()
        peer.encode(sentences, batch_size=64)
        rows.append(["sentence-transformers", f"{len(sentences) / (time.process_time() - start):.0f}", ""])
    print("\nencoder: all-MiniLM-L6-v2")
    table(["", "sentences a CPU second", ""], rows)


if __name__ == "__main__":
    main()
