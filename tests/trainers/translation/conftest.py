"""A finished tiny run that several files of tests look at."""

import pytest

from tests.trainers.translation.test_cli import corpus
from trainers.cli import main


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """The folder of a run of the public model alone, two clients beside it; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("small")
    options = ["train", "--preset", "tiny", "--server", corpus(folder, "server", 200, 0)]
    options += ["--run-dir", str(folder / "run"), "--vocabulary-size", "330", "--batch-tokens", "256"]
    options += ["--test-sentences", "3", "--methods", "p_nmt", "--subspaces", "4", "--json"]
    for i, name in enumerate(("it", "law")):
        options += ["--client", f"{name}={corpus(folder, name, 60, i + 1)}"]
    assert main(["translation", *options]) == 0
    return folder / "run"
