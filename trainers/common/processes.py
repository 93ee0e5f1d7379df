"""Several processes that compute one run together, on one host or many (multi-controller JAX).

Every process runs the same program and sees the run folder, which the first alone writes; what it decides is copied
to the others, and each adds the part of its own clients.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from trainers.common import last_words
from trainers.common.errors import InputError
from trainers.common.host_arrays import from_host, to_host

T = TypeVar("T")
_MOST = 10_000
_HEARTBEAT = 25  # seconds without a sign of life, after which a process counts as gone
_PATIENCE = 7 * 24 * 3600  # seconds that one waits for the others at the end: as long as an evaluation takes
ENDED = "another process of this run has ended; start all of them again with --resume"
# What the collectives, and JAX's coordination of the processes, say when a process is gone.
_GONE = re.compile(r"Gloo|NCCL|[Cc]oordination|[Bb]arrier|UNAVAILABLE")


def check(coordinator: str | None, num_processes: int, process_id: int) -> None:
    """Refuses options that name no group of processes.

    Raises:
      InputError: with the option and the remedy.
    """
    if num_processes > _MOST:
        raise InputError(f"--num-processes must be at most {_MOST}, got {num_processes}")
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise InputError(
            f"--process-id must be from 0 to --num-processes - 1, got {process_id} of {num_processes}"
        )
    if (coordinator is None) != (num_processes == 1):
        raise InputError(
            "several processes need both --num-processes and --coordinator HOST:PORT (an address of process 0), "
            f"got {num_processes} and {coordinator}"
        )
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise InputError(f"--coordinator must be HOST:PORT, got {coordinator}")


def start(coordinator: str, num_processes: int, process_id: int) -> None:
    """Joins the group and waits until all are there; before anything else uses jax.

    Raises:
      InputError: the others could not be reached.
    """
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=num_processes,
            process_id=process_id,
            heartbeat_timeout_seconds=_HEARTBEAT,
            shutdown_timeout_seconds=_PATIENCE,
        )
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"process {process_id} of {num_processes} found no group at {coordinator} ({reason}); start all of them "
            "within five minutes, with the same --coordinator"
        ) from error
    last_words.install(ENDED)


def is_first() -> bool:
    """Whether this process owns the run folder; True where there is only one."""
    return jax.process_index() == 0


def largest(number: int) -> int:
    """The largest of all processes' numbers (below 2^31), in every process."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.asarray(number, np.int32))))


def all_same(text: str) -> bool:
    """Whether every process has the same text; all ask together."""
    if jax.process_count() == 1:
        return True
    own = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    every = np.asarray(multihost_utils.process_allgather(own))
    return bool((every == own).all())


def from_first(tree: T) -> T:
    """The first process's arrays and keys, bit for bit, in every process; all pass trees of the same shapes."""
    if jax.process_count() == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    hosts = [to_host(x) for x in leaves]
    own = np.frombuffer(b"".join(x.tobytes() for x in hosts), np.uint8)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(own)).tobytes()
    out, at = [], 0
    for leaf, host in zip(leaves, hosts, strict=True):
        value = np.frombuffer(sent, host.dtype, host.size, at).reshape(host.shape)
        at += host.nbytes
        out.append(from_host(value, leaf))
    return jax.tree.unflatten(structure, out)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A part after which every process goes on or none does: bad input of one ends all, instead of a wait."""
    problem = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = error
    stopped = largest(int(problem is not None))
    if problem is not None:
        raise problem
    if stopped:
        raise InputError("another process of this run stopped; its message says why")


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """A part during which every process sees soon that another has ended, and how it ends itself.

    An `InputError` is raised by all of them alike. Any other error is one's own: the others wait for this process, so
    it ends at once when its message is out, without the usual farewell, and they see that it is gone.

    Raises:
      InputError: another process is gone.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        if isinstance(error, (ValueError, RuntimeError)) and _GONE.search(str(error)):
            last_words.leave_at_exit(2)
            raise InputError(ENDED) from error
        bug = not isinstance(error, (KeyboardInterrupt, ValueError, OSError, MemoryError))
        last_words.leave_at_exit(130 if isinstance(error, KeyboardInterrupt) else 1 if bug else 2)
        raise
