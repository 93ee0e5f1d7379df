"""Search, inverted lists and quantizer beside FAISS (BLAS threshold 20) in the same run, one core, CPU time; and cost
by store size.

FAISS is used if it is installed. Keys are n / 50 Gaussian clusters, k = 16. Run it alone: it pins the process to one
core.
Variables: BENCH_KNN_MILLION=0 skips a million exact keys (3 GB), BENCH_KNN_ROWS the largest coded store (10 million).
"""

import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import inverted, knn, pq
from tests.bench.timing import cpu_seconds, table
from trainers.common import files, plots
from trainers.translation import datastore

DIM, K, SUBSPACES = 256, 16, 64


def clusters(n):
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((max(n // 50, 1), DIM), dtype=np.float32)
    draw = lambda m: (
        centres[rng.integers(0, len(centres), m)] + 0.6 * rng.standard_normal((m, DIM), dtype=np.float32)
    )
    return draw(n), draw(256)


def peer():
    try:
        import faiss
    except ImportError:
        print("FAISS is not installed: its columns stay empty")
        return None
    faiss.omp_set_num_threads(1)
    faiss.cvar.distance_compute_blas_threshold = 20
    return faiss


def ratio(ours, theirs):
    return [
        f"{1e3 * ours:.1f}",
        f"{1e3 * theirs:.1f}" if theirs else "",
        f"{ours / theirs:.2f}" if theirs else "",
    ]


def exact(faiss, n):
    keys, queries = clusters(n)
    store = jax.jit(knn.build)(jnp.asarray(keys), jnp.zeros(n, jnp.int32))
    search = jax.jit(knn.search, static_argnames="k")
    flat = None
    if faiss:
        flat = faiss.IndexFlatL2(DIM)
        flat.add(keys)
    rows = []
    for batch in (32, 256):
        q = jnp.asarray(queries[:batch])
        ours, first = cpu_seconds(lambda q=q: search(store, q, k=K))
        theirs = cpu_seconds(lambda b=batch: flat.search(queries[:b], K))[0] if flat else None
        rows.append([f"exact {n:,} x {DIM}, batch {batch}", *ratio(ours, theirs), f"{first:.1f}"])
    return rows


def inverted_lists(faiss, n=178_000):
    """Building and searching blocks beside FAISS's inverted file of 4 sqrt(n) cells, 16 of them probed."""
    keys, queries = clusters(n)
    q = jnp.asarray(queries[:32])
    store = jax.jit(knn.build)(jnp.asarray(keys), jnp.zeros(n, jnp.int32))
    truth = np.asarray(jax.jit(knn.search, static_argnames="k")(store, q, k=K).ids)
    build, search = jax.jit(inverted.build), jax.jit(inverted.search, static_argnames=("k", "probes"))
    building, first_build = cpu_seconds(lambda: build(store), repeats=1)
    index = build(store)
    theirs = made = None
    if faiss:
        lists = int(4 * n**0.5)
        file = faiss.IndexIVFFlat(faiss.IndexFlatL2(DIM), DIM, lists)
        file.nprobe = 16

        def fill():
            file.reset()
            file.train(keys)
            file.add(keys)

        made, _ = cpu_seconds(fill, repeats=1)
        theirs, _ = cpu_seconds(lambda: file.search(queries[:32], K))
        print(f"FAISS finds {_recall(file.search(queries[:32], K)[1], truth):.1%} of the {K} nearest")
    rows = [[f"blocks of {n:,} x {DIM}, built", *ratio(building, made), f"{first_build:.1f}"]]
    for probes in (24, 48, 96):
        ours, first = cpu_seconds(lambda p=probes: search(index, q, k=K, probes=p))
        found = _recall(search(index, q, k=K, probes=probes).ids, truth)
        what = f"{probes} blocks, batch 32: {found:.1%} found"
        rows.append([what, *ratio(ours, theirs), f"{first:.1f}"])
    return rows


def _recall(found, truth):
    return np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), truth.tolist())])


def quantizer(faiss, n=100_000):
    keys, queries = clusters(n)
    on_device = jnp.asarray(keys)
    fit = jax.jit(pq.fit, static_argnames="num_subspaces")
    ours, first = cpu_seconds(lambda: fit(jax.random.key(0), on_device, num_subspaces=SUBSPACES), repeats=1)
    codebook = fit(jax.random.key(0), on_device, num_subspaces=SUBSPACES)
    encode = jax.jit(pq.encode)
    encoding, first_encode = cpu_seconds(lambda: encode(codebook, on_device))
    codes = encode(codebook, on_device)
    store = jax.jit(knn.build_coded)(codebook, codes, jnp.zeros(n, jnp.int32))
    search = jax.jit(knn.search, static_argnames="k")
    scan, first_scan = cpu_seconds(lambda: search(store, jnp.asarray(queries[:32]), k=K))
    error = float(jnp.square(pq.decode(codebook, codes) - on_device).sum(-1).mean())
    theirs = [None] * 3
    if faiss:
        product = faiss.ProductQuantizer(DIM, SUBSPACES, 8)
        trained = cpu_seconds(lambda: product.train(keys), repeats=1)[0]
        index = faiss.IndexPQ(DIM, SUBSPACES, 8)
        index.pq, index.is_trained = product, True
        index.add(keys)
        theirs = [
            trained,
            cpu_seconds(lambda: product.compute_codes(keys))[0],
            cpu_seconds(lambda: index.search(queries[:32], K))[0],
        ]
        back = product.decode(product.compute_codes(keys))
        print(f"mean squared error: ours {error:.3f}, FAISS {np.square(back - keys).sum(-1).mean():.3f}")
    return [
        [f"PQ fit {SUBSPACES} x 8 bit, {n:,} x {DIM}", *ratio(ours, theirs[0]), f"{first:.1f}"],
        [f"PQ encode {n:,}", *ratio(encoding, theirs[1]), f"{first_encode:.1f}"],
        [f"PQ search {n:,}, batch 32", *ratio(scan, theirs[2]), f"{first_scan:.1f}"],
    ]


def by_size(largest):
    """Streams coded stores of growing size from disk; returns rows and draws the picture."""
    rng = np.random.default_rng(0)
    codebook = pq.Codebook(jnp.asarray(rng.standard_normal((SUBSPACES, 256, DIM // SUBSPACES)), jnp.float32))
    facts = datastore.Facts(
        model="m",
        dim=DIM,
        width=SUBSPACES,
        dtype="uint8",
        coding="pq",
        codebook=datastore.codebook_digest(codebook),
        key="output",
        vocabulary_size=8000,
    )
    queries = jnp.asarray(rng.standard_normal((32, DIM)), jnp.float32)
    rows, sizes, seconds = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = datastore.create(f"{folder}/store", facts, codebook)
        for size in (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000):
            if size > largest:
                break
            have = sizes[-1] if sizes else 0
            for start in range(have, size, 1_000_000):
                n = min(size - start, 1_000_000)
                keys = rng.integers(0, 256, (n, SUBSPACES), np.uint8)
                datastore.append(path, facts, keys=keys, values=rng.integers(0, 8000, n))
            store = datastore.open_store(path)
            cost, _ = cpu_seconds(lambda s=store: datastore.search(s, queries, k=K), repeats=1)
            sizes.append(size)
            seconds.append(cost / 32)
            rows.append([f"{size:,}", f"{1e3 * cost / 32:.2f}", f"{peak_megabytes():,.0f}"])
    made, (axis,) = plots.figure()
    axis.loglog(sizes, [1e3 * s for s in seconds], marker="o")
    axis.set(
        xlabel="records", ylabel="CPU ms a query (batches of 32)", title="Search of a coded memory on disk"
    )
    target = files.cache_dir("bench") / "search_cost.png"
    plots.save(made, target)
    table([f"records of {SUBSPACES} codes, streamed", "CPU ms a query", "peak MB of the process"], rows)
    print(f"picture: {target}")


def peak_megabytes():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    by_size(int(os.environ.get("BENCH_KNN_ROWS", 10_000_000)))
    faiss = peer()
    rows = exact(faiss, 100_000)
    if os.environ.get("BENCH_KNN_MILLION", "1") != "0":
        rows += exact(faiss, 1_000_000)
    rows += inverted_lists(faiss) + quantizer(faiss)
    table(["what", "CPU ms", "FAISS", "ratio", "first call s"], rows)
