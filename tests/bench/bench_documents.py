"""Documents: depth and releases a document beside NumPy and torch, memory at the extremes, sentences a CPU second.

torch, sentence-transformers and the encoder are measured where they are installed or can be fetched.
"""

import importlib.util
import json
import os
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import depth
from tests.bench.timing import cpu_seconds, table
from trainers.common.errors import InputError
from trainers.documents import choices, data, encoder, mechanisms, methods, preparation, release

CANDIDATES, SENTENCES, DIRECTIONS, DIM, DOCUMENTS = 5000, 16, 50, 384, 64


def main() -> None:
    subprocess.run([sys.executable, "-m", "tests.bench.bench_documents", "depths"], check=True)
    releases()
    encodings()


def depths() -> None:
    """The same integers by four ways, one thread: milliseconds of CPU a document."""
    # A team of threads spends more CPU on waiting for each other than on so small a sum.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
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
    """Releases from cached sentence embeddings, each size in a process of its own: speed, and memory at its peak."""
    rows = []
    for name, counts in SIZES.items():
        for devices in (1, 2):
            environment = os.environ | {
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                "OMP_NUM_THREADS": str(devices),
            }
            command = [sys.executable, "-m", "tests.bench.bench_documents", name]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append(
                [
                    name,
                    str(devices),
                    f"{len(counts) / found['cpu']:,.0f}",
                    f"{len(counts) / found['wall']:,.0f}",
                    f"{found['inputs']:.0f}",
                    f"{found['before']:.0f}",
                    f"{found['peak']:.0f}",
                ]
            )
    print("\nreleases: depth, permute-and-flip, epsilon 10; MB of inputs, of the process before, at its peak")
    table(["", "devices", "documents a CPU second", "a second", "inputs", "before", "peak"], rows)


SIZES = {"10,000 documents of 16": [16] * 10_000, "one document of 10,000": [10_000]}


def release_once(counts: list[int]) -> None:
    """Runs in a process of its own and prints seconds and megabytes as JSON."""
    rng = np.random.default_rng(1)
    prepared = jax.jit(depth.prepare)(
        rng.normal(size=(CANDIDATES, DIM)).astype(np.float32),
        rng.normal(size=(DIRECTIONS, DIM)).astype(np.float32),
    )
    embeddings = rng.normal(size=(CANDIDATES, DIM)).astype(np.float32)

    def prepare(documents, variants):
        scores = mechanisms.depth_scores(documents, prepared, num_directions=(DIRECTIONS,))
        return {variants[0]: scores[DIRECTIONS]}

    def draw(scores, counts, key_rows, epsilon, variant):
        drawn = mechanisms.select(
            key_rows, scores[variant], epsilon=epsilon, sensitivity=1,
            max_score=int(counts.max()) // 2, mechanism="permute_and_flip",
        )  # fmt: skip
        return methods.Released(embeddings[drawn], drawn)

    method = methods.Method(
        name="depth", variants=("50",), utility="strict_depth", draws=True, prepare=prepare, release=draw,
        predict=lambda *_: np.zeros(0), width=lambda variant: DIM,
    )  # fmt: skip
    offsets = np.concatenate([[0], np.cumsum(counts)])
    vectors = rng.standard_normal((offsets[-1], DIM), np.float32)
    ids = [""] * len(counts)
    documents = data.Encoded(ids, ids, np.zeros(len(counts), np.int32), (), vectors, offsets)
    keys = jax.random.split(jax.random.key(0), len(counts))
    few = np.arange(min(2048, len(counts)))
    before = _resident()
    release.release_all(method, documents.take(few), keys[: len(few)], 10.0, choices.always("50"))  # compiles
    start, cpu = time.perf_counter(), time.process_time()
    release.release_all(method, documents, keys, 10.0, choices.always("50"))
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    found = {"wall": wall, "cpu": cpu, "inputs": vectors.nbytes / 1e6, "before": before, "peak": _peak()}
    print(json.dumps(found))


def _resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


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
    match sys.argv[1:]:
        case []:
            main()
        case ["depths"]:
            depths()
        case [size]:
            release_once(SIZES[size])
