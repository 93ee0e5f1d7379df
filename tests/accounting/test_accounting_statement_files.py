"""A statement read back from its file: found beside what it is about, composed again, refused if it says too little."""

import dataclasses
import json

import numpy as np
import pytest

import accounting
from accounting import cli, strategies
from accounting.statement import sentence_of
from tests.accounting_runs import facts, valid, write

MANY = [accounting.PureDP(epsilon=0.2, releases=100, adjacency="replace-one", unit="sentence")]
ONE = [accounting.PureDP(epsilon=10.0, releases=1, adjacency="replace-one", unit="sentence")]


def stated(**options):
    return accounting.statement(MANY, delta=1e-20, alternatives=[ONE], approximation=5e-21, **options)


def test_alternatives_state_the_largest_of_each_number():
    said = stated()
    valid(said)
    alone = [accounting.compose(one, delta=5e-21) for one in (MANY, ONE)]
    assert said.data["epsilon"] == max(one.epsilon for one in alone) == alone[0].epsilon
    assert said.data["rho"] == max(one.rho for one in alone) == alone[1].rho
    assert said.data["delta"] == 1e-20
    words = said.markdown()
    assert "100 releases of pure epsilon 0.2" in words
    assert "1 release of pure epsilon 10.0" in words
    other = accounting.PureDP(epsilon=1.0, adjacency="replace-one", unit="word")
    with pytest.raises(ValueError, match="unequal unit"):
        accounting.statement(MANY, delta=0.0, alternatives=[[other]])
    with pytest.raises(ValueError, match="approximation"):
        accounting.statement(MANY, delta=1e-20, approximation=1e-19)


@pytest.mark.parametrize("name", ["out.parquet", "out.parquet.privacy.json", "."])
def test_the_statement_beside_a_file_or_in_a_folder_is_reported(capsys, tmp_path, name):
    (tmp_path / "out.parquet").write_bytes(b"PAR1")
    (tmp_path / "out.parquet.privacy.json").write_text(stated().json())
    (tmp_path / "privacy.json").write_text(stated().json())
    assert accounting.report(tmp_path / name).data == stated().data
    assert cli.main(["report", str(tmp_path / name), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["epsilon"] == stated().data["epsilon"]
    assert stated().sentence in err


def test_a_runs_record_says_more_than_a_statement_in_its_folder(tmp_path):
    (tmp_path / "run").mkdir()
    folder = write(tmp_path / "run", facts())
    (folder / "privacy.json").write_text(stated().json())
    assert accounting.report(folder).data["unit"] == "device"
    # So it does where the statement itself is given: the run may have gone on since.
    assert accounting.report(folder / "privacy.json").data == accounting.report(folder).data
    with pytest.raises(ValueError, match="the run used 2"):
        accounting.report(folder / "privacy.json", noise_multiplier=1e9)
    # One beside run folders is none of theirs.
    (tmp_path / "privacy.json").write_text(stated().json())
    assert accounting.report(tmp_path / "privacy.json").data == stated().data
    (tmp_path / "out.parquet").write_bytes(b"PAR1")
    (tmp_path / "out.parquet.privacy.json").write_text(stated().json())
    with pytest.raises(ValueError, match="reported alone"):
        accounting.report([folder, tmp_path / "out.parquet"])


def test_a_gaussian_statement_is_checked_by_its_rho(tmp_path):
    run = accounting.TreeAggregation(
        noise_multiplier=3.0, num_rounds=9, min_separation=3, adjacency="zero-out"
    )
    said = accounting.statement(run, delta=1e-6)
    (tmp_path / "s.json").write_text(said.json())
    assert accounting.report(tmp_path / "s.json").data == said.data
    for name in ("rho", "epsilon"):
        less = {**said.data, name: said.data[name] / 2}
        (tmp_path / "s.json").write_text(json.dumps(less))
        with pytest.raises(ValueError, match=f"it says {name}"):
            accounting.report(tmp_path / "s.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 1.0, "epsilon_printed": "1.0000"}, "its mechanisms give"),
        ({"rho": 2.0}, "its mechanisms give"),
        ({"epsilon_printed": "1.0000"}, "printed"),
        ({"alternatives": [[{"kind": "PureDP"}]]}, "damaged"),
        ({"mechanisms": 3}, "damaged"),
        ({"notes": None, "schema": "other"}, "not a privacy statement"),
        ({"version": 7}, "version"),
        ({"unit": None}, "damaged"),
    ],
)
def test_a_statement_that_says_too_little_or_is_none_is_one_line(capsys, tmp_path, change, message):
    (tmp_path / "s.json").write_text(json.dumps({**stated().data, **change}))
    assert cli.main(["report", str(tmp_path / "s.json")]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert len(err.splitlines()) == 1
    assert not out


BY_BITS = accounting.statement(ONE, delta=1e-20, approximation=1e-20)
SIMULATED = stated(simulation=True)
TREE = accounting.TreeAggregation(noise_multiplier=3.0, num_rounds=9, min_separation=3, adjacency="zero-out")
GAUSSIAN = accounting.statement(TREE, delta=1e-6, exceptions=["the vocabulary"])
MIXED = accounting.statement(
    [TREE, accounting.PureDP(epsilon=0.1, adjacency="zero-out", unit="device")], delta=1e-6
)
NOTHING = accounting.no_guarantee(unit="sentence", reasons=["nothing is noised"])


FULL_DELTA = accounting.statement(TREE, delta=1.2345641e-5)
CHAIN = accounting.statement(
    accounting.MatrixMechanism(
        noise_multiplier=3.0,
        num_rounds=9,
        min_separation=3,
        max_participations=2,
        restarts=(4,),
        strategy=strategies.BLT(theta=np.array([0.8, 0.3]), omega=np.array([0.2, 0.1])),
        adjacency="zero-out",
    ),
    delta=1e-6,
)
SECURE = accounting.statement(
    accounting.SecureAggregation(mechanism=TREE, clip_norm=1.0, scale=50.0, dimension=16, beta=0.6),
    delta=1e-6,
)
BITS = accounting.statement(
    [TREE, accounting.QuantileEstimation(count_stddev=2.0, schedule=TREE)], delta=1e-6
)


@pytest.mark.parametrize(
    "said", [accounting.statement(ONE, delta=2.5453757e-29, approximation=1e-29), FULL_DELTA]
)
def test_statements_of_versions_that_cut_delta_are_read(tmp_path, said):
    cut = said.sentence.replace(f"{said.data['delta']!r}", f"{said.data['delta']:g}")
    assert cut != said.sentence
    (tmp_path / "s.json").write_text(json.dumps({**said.data, "sentence": cut}))
    assert accounting.report(tmp_path / "s.json").data["delta"] == said.data["delta"]
    (tmp_path / "s.json").write_text(json.dumps({**said.data, "sentence": cut.replace("e-", "e-1")}))
    with pytest.raises(ValueError, match="its sentence is not that of its numbers"):
        accounting.report(tmp_path / "s.json")


@pytest.mark.parametrize("noise", [0.0, 1e160, 1e-160, float("inf")])
def test_noise_at_its_limits_is_read_as_it_was_written(tmp_path, noise):
    said = accounting.statement(dataclasses.replace(TREE, noise_multiplier=noise), delta=1e-6)
    (tmp_path / "s.json").write_text(said.json())
    assert accounting.report(tmp_path / "s.json").data == said.data


def claiming(said, squared):
    """The statement as it would be with another squared sensitivity, its other numbers following."""
    one = said.data["mechanisms"][0]
    rho = squared / (2 * one["noise_multiplier"] ** 2)
    eps = accounting.epsilon_from_rho(rho, delta=said.data["delta"], known="gaussian")
    data = {**said.data, "mechanisms": [{**one, "squared_sensitivity": squared, "rho": rho}], "rho": rho}
    data |= {"epsilon": eps, "epsilon_printed": accounting.round_up(eps), "observed": None}
    return {**data, "sentence": sentence_of(data)}


@pytest.mark.parametrize("said", [GAUSSIAN, CHAIN, SECURE])
def test_a_sensitivity_that_its_rounds_do_not_have_is_refused(tmp_path, said):
    right = said.data["mechanisms"][0]["squared_sensitivity"]
    (tmp_path / "s.json").write_text(json.dumps(claiming(said, right)))
    accounting.report(tmp_path / "s.json")
    for squared in (0.99 * right, right / 2):
        (tmp_path / "s.json").write_text(json.dumps(claiming(said, squared)))
        with pytest.raises(ValueError, match="and its rounds and participations give"):
            accounting.report(tmp_path / "s.json")
    for more in ({"inflation": 0.01}, {"structure": "lower triangular"}):
        data = claiming(said, right / 100)
        (tmp_path / "s.json").write_text(
            json.dumps({**data, "mechanisms": [{**data["mechanisms"][0], **more}]})
        )
        with pytest.raises(ValueError, match="and its rounds and participations give"):
            accounting.report(tmp_path / "s.json")
    seen = {**claiming(said, right), "observed": {"rho": 2 * said.data["rho"]}}
    (tmp_path / "s.json").write_text(json.dumps(seen))
    with pytest.raises(ValueError, match="what was observed gives"):
        accounting.report(tmp_path / "s.json")


@pytest.mark.parametrize(
    "said", [stated(), BY_BITS, SIMULATED, GAUSSIAN, MIXED, NOTHING, FULL_DELTA, CHAIN, SECURE, BITS]
)
def test_every_kind_of_statement_is_read_as_it_was_written(tmp_path, said):
    (tmp_path / "s.json").write_text(said.json())
    assert accounting.report(tmp_path / "s.json").data == said.data


@pytest.mark.parametrize(
    ("said", "change"),
    [
        (stated(), {"sentence": stated().sentence.replace("differential", "differential ")}),
        (BY_BITS, {"sentence": BY_BITS.sentence.replace("(10.0000, ", "(1.0000, ")}),
        (GAUSSIAN, {"sentence": GAUSSIAN.sentence.replace("1e-06", "1e-09")}),
        (GAUSSIAN, {"sentence": GAUSSIAN.sentence.replace(GAUSSIAN.data["epsilon_printed"], "0.1000")}),
        (SIMULATED, {"simulation": False}),
        (stated(), {"simulation": True}),
        (stated(), {"mechanisms": []}),
        (stated(), {"mechanisms": [], "alternatives": []}),
        (stated(), {"mechanisms": [], "rho": None}),
        (stated(), {"alternatives": [[]]}),
        (BY_BITS, {"mechanisms": [{**BY_BITS.data["mechanisms"][0], "releases": 0}]}),
        (stated(), {"epsilon": None}),
        (GAUSSIAN, {"epsilon": None, "mechanisms": []}),
        (GAUSSIAN, {"epsilon": None, "rho": None, "mechanisms": []}),
        (NOTHING, {"sentence": GAUSSIAN.sentence}),
        (GAUSSIAN, {"adjacency": "whatever"}),
        (GAUSSIAN, {"mechanisms": [{**GAUSSIAN.data["mechanisms"][0], "noise_multiplier": 1.0}]}),
        (MIXED, {"epsilon": 0.1, "epsilon_printed": "0.1000"}),
        (BY_BITS, {"delta": 0.0, "approximation": 0.0}),
        (BY_BITS, {"delta": float("nan")}),
        (BY_BITS, {"rho": float("nan")}),
        (BY_BITS, {"epsilon": float("nan"), "epsilon_printed": "nan"}),
    ],
)
def test_an_edited_statement_is_refused(capsys, tmp_path, said, change):
    (tmp_path / "s.json").write_text(json.dumps({**said.data, **change}))
    assert cli.main(["report", str(tmp_path / "s.json")]) == 2
    out, err = capsys.readouterr()
    assert "damaged or was changed" in err
    assert len(err.splitlines()) == 1
    assert not out


def test_what_only_a_run_can_support_is_refused_for_a_statement(capsys, tmp_path):
    (tmp_path / "s.json").write_text(stated().json())
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for words, message in (
        (["s.json", "--observed"], "needs a run's folder"),
        (["s.json", "--plot", str(tmp_path / "p.png")], "--plot"),
        (["x.parquet"], "no statement x.parquet.privacy.json"),
    ):
        assert cli.main(["report", str(tmp_path / words[0]), *words[1:]]) == 2
        assert message in capsys.readouterr().err
    lacking = {name: value for name, value in stated().data.items() if name != "delta"}
    (tmp_path / "s.json").write_text(json.dumps(lacking))
    with pytest.raises(ValueError, match="lacks delta"):
        accounting.report(tmp_path / "s.json")
