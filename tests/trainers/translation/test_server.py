"""What the server is given, what it does to the order, and what it can neither read nor change."""

import importlib.util
import json
import os
import pathlib
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.trainers.translation.test_protocol import RARE, Setting, as_multiset, facts, rewrite
from trainers.common.errors import InputError
from trainers.translation import crypto, datastore, layout, protocol

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_a_shuffle_keeps_the_pairs_and_no_seed_gives_its_order(tmp_path):
    """Three clients with 4, 0 and 2 pairs, shuffled twice and more often (AC44)."""
    setting, orders = Setting(tmp_path, sizes=(4, 0, 2)), set()
    for number in range(8):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 (whoever seeds the global generators settles nothing)
        report = setting.shuffle(name=f"shuffled{number}")
        assert (report.accepted, report.refused) == (6, {})
        if number < 2:
            assert setting.open(f"shuffled{number}", into=f"joint{number}").accepted == 6
            joint = datastore.open_store(tmp_path / f"joint{number}")
            assert joint.count == 6
            assert as_multiset(joint) == as_multiset(*setting.stores)
        orders.add(layout.read(tmp_path / f"shuffled{number}", layout.SHUFFLED)[1].tobytes())
    assert len(orders) > 1  # eight shuffles of six are one order once in 720^7
    # A generator that a module seeds as it is loaded would give two fresh copies the same order.
    spec = importlib.util.find_spec("trainers.translation.crypto")
    assert spec is not None
    assert spec.loader is not None
    fresh = []
    for _ in range(2):
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name], kept = module, sys.modules[spec.name]  # dataclasses look themselves up
        try:
            spec.loader.exec_module(module)
        finally:
            sys.modules[spec.name] = kept
        fresh.append(module.permutation(1000).tolist())
    assert fresh[0] != fresh[1]


def test_records_may_change_places_but_not_their_parts(tmp_path):
    """What the server sends back: swapped, tampered with, put together from two, and opened with another key (AC48)."""
    setting = Setting(tmp_path)
    setting.shuffle()
    rewrite(setting, lambda sealed: sealed[[1, 0, 2, 3, 4, 5]])
    swapped = setting.open("changed")
    assert (swapped.accepted, swapped.refused, swapped.details) == (6, {}, ())
    assert as_multiset(datastore.open_store(tmp_path / "joint")) == as_multiset(*setting.stores)

    def flipped(sealed):
        sealed[0, 13] ^= 1
        return sealed[:1]

    def joined(sealed):
        sealed[0, 16:18] = sealed[1, 16:18]  # the value of another
        return sealed[:1]

    for number, change in enumerate((flipped, joined)):
        rewrite(setting, change)
        with pytest.raises(InputError, match="could be opened: 1 records: tampered or foreign"):
            setting.open("changed", into=f"none{number}")
    setting.key = crypto.new_data_key()
    with pytest.raises(InputError, match="could be opened: 6 records: tampered or foreign"):
        setting.open(into="none")
    assert not list(tmp_path.glob("none*"))


SERVER = """
import json, sys
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
from trainers.cli import main
status = main(["translation", "shuffle", *sys.argv[1:]])
print(json.dumps([status, opened]))
"""


def test_a_server_process_meets_no_key_and_no_record(tmp_path):
    """Everything that it receives, opens, writes and says, searched for rare ids, raw keys and private keys (AC49).

    Keys travel as they are here, 32 bytes each, without the codes that would hide them from a search.
    """
    home, server = tmp_path / "home", tmp_path / "server"
    home.mkdir()
    server.mkdir()
    plain = facts(coding="none", codebook="", dtype="float32", width=8)
    rng = np.random.default_rng(3)
    secrets = [crypto.generate(name) for name in ("it", "law")]
    members = [secret.public() for secret in secrets]
    made = protocol.make_round(server / "round.json", secrets[0], members, plain, quota=100)
    data_key = protocol.join(made, secrets[1], members)
    hidden = [data_key, RARE.astype("<u2").tobytes(), RARE.astype("<i4").tobytes()]
    for secret in secrets:
        crypto.save_secret(home / f"{secret.name}.secret.json", secret)
        datastore.create(home / secret.name, plain)
        keys, values = rng.standard_normal((20, 8)).astype(np.float32), rng.integers(4, 60_000, 20)
        values[:4] = RARE
        datastore.append(home / secret.name, plain, keys=keys, values=values)
        store = datastore.open_store(home / secret.name)
        protocol.share(server / f"{secret.name}.up", made, data_key, secret, store)
        hidden += [secret.wrap_key, secret.sign_key, *(key.tobytes() for key in keys)]
    at_home = b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    assert sum(text in at_home or text.hex().encode() in at_home for text in hidden) == len(hidden) - 2
    given = ["--round", "round.json", "--uploads", "it.up", "law.up", "--out", "all"]
    said = subprocess.run(
        [sys.executable, "-c", SERVER, *given],
        cwd=server,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=120,
    )
    assert said.returncode == 0, said.stderr
    status, opened = json.loads(said.stdout.splitlines()[-1])
    assert status == 0
    assert {path for path in map(os.path.basename, opened)} >= {"round.json", "it.up", "law.up"}
    assert not [path for path in opened if str(home) in os.path.abspath(server / path)]
    log = b"\n".join([*said.stdout.splitlines()[:-1], said.stderr, " ".join(given).encode()])
    assert b"40 records shuffled" in log
    seen = log + b"".join(path.read_bytes() for path in server.iterdir())
    for text in hidden:
        assert text not in seen
        assert text.hex().encode() not in seen
    assert not any(re.search(rf"\b{value}\b".encode(), seen) for value in RARE)
