"""One of two processes that train together, run by test_processes.py: `PROCESS_ID PORT FOLDER`."""

import dataclasses
import os
import pathlib
import shutil
import sys

from tests.trainers.keyboard import toy
from trainers import cli
from trainers.keyboard.config import Config

ROUNDS_KEPT = 4  # a checkpoint of this round is left when the one of round 6 is taken away


def group(config: Config, process_id: int, port: int) -> Config:
    """The settings of one process of two."""
    return dataclasses.replace(
        config, coordinator=f"localhost:{port}", num_processes=2, process_id=process_id, json=True
    )


def noise_only(folder: pathlib.Path, run: str, **changes) -> Config:
    """So small a client rate that every update is exactly zero: what is released is noise."""
    return toy.config(folder, run, client_learning_rate=1e-30, rounds=3, server_cooldown=0, **changes)


def main(process_id: int, port: int, folder: pathlib.Path) -> int:
    ours = lambda config: group(config, process_id, port)
    whole = ours(toy.config(folder, "two", chunk_size=1))
    if status := cli.main(["keyboard", *toy.argv(whole)]):
        return status
    from trainers.common import processes
    from trainers.common.errors import InputError
    from trainers.keyboard import session

    session.train(ours(noise_only(folder, "two_noise")))
    resumed = dataclasses.replace(whole, run_dir=str(folder / "two_resumed"), resume=True)
    if process_id == 0:
        shutil.copytree(whole.run_dir, resumed.run_dir)
        shutil.rmtree(pathlib.Path(resumed.run_dir, "checkpoints", "6"))
    processes.largest(0)  # the copy is there for both
    session.train(resumed)
    try:
        session.train(
            whole
        )  # the folder exists: the first process refuses, and the other does not wait for it
    except InputError as error:
        print(f"refused: {error}", flush=True)
    os.chdir(folder / f"host{process_id}")  # a relative path means another file to each
    never = str(folder / "never")
    for changes in (
        {"run_dir": never, "clip_norm": 1.0 + process_id},
        {"run_dir": never, "data": "clients.jsonl"},
        {"run_dir": f"{never}{process_id}"},
    ):
        try:
            session.train(dataclasses.replace(whole, **changes))
        except InputError as error:
            print(f"refused: {error}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])))
