"""The little random model, for whoever completes, suggests or rescores with it."""

import pytest

from tests.trainers.keyboard import little as little_model
from trainers.keyboard.released import Released


@pytest.fixture(scope="module")
def little() -> Released:
    return little_model.make()


@pytest.fixture(scope="module")
def examples(little):
    return little_model.examples(little)
