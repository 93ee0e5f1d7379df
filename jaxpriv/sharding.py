"""The `clients` axis of a device mesh: where a cohort lies and what every device holds a copy of."""

from collections.abc import Sequence

import jax
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
    """Puts a whole copy of every leaf on every device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


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
