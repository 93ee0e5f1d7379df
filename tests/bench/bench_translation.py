"""Decoding with a memory: pieces a CPU second of the plain model and of each way to search, 178,000 records x
128.

Keys are clustered around the model's own representations, as a memory's are, so that shadows and gates face
what they face in use; what each costs in BLEU is measured by `jaxpriv translation train` with --shadow and
--gate.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import knn, pq
from trainers.translation import batches, decode, retrieval
from trainers.translation import model as models
from trainers.translation.config import ModelConfig

RECORDS, DIM, PIECES, SENTENCES = 178_000, 128, 6000, 64


def main() -> None:
    rng = np.random.default_rng(0)
    shape = ModelConfig(vocabulary_size=PIECES, dim=DIM, ffn_dim=4 * DIM, encoder_layers=3, decoder_layers=2)
    graphdef, params = models.init(shape, jax.random.key(0))
    texts = [rng.integers(3, PIECES, 24).astype(np.int32) for _ in range(SENTENCES)]
    examples = [batches.Example(s, rng.integers(3, PIECES, 24).astype(np.int32)) for s in texts]
    own = retrieval.all_entries(graphdef, params, examples).keys
    keys = own[rng.integers(0, len(own), RECORDS)] + 0.3 * rng.normal(size=(RECORDS, DIM)).astype(np.float32)
    keys, values = jnp.asarray(keys), jnp.asarray(rng.integers(3, PIECES, RECORDS).astype(np.int32))
    exact = knn.build(keys, values)
    codebook = jax.jit(pq.fit, static_argnames=("num_subspaces", "num_iterations"))(
        jax.random.key(0), keys[:20_000], num_subspaces=64, num_iterations=5
    )
    coded = knn.build_coded(codebook, jax.jit(pq.encode)(codebook, keys), values)
    meta = knn.init_meta(jax.random.key(0), k=8)
    ways = {
        "model alone": None,
        "exact": (exact, 1.0),
        "PQ 64 bytes": (coded, 1.0),
        "exact, 32-component shadow": (retrieval.with_shadow(exact, components=32), 1.0),
        "PQ, 32-component shadow": (retrieval.with_shadow(coded, components=32), 1.0),
        "PQ, shadow, half of the rows gated": (retrieval.with_shadow(coded, components=32), None),
    }
    # The gate that half of the model's own steps pass, since an untrained model is never sure.
    sure = [np.exp(h.score) for h in decode.search(decode.plain(graphdef), params, texts[:32])]
    print(f"{'way':<38}{'pieces / CPU s':>16}{'of model':>10}")
    base = 0.0
    for name, way in ways.items():
        if way is None:
            stepper, weights = decode.plain(graphdef), params
        else:
            store, gate = way
            how = retrieval.Retrieval(k=8, gate=float(np.median(sure)) if gate is None else gate)
            stepper = retrieval.stepper(graphdef, how)
            weights = retrieval.Weights(params, store, jnp.float32(10.0), meta=meta)
        speeds = []
        for _ in range(4):  # the first compiles
            start = time.process_time()
            found = decode.search(stepper, weights, texts)
            speeds.append(sum(len(h.pieces) + 1 for h in found) / (time.process_time() - start))
        speed = float(np.median(speeds[1:]))
        base = base or speed
        print(f"{name:<38}{speed:>16.0f}{speed / base:>10.2f}", flush=True)
