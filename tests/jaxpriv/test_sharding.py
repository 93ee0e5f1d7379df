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
