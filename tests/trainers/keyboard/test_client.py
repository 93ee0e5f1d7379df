"""Local SGD: a python loop over padded batches says what is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainers.keyboard import data
from trainers.keyboard import batches, client, model

CONFIG = model.ModelConfig(num_tokens=data.WORDS + 4, embedding_size=6, hidden_size=12)


def by_hand(params, rows, *, learning_rate, epochs, batch_size):
    """SGD over the client's batches in order; returns the change of the parameters."""
    local = params
    grad = jax.jit(jax.grad(model.loss), static_argnames="cell")
    for _ in range(epochs):
        for k in range(0, len(rows), batch_size):
            batch = np.zeros((batch_size, data.WIDTH), np.int32)
            batch[: len(rows[k : k + batch_size])] = rows[k : k + batch_size]
            grads = grad(local, batch[:, :-1].T, batch[:, 1:].T, cell="cifg")
            local = jax.tree.map(lambda p, g: p - learning_rate * g, local, grads)
    return jax.tree.map(jnp.subtract, local, params)


@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_equals_sgd_by_hand(one_at_a_time):
    params = model.init_params(CONFIG, seed=0)
    clients = data.clients(sizes=(9, 0, 4))
    batch = batches.pack_round(
        [0, 1, 2], clients, batch_size=4, max_examples=100, chunk_size=1, width=data.WIDTH
    )
    run = jax.jit(
        lambda span: client.local_sgd(
            params,
            jax.tree.map(jnp.asarray, batch.store),
            span,
            learning_rate=0.5,
            epochs=2,
            cell="cifg",
            one_at_a_time=one_at_a_time,
        )
    )
    for place in range(3):
        who = int(batch.cohort.ids[place, 0])
        update, metrics = run(jax.tree.map(lambda x, i=place: jnp.asarray(x[i, 0]), batch.cohort.data))
        want = by_hand(params, clients[who], learning_rate=0.5, epochs=2, batch_size=4)
        for name in params:
            np.testing.assert_allclose(update[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)
        assert int(metrics["batches"]) == 2 * -(-len(clients[who]) // 4)
        if not len(clients[who]):
            assert not any(np.asarray(x).any() for x in update.values())
