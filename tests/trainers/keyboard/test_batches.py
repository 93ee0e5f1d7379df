"""Packing: nothing is lost, nothing is mixed, shapes stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainers.keyboard import data
from trainers.keyboard import batches


def pack(clients, **settings):
    settings = {"batch_size": 4, "max_examples": 100, "chunk_size": 1, "width": data.WIDTH} | settings
    return batches.pack_round(np.arange(len(clients)), clients, **settings)


def unpacked(batch, i):
    """The sentences of batch `i` as a sorted list of token tuples."""
    one = batches.Packed(*(jnp.asarray(x[i]) for x in batch.store))
    inputs, targets = (np.asarray(x) for x in batches.unpack(one))
    rows = np.concatenate([inputs[:1], targets]).T
    # An input that has no target is not stored, so each sentence ends with its last target.
    return sorted(tuple(r) for r in rows if r.any()), inputs, targets


def test_every_sentence_comes_back_in_its_own_clients_batches():
    clients = data.clients()
    batch = pack(clients)
    spans = {
        int(i): (int(f), int(c))
        for i, f, c in zip(
            batch.cohort.ids[:, 0], batch.cohort.data.first[:, 0], batch.cohort.data.count[:, 0]
        )
    }
    for client, rows in enumerate(clients):
        first, count = spans[client]
        assert count == -(-len(rows) // 4)
        for k in range(count):
            want = sorted(tuple(r) for r in rows[4 * k : 4 * k + 4])
            got, inputs, targets = unpacked(batch, first + k)
            assert got == want
            np.testing.assert_array_equal(targets[:-1][inputs[1:] != 0], inputs[1:][inputs[1:] != 0])
    assert int(batch.cohort.num_examples.sum()) == sum(len(c) for c in clients)


def test_shapes_are_the_same_for_different_rounds():
    a = pack(data.clients(0), num_clients=10)
    b = pack(data.clients(1, sizes=(30, 2, 8)), num_clients=10)
    shapes = lambda batch: [x.shape for x in (*batch.store, batch.cohort.ids)]
    assert shapes(a) == shapes(b)


def test_a_client_with_a_million_tokens_is_capped_and_memory_stays_flat():
    rng = np.random.default_rng(0)
    row = data.sentence(rng, 6)
    batch = pack([np.tile(row, (200_000, 1)), row[None]], max_examples=256, batch_size=16)
    assert batch.cohort.num_examples.ravel().tolist() == [256, 1]
    assert sum(x.nbytes for x in batch.store) < 1_000_000


def test_sentences_without_a_target_are_left_out():
    only_begin = np.zeros((3, data.WIDTH), np.int32)
    only_begin[:, 0] = data.WORDS + 2
    batch = pack([only_begin, data.clients()[0]])
    assert sorted(batch.cohort.num_examples.ravel().tolist()) == [0, 5]


def test_refusals():
    with pytest.raises(ValueError, match="same width"):
        pack([np.ones((2, 5), np.int32), np.ones((2, 6), np.int32)])
    with pytest.raises(ValueError, match="one id a client"):
        batches.pack_round([1], [], batch_size=4, max_examples=9, chunk_size=1, width=8)
    with pytest.raises(ValueError, match="batch_size and max_examples"):
        pack(data.clients(), batch_size=0)


def test_parts_leave_out_sentences_without_a_target_once(monkeypatch):
    clients = data.clients(3, sizes=(9, 1, 4))
    empty = np.zeros((2, data.WIDTH), np.int32)
    clients[0] = np.concatenate([clients[0][:1], empty, clients[0][1:]])
    settings = {"batch_size": 4, "max_examples": 100, "chunk_size": 1, "width": data.WIDTH, "num_clients": 3}
    looked_at, real = [], batches._with_targets
    monkeypatch.setattr(
        batches, "_with_targets", lambda rows, width: looked_at.append(1) or real(rows, width)
    )
    (part,) = batches.pack_parts(np.arange(3), clients, num_parts=1, **settings)
    assert len(looked_at) == len(clients)
    whole = batches.pack_round(np.arange(3), clients, **settings)
    jax.tree.map(np.testing.assert_array_equal, part, whole)
    assert int(part.cohort.num_examples.sum()) == 14
    with pytest.raises(ValueError, match="batch_size and max_examples"):
        batches.pack_parts(np.arange(3), clients, num_parts=1, **(settings | {"batch_size": 0}))


def test_parts_share_the_work_and_have_the_same_shapes():
    clients = data.clients(3, sizes=(40, 1, 0, 9, 4, 2, 17, 8))
    settings = {"batch_size": 4, "max_examples": 100, "chunk_size": 1, "width": data.WIDTH}
    parts = batches.pack_parts(np.arange(8), clients, num_parts=3, num_clients=8, **settings)
    assert len({tuple(np.shape(x) for x in jax.tree.leaves(part)) for part in parts}) == 1
    ids = [part.cohort.ids[part.cohort.present] for part in parts]
    assert sorted(np.concatenate(ids)) == list(range(8))
    work = [int(part.cohort.data.count.sum()) for part in parts]
    whole = batches.pack_round(np.arange(8), clients, num_clients=8, **settings)
    assert sum(work) == int(whole.cohort.data.count.sum())
    assert max(work) == 10  # the client with 40 examples, alone
    # Other processes may need longer stores.
    longer = batches.pack_parts(
        np.arange(8), clients, num_parts=3, num_clients=8, largest=lambda n: 300, **settings
    )
    assert {part.store.live.shape[0] for part in longer} == {512}
