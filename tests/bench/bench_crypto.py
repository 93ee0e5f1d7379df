"""Sealing and opening of records, shuffling, wrapping a data key: CPU seconds on one core, bytes a record."""

import tempfile
import time

import numpy as np

from tests.bench.timing import table
from trainers.translation import crypto, datastore, layout, protocol

RECORDS, CODES = 1_000_000, 64
REPEATS = 3


def best(function):
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        out = function()
        times.append(time.process_time() - start)
    return out, sorted(times)[len(times) // 2]


def main():
    facts = datastore.Facts(
        model="m",
        dim=256,
        width=CODES,
        dtype="uint8",
        coding="pq",
        codebook="c",
        key="output",
        vocabulary_size=8000,
    )
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 256, (RECORDS, CODES), np.uint8)
    values = rng.integers(0, 8000, RECORDS)
    records = layout.pack(facts, keys, values)
    key, context = crypto.new_data_key(), bytes(32)
    sealed, seal_seconds = best(lambda: crypto.seal(key, records, context=context))
    _, open_seconds = best(lambda: crypto.unseal(key, sealed, context=context))
    secrets = [crypto.generate(f"client {i}") for i in range(3)]
    members = [s.public() for s in secrets]
    wrapped, wrap_seconds = best(lambda: crypto.wrap(key, members[0], context=context))
    _, unwrap_seconds = best(lambda: crypto.unwrap(wrapped, secrets[0], context=context))
    with tempfile.TemporaryDirectory() as folder:
        made = protocol.make_round(f"{folder}/round", secrets[0], members, facts, quota=RECORDS)
        third = RECORDS // 3
        for i, secret in enumerate(secrets):
            part = sealed[i * third : (i + 1) * third]
            header = {"round": made.id, "client": secret.name, "upload": "0" * 32}
            layout.write(
                f"{folder}/{i}", layout.UPLOAD, header, part, sign=lambda m, s=secret: crypto.sign(s, m)
            )
        report, shuffle_seconds = best(
            lambda: protocol.shuffle(f"{folder}/out", made, [f"{folder}/{i}" for i in range(3)])
        )
    rows = [
        ["seal (target < 3 s)", f"{seal_seconds:.2f}"],
        ["open (target < 3 s)", f"{open_seconds:.2f}"],
        ["shuffle of 3 uploads: verify, join, permute, write", f"{shuffle_seconds:.2f}"],
        ["wrap the data key for one member", f"{wrap_seconds:.5f}"],
        ["unwrap it", f"{unwrap_seconds:.5f}"],
    ]
    table([f"{RECORDS:,} records of {records.shape[1]} bytes", "CPU s"], rows)
    print(f"{sealed.shape[1]} bytes a sealed record; shuffled file {report.bytes_written:,} bytes")
