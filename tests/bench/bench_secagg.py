"""Secure aggregation's cost: encoding a client's update, masking it, and the bytes, against a plain float32 sum."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import secagg
from tests.bench.timing import cpu_seconds, table
from trainers.common import secagg_protocol as protocol

CLIENTS, NEIGHBOURS = 12, 6
SIZES = (580_144, 3_500_000)


def main():
    rows = []
    for size in SIZES:
        asked = dict(dimension=size, max_norm=1.0, bits=20, num_clients=100)
        scale = secagg.choose_scale(**asked, noise_stddev=0.1)
        encoding = secagg.Encoding(**asked, scale=scale)
        signs = secagg.random_signs(jax.random.key(1), encoding)
        update = jnp.full(size, 0.999 / np.sqrt(size))

        encode = jax.jit(functools.partial(secagg.encode, encoding=encoding))
        encode_s, _ = cpu_seconds(encode, jax.random.key(0), update, signs, repeats=3)
        message = np.asarray(encode(jax.random.key(0), update, signs)[0])
        decode_s, _ = cpu_seconds(
            jax.jit(functools.partial(secagg.decode, encoding=encoding)), jnp.asarray(message), signs, repeats=3
        )  # fmt: skip
        setting = protocol.Setting(
            session=b"bench",
            length=len(message),
            bits=20,
            neighbours=NEIGHBOURS,
            threshold=4,
            min_survivors=6,
        )
        start = time.process_time()
        found = protocol.secure_sum(dict.fromkeys(range(CLIENTS), message), setting, drop_after_share=(3,))
        protocol_s = (time.process_time() - start) / CLIENTS
        rows.append(
            [
                f"{size:,}", f"{encoding.inflated_norm:.6f}", f"{1e3 * encode_s:.0f}", f"{1e3 * protocol_s:.0f}",
                f"{1e3 * decode_s:.0f}", f"{found.bytes_up / CLIENTS / 1e6:.2f}", f"{4 * size / 1e6:.2f}",
            ]
        )  # fmt: skip
    table(
        [
            "parameters",
            "inflated norm",
            "encode ms",
            "protocol ms a client",
            "decode ms",
            "MB up a client",
            "plain MB up",
        ],
        rows,
    )
