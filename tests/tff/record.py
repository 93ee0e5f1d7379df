"""Runs tensorflow-federated on the inputs of `inputs.py` and records what comes out.

In the environment of `requirements.txt`, from the root of the checkout (some minutes):

    PYTHONPATH=. python -m tests.tff.record CLIENTS.sqlite SAMPLE.sqlite

CLIENTS.sqlite is what `python -m tests.tff.write_clients CLIENTS.sqlite` wrote in the environment of jaxpriv; SAMPLE is
the reference data's `data/fedtext/tff_sample.sqlite`. Writes `tests/tff/recorded.json`, which
`tests/trainers/common/test_tff_peer.py` compares with jaxpriv. TFF starts a `worker_binary` that outlives the run;
it is ended here by its number.
"""

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tests.tff import inputs
from tests.tff.content import digest

RECORD = collections.OrderedDict((n, tf.TensorSpec(s, tf.float32)) for n, s in inputs.SHAPES.items())
WIDE = tf.TensorSpec((inputs.COORDINATES,), tf.float32)
OURS = {"tokens": ((), tf.string), "score": ((), tf.int64), "weight": ((3,), tf.float32)}
SAMPLE = {"tokens": ((), tf.string), "score": ((), tf.int64), "type": ((), tf.string)}
DP = tff.aggregators.DifferentiallyPrivateFactory


def process_of(factory, spec):
    return factory.create(
        tff.types.tensorflow_to_type(tf.nest.map_structure(lambda s: (s.dtype, s.shape), spec))
    )


def rounds(process, num_rounds, updates):
    """`(results, metrics)` by round."""
    state, results, metrics = process.initialize(), [], []
    for t in range(num_rounds):
        out = process.next(state, updates(t))
        state = out.state
        results.append(out.result)
        metrics.append(out.measurements["dp_query_metrics"])
    return results, metrics


def ordered(t):
    return [collections.OrderedDict(u) for u in inputs.updates(t)]


def flat(result):
    return np.concatenate([np.ravel(result[name]) for name in inputs.SHAPES]).tolist()


def sums():
    """Averages of clipped updates by round, without noise."""
    factory = DP.tree_aggregation(0.0, inputs.CLIENTS, inputs.CLIP_NORM, RECORD)
    results, _ = rounds(process_of(factory, RECORD), inputs.SUM_ROUNDS, ordered)
    return {"averages": [flat(r) for r in results]}


def adaptive():
    """The same with the clip norm following a quantile: its estimate and the norm in force after each round."""
    factory = DP.tree_adaptive(
        0.0,
        inputs.CLIENTS,
        RECORD,
        restart_warmup=inputs.WARMUP,
        restart_frequency=inputs.PERIOD,
        clipped_count_stddev=0.0,
        **inputs.ADAPTIVE,
    )
    results, metrics = rounds(process_of(factory, RECORD), inputs.ADAPTIVE_ROUNDS, ordered)
    return {
        "averages": [flat(r) for r in results],
        "clip_after": [float(m["current_clip"]) for m in metrics],
        "estimate_after": [float(m["estimate_clip"]) for m in metrics],
    }


def quantile():
    """The estimate after each round, of the quantile process alone."""
    process = tff.aggregators.PrivateQuantileEstimationProcess.no_noise(**inputs.QUANTILE)
    state, estimates = process.initialize(), []
    for t in range(inputs.QUANTILE_ROUNDS):
        state = process.next(state, inputs.values(t).tolist())
        estimates.append(float(process.report(state)))
    return {"estimates": estimates}


def covariance(results):
    """Of the rounds' outputs, over coordinates."""
    x = np.asarray(results, np.float64)
    return (x @ x.T / x.shape[1]).round(6).tolist()


def noise():
    """Covariance of the outputs of zero updates, by round; clip norms in force where they move."""
    zero = lambda t: [np.zeros(inputs.COORDINATES, np.float32)]
    found = {}
    for name, efficient in (("tree", False), ("tree_reduced", True)):
        factory = DP.tree_aggregation(
            1.0, 1.0, inputs.NOISE_CLIP, WIDE, noise_seed=1, use_efficient=efficient
        )
        results, _ = rounds(process_of(factory, WIDE), inputs.NOISE_ROUNDS, zero)
        found[name] = {"covariance": covariance(results)}
    factory = DP.tree_adaptive(
        inputs.NOISE_MULTIPLIER,
        inputs.EXPECTED_CLIENTS,
        WIDE,
        initial_l2_norm_clip=inputs.NOISE_CLIP,
        restart_warmup=inputs.NOISE_WARMUP,
        restart_frequency=inputs.NOISE_PERIOD,
        clipped_count_stddev=inputs.COUNT_STDDEV,
        noise_seed=2,
    )
    results, metrics = rounds(process_of(factory, WIDE), inputs.NOISE_ROUNDS, zero)
    clips = [inputs.NOISE_CLIP, *(float(m["current_clip"]) for m in metrics[:-1])]
    scaled = [np.asarray(r) * inputs.EXPECTED_CLIENTS / c for r, c in zip(results, clips)]
    found["adaptive"] = {"covariance_over_clip_squared": covariance(scaled), "clip_in_force": clips}
    return found


def reader(path, features, splits):
    """What TFF reads of these features: clients of each split, and one digest over all examples."""
    spec = {name: tf.TensorSpec(shape, dtype) for name, (shape, dtype) in features.items()}
    found, everything = {}, []
    for split in splits:
        data = tff.simulation.datasets.load_and_parse_sql_client_data(str(path), spec, split)
        found[split] = len(data.client_ids)
        for client in sorted(data.client_ids):
            for example in data.create_tf_dataset_for_client(client):
                everything.append({"split": split, "client": client, **plain(example)})
    return {"clients": found, "examples": len(everything), "digest": digest(everything)}


def plain(example):
    """Tensors as Python values, bytes as text."""
    as_plain = lambda v: v.decode("utf-8") if isinstance(v, bytes) else v.tolist()
    return {name: as_plain(value.numpy()) for name, value in example.items()}


def children():
    """Numbers of this process's children."""
    found = subprocess.run(
        ["ps", "-o", "pid=,comm=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    rows = [line.split(None, 1) for line in found.stdout.splitlines()]
    return [int(pid) for pid, name in rows if name.startswith("worker_binary")]


def main(ours, sample):
    recorded = {
        "versions": {"tensorflow-federated": tff.__version__, "tensorflow": tf.__version__},
        "sums": sums(),
        "adaptive": adaptive(),
        "quantile": quantile(),
        "noise": noise(),
        "reader": {
            "ours": reader(ours, OURS, ("train", "test")),
            "sample": reader(sample, SAMPLE, ("train", "validation", "test")),
        },
    }
    target = pathlib.Path(__file__).with_name("recorded.json")
    target.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:
        for pid in children():
            os.kill(pid, signal.SIGKILL)
