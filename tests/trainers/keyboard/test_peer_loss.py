"""One of two processes ends in the middle: the other says so in one line, soon (AC61)."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.trainers.keyboard import toy, two_processes
from trainers.common import last_words, processes
from trainers.common.errors import InputError

ROOT = pathlib.Path(__file__).resolve().parents[3]


def start(config):
    """Both processes of the run, each with pipes of its own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    ours = [toy.argv(two_processes.group(config, i, port)) for i in range(2)]
    # A shell's background job, which the tests may be, ignores Ctrl-C, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return [
            subprocess.Popen(
                [sys.executable, "-m", "trainers", "keyboard", *argv],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )
            for argv in ours
        ]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "how", "status"),
    [(0, signal.SIGKILL, -9), (1, signal.SIGKILL, -9), (0, signal.SIGINT, 130)],
)
def test_the_survivor_ends_with_one_line_and_its_own_status(tmp_path, victim, how, status):
    config = toy.config(
        tmp_path, rounds=2000, checkpoint_every=10, evaluate_every=1000
    )  # not to end by itself
    log, started = tmp_path / "run" / "participation.jsonl", start(config)
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and all(p.poll() is None for p in started):
            if log.exists() and log.read_bytes().count(b"\n") >= 3:
                break
            time.sleep(0.01)
        started[victim].send_signal(how)
        began = time.monotonic()
        out, error = started[1 - victim].communicate(timeout=120)
        took = time.monotonic() - began
        assert started[victim].wait(timeout=120) == status
    finally:
        for process in started:
            process.kill()
    assert started[1 - victim].returncode == 2, error
    assert took < 30
    assert error.splitlines()[-1].endswith(processes.ENDED)
    assert "Traceback" not in error
    assert "Check failure" not in error
    assert all(line.startswith("[Gloo]") for line in out.splitlines())  # greetings are no errors


@pytest.mark.parametrize(
    ("error", "raised", "left"),
    [
        (InputError("everybody's"), InputError, None),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), InputError, 2),
        (OSError("disk full"), OSError, 2),
        (KeyboardInterrupt(), KeyboardInterrupt, 130),
        (TypeError("a bug"), TypeError, 1),
    ],
)
def test_an_error_of_one_process_ends_it_without_a_farewell(monkeypatch, error, raised, left):
    """The others wait for it in a sum; if it waited for them at its end, nobody would ever know."""
    leaving = []
    monkeypatch.setattr(last_words, "leave_at_exit", leaving.append)
    for count, expected in ((2, (raised, [] if left is None else [left])), (1, (type(error), []))):
        monkeypatch.setattr(processes.jax, "process_count", lambda count=count: count)
        leaving.clear()
        with pytest.raises(expected[0]), processes.ending_together():
            raise error
        assert leaving == expected[1]


def test_an_abort_for_another_reason_shows_what_was_said_and_stays_an_abort():
    code = """
import os
from trainers.common import last_words
last_words.install("LINE")
os.write(2, b"%s")
os.abort()
"""
    for said, status, seen in (
        ("F Terminating process because the JAX distributed service detected fatal errors. Stack", 2, "LINE"),
        ("F Check failed: a bug", -signal.SIGABRT, "F Check failed: a bug"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code % said], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == status
        assert seen in done.stderr
        assert ("Stack" in done.stderr) is False


GREETING = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"


@pytest.mark.parametrize(
    ("ending", "status"), [("pass", 0), ("sys.exit(2)", 2), ("os.abort()", -signal.SIGABRT), ("1 / 0", 1)]
)
def test_a_greeting_is_no_error_and_hides_none(ending, status):
    """What Gloo says at the start of a process changes neither its end nor its status (AC61)."""
    code = f"""
import os, sys
from trainers.common import last_words
last_words.install("LINE")
for place in (1, 2):
    os.write(place, b"{GREETING}\\n")
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert done.stdout.splitlines() == [GREETING]
    assert "LINE" not in done.stderr
    assert ("ZeroDivisionError" in done.stderr) is (status == 1)
