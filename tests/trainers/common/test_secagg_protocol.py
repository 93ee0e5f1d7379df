"""Masked sums: exact through drop-outs, one message uniform, refusals below the thresholds."""

import contextlib
import dataclasses
import random

import numpy as np
import pytest
from scipy import stats

from trainers.common import secagg_protocol as protocol
from trainers.common.errors import InputError

SETTING = protocol.Setting(
    session=b"run 1 round 3", length=40, bits=20, neighbours=6, threshold=4, min_survivors=5
)


def vectors(num, setting=SETTING, seed=0):
    rng = np.random.default_rng(seed)
    return {10 * i + 3: rng.integers(0, 2**setting.bits, setting.length, np.uint32) for i in range(num)}


def plain_sum(given, who, setting=SETTING):
    total = sum(given[i].astype(object) for i in who)
    return np.array(total % 2**setting.bits, np.uint32)


@pytest.mark.parametrize("bits", [1, 16, 20, 32])
def test_sum_is_exact_without_and_with_drop_outs(bits):
    # 8 neighbours less the 3 that leave are still the threshold, whatever the graph.
    setting = dataclasses.replace(SETTING, bits=bits, neighbours=8, threshold=5)
    given = vectors(14, setting)
    for dropped, silent in ((), ()), ((13, 53, 103), ()), ((13,), (23, 63)):
        found = protocol.secure_sum(given, setting, drop_after_share=dropped, drop_after_mask=silent)
        assert found.survivors == [i for i in sorted(given) if i not in dropped]
        np.testing.assert_array_equal(found.total, plain_sum(given, found.survivors, setting))


def test_few_clients_are_all_neighbours():
    setting = dataclasses.replace(SETTING, min_survivors=3)
    given = vectors(5)
    found = protocol.secure_sum(given, setting)
    np.testing.assert_array_equal(found.total, plain_sum(given, given))


def test_graph_is_regular_and_mutual():
    graph = protocol.neighbour_graph(range(30), 6, random.Random(0).shuffle)
    assert all(len(set(others)) == 6 and i not in others for i, others in graph.items())
    assert all(i in graph[o] for i, others in graph.items() for o in others)
    assert graph != protocol.neighbour_graph(range(30), 6, random.Random(1).shuffle)


def drive(given, setting):
    """All messages of one run up to the masked vectors."""
    graph = protocol.neighbour_graph(sorted(given), setting.neighbours, random.Random(0).shuffle)
    clients = {i: protocol.Client(i, setting) for i in graph}
    keys = {i: c.advertise() for i, c in clients.items()}
    sealed = {i: c.share({o: keys[o] for o in graph[i]}) for i, c in clients.items()}
    boxes = {i: {o: sealed[o][i] for o in graph[i]} for i in clients}
    return graph, clients, keys, boxes


def test_one_masked_vector_is_uniform():
    """Of a vector of zeros: chi-square over values, over bits, and from entry to entry."""
    setting = dataclasses.replace(SETTING, length=200_000, bits=8)
    given = {i: np.zeros(setting.length, np.uint32) for i in range(8)}
    _, clients, _, boxes = drive(given, setting)
    masked = [clients[i].mask(given[i], boxes[i]) for i in (0, 1)]
    for message in (masked[0], masked[1], (masked[0] + masked[1]) % 256):
        assert stats.chisquare(np.bincount(message, minlength=256)).pvalue > 1e-4
        pairs = message[:-1].astype(int) % 16 * 16 + message[1:] % 16
        assert stats.chisquare(np.bincount(pairs, minlength=256)).pvalue > 1e-4
    # The check sees a vector that is not masked.
    assert stats.chisquare(np.bincount(given[0], minlength=256)).pvalue < 1e-10


def test_even_all_other_parties_masks_do_not_open_a_delivered_vector():
    """A server that calls a client dropped learns its pairwise masks: the self mask stays."""
    given = vectors(8)
    graph, clients, keys, boxes = drive(given, SETTING)
    masked = {i: c.mask(given[i], boxes[i]) for i, c in clients.items()}
    victim = 3
    others = [i for i in clients if i != victim]
    reveals = {i: clients[i].reveal(others) for i in others}
    shares = [r.mask_keys[victim] for r in reveals.values() if victim in r.mask_keys]
    private = protocol.X25519PrivateKey.from_private_bytes(protocol.join_secret(shares[:4]))
    opened = masked[victim].copy()
    for other in graph[victim]:
        key = protocol._pair_key(private, keys[other].mask, SETTING, victim, other)
        opened = opened - protocol._signed(victim, other, protocol.mask_stream(key, SETTING))
    opened &= np.uint32(2**SETTING.bits - 1)
    assert (opened == given[victim]).mean() < 0.1
    assert all(victim not in r.seeds for r in reveals.values())  # and no seed share came with the key share


def test_masks_use_all_32_bytes_of_their_secrets():
    """Two secrets whose 4-byte words have the same exclusive or: folded to 32 bits they would collide (AC19)."""
    first = bytes(range(32))
    words = np.frombuffer(first, np.uint32).copy()
    words[0] ^= 0xDEADBEEF
    words[5] ^= 0xDEADBEEF
    second = words.tobytes()
    fold = lambda secret: np.bitwise_xor.reduce(np.frombuffer(secret, np.uint32))
    assert fold(first) == fold(second)
    masks = [protocol.mask_stream(secret, SETTING) for secret in (first, second)]
    assert (masks[0] == masks[1]).mean() < 0.1
    np.testing.assert_array_equal(masks[0], protocol.mask_stream(first, SETTING))


def test_sums_of_different_sessions_share_no_mask():
    keys = {protocol.derive(bytes(32), b"mask", session, 1, 2) for session in (b"round 1", b"round 2")}
    assert len(keys) == 2
    assert protocol.derive(bytes(32), b"mask", b"s", 1, 2) == protocol.derive(bytes(32), b"mask", b"s", 2, 1)
    assert protocol.derive(bytes(32), b"mask", b"s", 1, 2) != protocol.derive(
        bytes(32), b"channel", b"s", 1, 2
    )


def test_secret_shares_rebuild_at_the_threshold_and_say_nothing_below():
    secret = bytes([255]) * 32
    shares = protocol.split_secret(secret, 7, 4)
    for chosen in (shares[:4], shares[3:], shares[::2]):
        assert protocol.join_secret(chosen) == secret
    with contextlib.suppress(InputError):  # or a number that is no 32 bytes
        assert protocol.join_secret(shares[:3]) != secret
    # Any three shares fit every secret: a polynomial of degree 3 has one more freedom.
    assert len({protocol.split_secret(secret, 7, 4)[0][1] for _ in range(5)}) == 5


def test_too_few_survivors_are_refused():
    given = vectors(8)
    with pytest.raises(
        InputError, match=r"4 vectors were delivered, fewer than the 5 needed; .* nothing is revealed"
    ):
        protocol.secure_sum(given, SETTING, drop_after_share=(3, 13, 23, 33))
    graph, clients, keys, _boxes = drive(given, SETTING)
    with pytest.raises(InputError, match="4 vectors were delivered"):
        protocol.unmask(np.zeros(40, np.uint32), SETTING, graph, keys, clients, list(clients)[:4], {})


def test_too_few_shares_are_refused():
    with pytest.raises(
        InputError, match=r"shares of client \d+'s self mask are left, fewer than the threshold of 4"
    ):
        protocol.secure_sum(vectors(14), SETTING, drop_after_mask=range(3, 100, 10))


def test_a_client_reveals_once_and_never_both_shares():
    given = vectors(8)
    _, clients, _, boxes = drive(given, SETTING)
    for i, client in clients.items():
        client.mask(given[i], boxes[i])
    reveal = clients[3].reveal([i for i in clients if i != 13])
    assert not set(reveal.seeds) & set(reveal.mask_keys)
    assert set(reveal.mask_keys) <= {13}
    with pytest.raises(InputError, match="client 3 was asked for message 4 out of turn"):
        clients[3].reveal(list(clients))
    with pytest.raises(InputError, match="client 13 delivered, but the server says it did not"):
        clients[13].reveal([i for i in clients if i != 13])


def test_tampered_and_foreign_shares_are_refused():
    given = vectors(8)
    graph, clients, _, boxes = drive(given, SETTING)
    other = graph[3][0]
    bad = bytearray(boxes[3][other])
    bad[-1] ^= 1
    with pytest.raises(InputError, match=f"share that client 3 got of client {other} was tampered with"):
        clients[3].mask(given[3], boxes[3] | {other: bytes(bad)})
    with pytest.raises(InputError, match="no neighbour"):
        clients[13].mask(given[13], {999: b"x" * 90})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(bits=33), "bits must be from 1 to 32"),
        (dict(length=0), "length"),
        (dict(neighbours=5), "neighbours must be even"),
        (dict(threshold=3), "threshold must be more than half of the neighbours"),
        (dict(threshold=7), "threshold must be more than half"),
        (dict(min_survivors=1), "a sum of one is that one"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SETTING, **change)


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (np.zeros(39, np.uint32), "must be 40 uint32 entries"),
        (np.zeros(40, np.int64), "must be 40 uint32 entries"),
        (np.full(40, 2**20, np.uint32), "entries beyond 20 bits"),
    ],
)
def test_vectors_that_cannot_be_summed_are_refused(vector, message):
    _, clients, _, boxes = drive(vectors(8), SETTING)
    with pytest.raises(InputError, match=message):
        clients[3].mask(vector, boxes[3])


def test_a_client_id_that_comes_twice_is_refused():
    with pytest.raises(InputError, match="comes twice"):
        protocol.neighbour_graph([1, 2, 2], 2, random.Random(0).shuffle)


def test_bytes_are_counted():
    setting = dataclasses.replace(SETTING, length=10_000)
    found = protocol.secure_sum(vectors(12, setting), setting)
    vectors_only = 12 * 10_000 * 20 // 8
    assert vectors_only < found.bytes_up < vectors_only + 12 * 2000  # keys and shares are small beside them
    assert 0 < found.bytes_down < 12 * 2000
