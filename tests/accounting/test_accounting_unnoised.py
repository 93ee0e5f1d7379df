"""What this project writes without noise is reported as such, not as a damaged statement."""

import json

import pytest

import accounting
from accounting import cli
from tests.accounting_runs import valid

GUARANTEE = {
    "p_nmt": "epsilon: none (public text only)",
    "fedavg_1": "epsilon: none (models are exchanged as they are)",
    "ft_ensemble": "epsilon: none (models are exchanged as they are)",
    "fednn": "epsilon: none (codes are compression; shuffling is none); its weight is tuned",
}


def write(folder, name, **data):
    (folder / name).write_text(json.dumps(data))


def report(capsys, *paths):
    status = cli.main(["report", *map(str, paths)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("name", [".", "privacy.json"])
def test_a_translation_run_says_none_with_its_own_reasons(capsys, tmp_path, name):
    write(tmp_path, "manifest.json", command="translation train")
    write(tmp_path, "privacy.json", epsilon=None, guarantee=GUARANTEE)
    found = accounting.report(tmp_path / name)
    valid(found)
    assert found.data["epsilon"] is found.data["rho"] is None
    assert found.data["not_covered"] == [
        "p_nmt: public text only",
        "fedavg_1, ft_ensemble: models are exchanged as they are",
        "fednn: codes are compression; shuffling is none; its weight is tuned",
    ]
    status, out, _ = report(capsys, tmp_path / name)
    assert status == 0
    assert "epsilon: none" in out
    assert "fedavg_1, ft_ensemble: models are exchanged as they are" in out
    with pytest.raises(ValueError, match="min_separation needs a run's folder"):
        accounting.report(tmp_path / name, min_separation=2)
    with pytest.raises(ValueError, match="reported alone"):
        accounting.report([tmp_path / name, tmp_path])


def test_an_unfinished_translation_run_has_none_either(capsys, tmp_path):
    write(tmp_path, "manifest.json", command="jaxpriv translation train")
    status, out, _ = report(capsys, tmp_path)
    assert status == 0
    assert "epsilon: none" in out


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"coding": "pq", "weighted": False}, "codes of representations"),
        ({"coding": "pca"}, "projections of representations"),
        ({"coding": "none"}, "representations of private text as they are"),
        ({"coding": "pq", "weighted": True}, "its noisy counts have no statement"),
    ],
)
def test_a_memory_says_none_unless_it_has_a_statement(capsys, tmp_path, made, words):
    write(tmp_path, "manifest.json", format="jaxpriv datastore 1", count=3, **made)
    status, out, _ = report(capsys, tmp_path)
    assert status == 0
    assert "epsilon: none" in out
    assert words in out
    own = accounting.statement(
        accounting.PureDP(epsilon=1.0, adjacency="replace-one", unit="sentence"), delta=0.0
    )
    (tmp_path / "privacy.json").write_text(own.json())
    assert accounting.report(tmp_path).data == own.data


@pytest.mark.parametrize(
    ("command", "words"),
    [("documents fit", "releases nothing private"), ("documents evaluate", "has not finished")],
)
def test_what_has_nothing_to_report_says_what_has(capsys, tmp_path, command, words):
    write(tmp_path, "manifest.json", command=command)
    status, out, err = report(capsys, tmp_path)
    assert status == 2
    assert not out
    assert words in err
    assert len(err.splitlines()) == 1
