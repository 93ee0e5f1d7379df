"""Where arrays lie on a mesh of clients."""

import jax
import numpy as np
import pytest

from jaxpriv import cohort, sharding


def test_a_chunk_is_spread_over_the_devices_and_the_rest_is_copied():
    mesh = sharding.make_mesh()
    assert dict(mesh.shape) == {"clients": 8}
    arranged = cohort.arrange(np.arange(20), np.ones(20, int), {"x": np.zeros((20, 3))}, chunk_size=16)
    placed = sharding.place_cohort(arranged, mesh)
    assert {s.data.shape for s in placed.data["x"].addressable_shards} == {(2, 2, 3)}
    np.testing.assert_array_equal(placed.ids, arranged.ids)
    copied = sharding.replicate({"w": np.arange(5.0)}, mesh)
    assert len(copied["w"].addressable_shards) == 8
    assert all(s.data.shape == (5,) for s in copied["w"].addressable_shards)


def test_a_mesh_over_some_devices():
    assert sharding.make_mesh(jax.devices()[:2]).size == 2
    with pytest.raises(ValueError, match="at least one device"):
        sharding.make_mesh([])


def test_chunks_that_do_not_divide_are_refused_with_the_remedy():
    arranged = cohort.arrange(np.arange(4), np.ones(4, int), {}, chunk_size=3)
    with pytest.raises(ValueError, match="multiple of 8"):
        sharding.place_cohort(arranged, sharding.make_mesh())


def test_every_device_works_on_its_own_part_and_only_sums_leave():
    mesh = sharding.make_mesh(jax.devices()[:4])
    parts = [{"x": np.full(3, i + 1.0, np.float32), "steps": np.int32(i)} for i in range(4)]
    placed = sharding.place_parts(parts, mesh)
    assert {s.data.shape for s in placed["x"].addressable_shards} == {(1, 3)}

    def work(shared, part):
        """A loop of the device's own length over gradients by something shared."""
        slope = jax.grad(lambda w: jax.numpy.sum(w * part["x"]))(shared)
        return jax.lax.fori_loop(0, part["steps"], lambda _, total: total + slope, jax.numpy.zeros(3))

    shared = sharding.replicate(np.ones(3, np.float32), mesh)
    total = jax.jit(lambda s, p: sharding.sum_parts(work, s, p, mesh))(shared, placed)
    # A gradient summed over the devices would be four times larger.
    np.testing.assert_array_equal(total, np.full(3, sum((i + 1.0) * i for i in range(4))))
    assert len(total.addressable_shards) == 4
    own = sharding.local_copy({"total": total, "host": np.arange(2), "key": jax.random.key(1)})
    assert len(own["total"].devices()) == 1
    np.testing.assert_array_equal(own["total"], total)
    assert jax.random.key_data(own["key"]).tolist() == jax.random.key_data(jax.random.key(1)).tolist()
    with pytest.raises(ValueError, match="got 3 parts for 4 devices"):
        sharding.place_parts(parts[:3], mesh)
