"""Averaging weighted by data through the cohort, and how pairs are dealt to clients."""

import jax.numpy as jnp
import numpy as np
import pytest

from trainers.common.errors import InputError
from trainers.translation import dealing, federated


def test_average_is_weighted_by_pairs():
    """Clients with 3, 1 and 0 pairs and parameters 1, 5, 100 have the mean 2; nobody's pairs, none (AC45)."""
    models = [{"w": jnp.full(2, v)} for v in (1.0, 5.0, 100.0)]
    out = federated.average(models, [3, 1, 0])
    np.testing.assert_allclose(out["w"], [2.0, 2.0], rtol=1e-6)
    with pytest.raises(ValueError, match="no pairs"):
        federated.average(models, [0, 0, 0])
    with pytest.raises(ValueError, match="3 models but 2 weights"):
        federated.average(models, [1, 2])


SIZES = {"it": 40, "medical": 20, "law": 30}


@pytest.mark.parametrize("setting", ["non_iid", "iid", "non_iid:6", "iid:12", "alpha:0.4", "alpha:0"])
def test_every_pair_is_dealt_once(setting):
    shares = dealing.deal(setting, SIZES, seed=3)
    members = [m for s in shares for m in s.members]
    assert sorted(members) == sorted((d, i) for d, n in SIZES.items() for i in range(n))
    assert shares == dealing.deal(setting, SIZES, seed=3)
    assert shares != dealing.deal(setting, SIZES, seed=4)


def test_domains_of_clients():
    for share in dealing.deal("non_iid:6", SIZES, seed=0):
        assert {d for d, _ in share.members} == {share.domain}
    sizes = [len(s.members) for s in dealing.deal("iid:6", SIZES, seed=0)]
    assert sizes == [15] * 6
    (it, medical, law) = dealing.deal("alpha:0.5", SIZES, seed=0)
    assert [s.domain for s in (it, medical, law)] == list(SIZES)
    assert sum(d == "it" for d, _ in it.members) >= 20  # its own half, and about a third of the mixed ones
    assert sum(d == "it" for d, _ in law.members) > 0
    assert all(d == s.domain for s in dealing.deal("alpha:0", SIZES, seed=0) for d, _ in s.members)


@pytest.mark.parametrize("wrong", ["noniid", "iid:", "alpha:2", "alpha", "non_iid:-3"])
def test_unknown_settings_are_refused(wrong):
    with pytest.raises(InputError, match="unknown setting"):
        dealing.deal(wrong, SIZES, seed=0)


def test_bad_client_counts_are_refused():
    with pytest.raises(InputError, match="multiple of the 3 domains"):
        dealing.deal("non_iid:4", SIZES, seed=0)
    with pytest.raises(InputError, match="no pair"):
        dealing.deal("non_iid:300", SIZES, seed=0)
