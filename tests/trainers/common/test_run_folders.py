"""Run folders belong to the command that wrote them; what ends a command says so in one line."""

import json
import pathlib
import subprocess
import sys
import warnings

import pytest

import accounting
from trainers import cli
from trainers.common import run_dir, statements
from trainers.common.errors import InputError
from trainers.common.wording import counted
from trainers.translation import session

WROTE = {
    "keyboard": "jaxpriv keyboard train",
    "documents": "documents fit",
    "translation": "translation train",
}


def folder_of(tmp_path, area):
    """A folder with the manifest of a run, and settings that no other area has."""
    folder = tmp_path / area
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"command": WROTE[area], "digests": {}}))
    (folder / "config.json").write_text('{"an_option_of_its_own": 1}')
    return folder


@pytest.mark.parametrize(
    ("own", "arguments"),
    [
        ("keyboard", ["evaluate", "--run-dir"]),
        ("keyboard", ["suggest", "--text", "the", "--run-dir"]),
        ("keyboard", ["export", "--output", "x.safetensors", "--run-dir"]),
        ("keyboard", ["compare", "--runs"]),
        ("keyboard", ["train", "--resume", "--run-dir"]),
        ("documents", ["fit", "--resume", "--run-dir"]),
        ("documents", ["evaluate", "--resume", "--run-dir"]),
        ("documents", ["release", "--data", "x", "--output", "y", "--epsilon", "1", "--run-dir"]),
        ("translation", ["evaluate", "--run-dir"]),
        ("translation", ["transfer", "--run-dir"]),
        ("translation", ["release", "--delta", "1e-3", "--adjacency", "add-remove", "--run-dir"]),
    ],
)
def test_a_folder_of_another_area_is_refused_by_name(capsys, tmp_path, own, arguments):
    for other in WROTE:
        if other == own:
            continue
        folder = folder_of(tmp_path, other)
        before = sorted(p.name for p in folder.iterdir())
        assert cli.main([own, *arguments, str(folder)]) == 2
        out, err = capsys.readouterr()
        assert f"was written by `jaxpriv {WROTE[other].removeprefix('jaxpriv ')}`" in err
        assert len(err.splitlines()) == 1
        assert not out
        assert sorted(p.name for p in folder.iterdir()) == before


def test_commands_of_one_area_are_told_apart_where_that_is_asked(tmp_path):
    folder = folder_of(tmp_path, "documents")
    run_dir.require(folder)
    run_dir.require(folder, "documents")
    run_dir.require(folder, "documents fit")
    with pytest.raises(InputError, match="documents evaluate"):
        run_dir.require(folder, "documents evaluate")
    with pytest.raises(InputError, match="give a folder of `jaxpriv doc`"):
        run_dir.require(folder, "doc")


def test_a_run_that_never_began_is_told_from_others(tmp_path):
    """Killed between manifest and settings, it has left nothing that could be lost."""
    folder = folder_of(tmp_path, "translation")
    assert not run_dir.never_began(folder, "translation train")
    (folder / "config.json").rename(folder / ".config.json.abc.tmp")
    assert run_dir.never_began(folder, "translation train")
    with pytest.raises(InputError, match="was written by `jaxpriv translation train`"):
        run_dir.never_began(folder, "documents fit")
    (folder / "letter").touch()
    assert not run_dir.never_began(folder, "translation train")
    (tmp_path / "empty").mkdir()
    assert not run_dir.never_began(tmp_path / "empty", "translation train")


def test_going_on_where_nothing_was_written_starts(tmp_path, capsys):
    folder = tmp_path / "run"
    assert not run_dir.resumes(folder, False)
    assert not capsys.readouterr().err
    for _ in range(2):  # absent, then empty
        assert not run_dir.resumes(folder, True)
        assert capsys.readouterr().err == f"jaxpriv: nothing was written to {folder} before; starting anew\n"
        folder.mkdir(exist_ok=True)
    (folder / "letter").touch()
    assert not session._begun(tmp_path / "absent", resume=True)
    assert "starting anew" in capsys.readouterr().err
    assert run_dir.resumes(folder, True)
    assert not run_dir.resumes(folder, False)
    assert not capsys.readouterr().err


HOLD = """
import sys
import warnings
from trainers.common import run_dir
with run_dir.held(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def at_work(tmp_path):
    """A folder that another process holds, and that process."""
    folder = tmp_path / "runs" / "busy"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=pathlib.Path(__file__).resolve().parents[3],
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield folder, other
        other.kill()


@pytest.mark.parametrize("resume", [[], ["--resume"]])
@pytest.mark.parametrize("command", [["keyboard", "train"], ["translation", "train"], ["documents", "fit"]])
def test_two_runs_at_once_in_one_folder_are_refused(at_work, capsys, command, resume):
    """Each would release its rounds under a noise key of its own, and be counted once."""
    folder, _ = at_work
    assert cli.main([*command, "--preset", "tiny", "--run-dir", str(folder), *resume]) == 2
    out, err = capsys.readouterr()
    assert "another run is at work in" in err
    assert len(err.splitlines()) == 1
    assert not out
    assert not any(folder.iterdir())


def test_a_folder_is_free_once_its_run_was_killed(at_work):
    folder, other = at_work
    other.kill()
    other.wait()
    with run_dir.held(folder), pytest.raises(InputError, match="at work"), run_dir.held(folder):
        pass


def test_a_folder_is_gone_after_a_refusal_and_stays_after_work(tmp_path):
    folder = tmp_path / "a" / "b"
    with run_dir.held(folder):
        assert folder.is_dir()  # and nothing is written
    assert not (tmp_path / "a").exists()
    with run_dir.held(folder):
        (folder / "result").touch()
    with run_dir.held(folder):
        pass
    assert [p.name for p in folder.iterdir()] == ["result"]
    with (
        pytest.raises(InputError, match="cannot be made"),
        run_dir.held(folder / "result" / "c"),
    ):
        pass


def test_a_statement_lies_where_the_accountant_looks(tmp_path):
    said = accounting.statement(
        accounting.PureDP(epsilon=1.0, adjacency="replace-one", unit="sentence"), delta=0.0
    )
    for name in ("a.parquet", "a.safetensors"):
        (tmp_path / name).write_bytes((2).to_bytes(8, "little") + b"{}")  # of safetensors, the smallest
        statements.write(said, tmp_path / name)
        assert (tmp_path / f"{name}.privacy.md").read_text() == said.markdown()
        assert accounting.report(tmp_path / name).data == said.data
    statements.write(said, tmp_path)
    assert accounting.report(tmp_path).data == said.data


def test_one_is_no_plural():
    assert [counted(n, "document") for n in (0, 1, 2000)] == ["0 documents", "1 document", "2,000 documents"]


def test_a_warning_of_ours_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back
    assert cli.main([]) == 0
    ours = str(pathlib.Path(cli.__file__).parent / "common" / "checkpoint.py")
    assert warnings.formatwarning("it is not used", UserWarning, ours, 7) == "jaxpriv: it is not used\n"
    assert "elsewhere.py:7: UserWarning: it" in warnings.formatwarning("it", UserWarning, "elsewhere.py", 7)
