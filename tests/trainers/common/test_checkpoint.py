"""Checkpoints: exact, private, never half of one."""

import concurrent.futures
import shutil
import signal
import stat
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainers.common import checkpoint
from trainers.common.errors import InputError


def state(value: float):
    return {
        "params": {"w": jnp.full((3, 2), value), "b": jnp.zeros((2,), jnp.int32)},
        "key": jax.random.key(7),
        "timers": np.arange(5, dtype=np.int64) + 2**40,
        "count": jnp.int32(int(value)),
    }


def bits(tree):
    def plain(leaf):
        is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [plain(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_what_is_loaded_is_what_was_saved(tmp_path):
    checkpoint.save(tmp_path / "c", 3, state(1.5), facts={"z": 7.0})
    assert bits(checkpoint.load(tmp_path / "c", 3, state(0.0))) == bits(state(1.5))
    assert checkpoint.read_facts(tmp_path / "c", 3) == {"z": 7.0}


def test_only_the_owner_can_read_the_folder(tmp_path):
    checkpoint.save(tmp_path / "c", 0, state(1), facts={})
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700


def array_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "delete facts", "only temporary"])
def test_a_damaged_newest_checkpoint_is_never_used(tmp_path, damage):
    """Of rounds 10 and 20 that of 20 is damaged: 10 is used, with a warning, and 20 can be saved again (AC30)."""
    for step in (10, 20):
        checkpoint.save(tmp_path, step, state(step), facts={"step": step})
    victim = array_file(tmp_path / "20" / "arrays")
    if damage == "delete":
        victim.unlink()
    elif damage == "truncate":
        victim.write_bytes(b"")
    elif damage == "flip":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif damage == "delete facts":
        (tmp_path / "20" / "facts.json").unlink()
    else:
        shutil.move(tmp_path / "20", tmp_path / ".aside-20")
    said = "was not finished" if damage == "only temporary" else "is incomplete or damaged"
    with pytest.warns(UserWarning, match=f"checkpoint 20 in .* {said}; it is not used"):
        assert checkpoint.latest(tmp_path) == 10
    with pytest.raises(InputError, match="20 is incomplete"):
        checkpoint.load(tmp_path, 20, state(0))
    assert bits(checkpoint.load(tmp_path, 10, state(0))) == bits(state(10))
    checkpoint.save(tmp_path, 20, state(21), facts={})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.latest(tmp_path) == 20
    assert not list(tmp_path.glob(".aside-*"))
    assert bits(checkpoint.load(tmp_path, 20, state(0))) == bits(state(21))


def test_a_state_of_another_shape_is_refused(tmp_path):
    checkpoint.save(tmp_path, 1, state(1), facts={})
    other = state(1) | {"params": {"w": jnp.zeros((3, 3)), "b": jnp.zeros((2,), jnp.int32)}}
    with pytest.raises(InputError, match="this run needs"):
        checkpoint.load(tmp_path, 1, other)
    with pytest.raises(InputError, match="another kind of state"):
        checkpoint.load(tmp_path, 1, {"params": jnp.zeros(3)})


def test_a_saved_state_is_not_touched_by_later_donation(tmp_path):
    """Round t + 1 starts with donated parameters once round t is saved: the file holds those of t (AC32)."""
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    x = jnp.arange(100_000, dtype=jnp.float32)
    checkpoint.save(tmp_path, 0, {"x": x}, facts={})
    step(x).block_until_ready()
    loaded = checkpoint.load(tmp_path, 0, {"x": jnp.zeros(100_000)})["x"]
    np.testing.assert_array_equal(loaded, np.arange(100_000, dtype=np.float32))


def test_a_part_can_be_loaded_by_its_path(tmp_path):
    checkpoint.save(tmp_path, 1, state(1.5), facts={})
    params = checkpoint.load(tmp_path, 1, state(0.0)["params"], under="['params']")
    assert bits(params) == bits(state(1.5)["params"])


def test_old_checkpoints_are_thinned_out(tmp_path):
    for step in range(5):
        checkpoint.save(tmp_path, step, {"x": jnp.float32(step)}, facts={}, keep=2)
    assert checkpoint.steps(tmp_path) == [3, 4]


def test_an_interrupt_waits_until_the_checkpoint_is_whole(tmp_path, monkeypatch):
    real, before = checkpoint.ocp.save, signal.getsignal(signal.SIGINT)

    def save(*rest):
        signal.raise_signal(signal.SIGINT)
        real(*rest)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp, "save", save)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 7, state(1.5), facts={})
    assert signal.getsignal(signal.SIGINT) is before
    assert bits(checkpoint.load(tmp_path, 7, state(0.0))) == bits(state(1.5))


def test_runs_side_by_side_save_at_the_same_moment(tmp_path):
    start = threading.Barrier(3)

    def run(number):
        for step in range(5):
            start.wait(10)
            checkpoint.save(tmp_path / str(number), step, state(float(number)), facts={})

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    for number in range(3):
        assert bits(checkpoint.load(tmp_path / str(number), 4, state(9.0))) == bits(state(float(number)))
