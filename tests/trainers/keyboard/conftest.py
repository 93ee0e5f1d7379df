"""The little random model, for whoever completes, suggests or rescores with it; a finished run of the toy."""

import pytest

from tests.trainers.keyboard import little as little_model
from tests.trainers.keyboard import toy
from trainers.keyboard import session
from trainers.keyboard.released import Released


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The settings and the result of an uninterrupted run, which nobody changes."""
    config = toy.config(tmp_path_factory.mktemp("whole"))
    return config, session.train(config)


@pytest.fixture(scope="module")
def little() -> Released:
    return little_model.make()


@pytest.fixture(scope="module")
def examples(little):
    return little_model.examples(little)
