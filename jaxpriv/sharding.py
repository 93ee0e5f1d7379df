"""The `clients` axis of a device mesh: where a cohort lies and what every device holds a copy of."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpriv.cohort import Cohort

AXIS = "clients"


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the one axis `clients` over `devices` (all of them, of all processes, by default)."""
    devices = tuple(jax.devices() if devices is None else devices)
    if not devices:
        raise ValueError("a mesh needs at least one device, got devices=()")
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts a whole copy of every leaf on every device; with several processes each must pass the same values."""
    layout = NamedSharding(mesh, PartitionSpec())
    if layout.is_fully_addressable:
        return jax.device_put(tree, layout)

    def place(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(place(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        pieces = [jax.device_put(x, device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(pieces[0].shape, layout, pieces)

    return jax.tree.map(place, tree)


def local_copy(tree: PyTree) -> PyTree:
    """This process's own copy of replicated leaves, on one device: for work that other processes have no part in."""
    return jax.tree.map(lambda x: x.addressable_shards[0].data if isinstance(x, jax.Array) else x, tree)


def place_parts(parts: Sequence[PyTree], mesh: Mesh) -> PyTree:
    """Gives each device of this process its own part: `[...]` leaves become `[devices, ...]` over the mesh.

    Args:
      parts: one a device of this process, in the mesh's order; of the same shapes, in every process.
    """
    own = mesh.local_devices
    if len(parts) != len(own):
        raise ValueError(f"one part a device of this process, got {len(parts)} parts for {len(own)} devices")
    layout = NamedSharding(mesh, PartitionSpec(AXIS))

    def place(*leaves):
        pieces = [jax.device_put(np.asarray(x)[None], device) for x, device in zip(leaves, own, strict=True)]
        return jax.make_array_from_single_device_arrays((mesh.size, *pieces[0].shape[1:]), layout, pieces)

    return jax.tree.map(place, *parts)


def sum_parts(function: Callable[[Any, Any], PyTree], shared: PyTree, parts: PyTree, mesh: Mesh) -> PyTree:
    """The sum over devices of `function(shared, part)`, each on its own part of `[devices, ...]` leaves.

    Every device runs `function` by itself, with loops as long as its own part needs. Gradients taken inside are the
    device's own: nothing is differentiated across devices, and the sum is the only exchange.

    Args:
      shared: given to every device whole. `function` should close over no other array.
    """

    def on_each(shared, parts):
        return lax.psum(function(shared, jax.tree.map(lambda x: x[0], parts)), AXIS)

    # Without the check for varying values: with it a gradient by something replicated would silently be summed.
    whole, split = PartitionSpec(), PartitionSpec(AXIS)
    mapped = jax.shard_map(on_each, mesh=mesh, in_specs=(whole, split), out_specs=whole, check_vma=False)
    return mapped(shared, parts)


def place_cohort(cohort: Cohort, mesh: Mesh) -> Cohort:
    """Spreads the clients of every chunk over the mesh: device d computes its part of each chunk.

    `[chunks, clients, ...]` is split along `clients`, whose size must be a multiple of the number of devices.
    """
    width = cohort.present.shape[1]
    if width % mesh.size:
        raise ValueError(
            f"chunks of {width} clients do not spread evenly over {mesh.size} devices;"
            f" use a chunk_size that is a multiple of {mesh.size}"
        )
    return jax.device_put(cohort, NamedSharding(mesh, PartitionSpec(None, AXIS)))
