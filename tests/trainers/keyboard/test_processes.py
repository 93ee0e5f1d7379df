"""Two processes that compute one run (jax.distributed): the result of one process, and the same bits when resumed."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.trainers.keyboard import toy, two_processes
from trainers.common import checkpoint, host_arrays, processes
from trainers.common.errors import InputError
from trainers.keyboard import corpus, session
from trainers.keyboard.train import Run

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """`(folder, the two processes' outputs)`; the runs of one process are made beside them."""
    folder = tmp_path_factory.mktemp("processes")
    toy.config(folder)  # writes the data
    for i in range(2):  # what one of them would read by mistake
        (folder / f"host{i}").mkdir()
        toy.write_clients(folder / f"host{i}" / "clients.jsonl", seed=i)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tests.trainers.keyboard.two_processes"]
    logs = [folder / f"log{i}" for i in range(2)]
    started = []
    for i, log in enumerate(logs):
        with open(log, "w", encoding="utf-8") as out:
            started.append(
                subprocess.Popen(
                    [*command, str(i), str(port), str(folder)], stdout=out, stderr=out, cwd=ROOT, env=env
                )
            )
    try:
        session.train(toy.config(folder, "one", chunk_size=1))
        session.train(two_processes.noise_only(folder, "one_noise"))
        for process in started:
            process.wait(timeout=900)
    finally:
        for process in started:
            process.kill()
    outputs = [log.read_text(encoding="utf-8") for log in logs]
    assert [process.returncode for process in started] == [0, 0], "\n\n".join(out[-2000:] for out in outputs)
    return folder, outputs


def state(config):
    """The last checkpoint, as arrays by path."""
    made = Run(config, corpus.load(config), pathlib.Path(config.run_dir))
    tree = checkpoint.load(made.checkpoints, config.rounds, made.start())
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): host_arrays.to_host(leaf) for path, leaf in leaves}


def test_two_processes_give_the_result_of_one(both):
    """Both end with status 0, whatever greetings ("[Gloo] Rank ...") stand among their lines (AC61)."""
    folder, outputs = both
    for name in ("participation.jsonl", "mechanism.json", "vocabulary.json", "privacy.json"):
        assert (folder / "two" / name).read_bytes() == (folder / "one" / name).read_bytes(), name
    one, two = state(toy.config(folder, "one")), state(toy.config(folder, "two"))
    assert one.keys() == two.keys()
    moved = 0
    for name, value in one.items():
        if name.startswith((".round.params", ".round.server")):
            moved += 1
            change = np.linalg.norm(two[name] - value) / max(np.linalg.norm(value), 1e-30)
            assert change <= 1e-6, name
        else:
            np.testing.assert_array_equal(two[name], value, err_msg=name)  # keys, timers, counts
    assert moved > 8
    results = [json.loads(next(line for line in out.splitlines() if line.startswith("{"))) for out in outputs]
    assert results[0]["run_dir"] == str(folder / "two")
    assert results[1] == {"run_dir": None, "process": 1}


def test_noise_is_the_same_to_the_bit(both):
    folder, _ = both
    one = state(two_processes.noise_only(folder, "one_noise"))
    two = state(two_processes.noise_only(folder, "two_noise"))
    for name, value in one.items():
        np.testing.assert_array_equal(two[name], value, err_msg=name)
    assert np.abs(one[".round.params['bias']"]).max() > 0  # zeros at the beginning: noise has moved it


def test_two_processes_resumed_give_the_same_bits(both):
    folder, _ = both
    whole, resumed = state(toy.config(folder, "two")), state(toy.config(folder, "two_resumed"))
    for name, value in whole.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    for name in ("metrics.jsonl", "participation.jsonl"):
        assert (folder / "two" / name).read_bytes() == (folder / "two_resumed" / name).read_bytes()


def test_bad_input_of_one_ends_all(both):
    _, outputs = both
    assert "refused: run folder" in outputs[0]
    assert "another process of this run stopped" in outputs[1]


def test_processes_with_different_settings_data_or_folders_do_not_begin(both):
    folder, outputs = both
    said = "refused: the processes of this run have different settings, data, words or --run-dir"
    for out in outputs:
        assert out.count(said) == 3
    assert not list(folder.glob("never*"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((None, 2, 0), "--coordinator"),
        (("localhost:1", 1, 0), "--num-processes"),
        (("localhost:1", 2, 2), "--process-id"),
        (("localhost", 2, 1), "HOST:PORT"),
    ],
)
def test_options_that_name_no_group_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        processes.check(*options)


def test_a_process_keeps_the_text_of_its_own_clients(tmp_path):
    data = corpus.load(toy.config(tmp_path))
    shares = [corpus.share(data, i, 2) for i in range(2)]
    for i, rows in enumerate(data.train):
        np.testing.assert_array_equal(shares[i % 2].train[i], rows)
        assert len(shares[1 - i % 2].train[i]) == 0
    assert shares[0].ids == data.ids
