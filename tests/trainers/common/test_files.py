"""Files that are whole or absent, metrics that survive a kill, commands that refuse in one line."""

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests import notebooks
from trainers import cli
from trainers.common import command, entropy, files, metrics, tensors
from trainers.common.errors import InputError

ROOT = notebooks.COLAB.parent


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail():
        with files.atomic_write(path) as file:
            file.write("half")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_same_tensors_make_the_same_bytes(tmp_path):
    """Whatever the order in which names come; a checksum tells whether two models are one."""
    arrays = {
        "b": np.arange(3, dtype=np.float32),
        "a": np.ones((2, 5), np.float32),
        "c": np.zeros(1, np.int8),
    }
    about = {f"name {i}": f"wärter {i}" for i in range(9)}
    tensors.write(tmp_path / "one", arrays, about)
    tensors.write(tmp_path / "two", dict(reversed(arrays.items())), dict(reversed(about.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    found, said = tensors.read(tmp_path / "one")
    assert said == about
    assert found.keys() == arrays.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype


def test_secrets_can_be_written_for_the_owner_only(tmp_path):
    with files.atomic_write(tmp_path / "key", "wb", permissions=0o600) as file:
        file.write(b"\0" * 32)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["absent", "folder", "empty"])
def test_unusable_paths_are_named(tmp_path, kind):
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    if kind == "empty":
        path.touch()
    with pytest.raises(InputError, match=str(path)):
        files.existing_file(path, "data file")


def test_a_new_folder_is_whole_or_absent_and_never_an_old_one(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "letter").touch()
    with pytest.raises(InputError, match="exists already"), files.new_folder(tmp_path / "old"):
        pass

    def fail():
        with files.new_folder(tmp_path / "half") as folder:
            (folder / "a").touch()
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        fail()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old"]
    with files.new_folder(tmp_path / "new") as folder:
        (folder / "a").touch()
        assert not (tmp_path / "new").exists()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["a"]
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_what_killed_writers_left_is_swept_and_what_is_being_written_is_not(tmp_path):
    dead, folder = tmp_path / ".model-1.npz.dead.tmp", tmp_path / ".exchange.dead.tmp"
    dead.write_bytes(b"private")
    folder.mkdir()
    (folder / ".lock").touch()
    (tmp_path / "kept.tmp").touch()
    with files.atomic_write(tmp_path / "model-2.npz", "wb") as file:
        file.write(b"whole")
        files.sweep(tmp_path)
    assert not dead.exists()
    assert not folder.exists()
    assert (tmp_path / "model-2.npz").read_bytes() == b"whole"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept.tmp", "model-2.npz"]


def test_scratch_of_killed_processes_is_swept_and_that_of_living_ones_is_not(tmp_path):
    with files.scratch_folder(tmp_path, "x") as living:
        dead = tmp_path / ".x.dead.tmp"
        dead.mkdir()
        (dead / ".lock").touch()
        (dead / "private").touch()
        (tmp_path / ".xy.other.tmp").mkdir()
        old, young = (
            tmp_path / ".y.old.tmp",
            tmp_path / ".y.young.tmp",
        )  # of another name, and as old as it may be
        for folder in (old, young):
            folder.mkdir()
            (folder / ".lock").write_bytes(files._OURS)
        strange = tmp_path / ".strange.tmp"  # somebody else's
        strange.mkdir()
        (strange / ".lock").touch()
        for folder in (old, strange):
            os.utime(folder / ".lock", (1.0, 1.0))
        with files.scratch_folder(tmp_path, "x") as second:
            assert living.exists()
            assert second.exists()
            assert not dead.exists()
            assert not old.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".strange.tmp", ".xy.other.tmp", ".y.young.tmp"]


def test_a_file_that_cannot_be_written_is_named_not_its_temporary(tmp_path):
    written = files.atomic_write(tmp_path / "none" / "a")
    with pytest.raises(InputError, match=rf"^{tmp_path / 'none' / 'a'} cannot be written"), written:
        pass
    for path in (tmp_path, tmp_path / "none" / "a"):
        with pytest.raises(InputError, match=f"--out {path}"):
            files.require_writable(path, "--out")
    files.require_writable(tmp_path / "a", "--out")


@pytest.mark.parametrize(("torn", "kept"), [('{"round": 9', []), ('{"round": 9}', [9]), ("5", [])])
def test_a_torn_line_does_not_spoil_what_is_written_after_it(tmp_path, torn, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1}\n' + torn)
    assert [r["round"] for r in metrics.read(path)] == [1, *kept]
    for number in (2, 3):
        with metrics.Writer(path) as writer:
            writer.write(round=number)
    assert [r["round"] for r in metrics.read(path)] == [1, *kept, 2, 3]


def test_lines_that_are_no_records_are_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('5\n{"round": 1}\n')
    with pytest.raises(InputError, match=r"line 1: no record"):
        metrics.read(path)


def test_digest_of_tells_where_one_part_ends():
    assert files.digest_of("ab", "c") != files.digest_of("a", "bc")


def test_metrics_skip_a_torn_last_line_and_refuse_a_bad_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with metrics.Writer(path) as writer:
        writer.write(round=0, loss=np.float32(1.5))
        writer.write(round=1, loss=float("nan"))
    with open(path, "a") as file:
        file.write('{"round": 2, "lo')
    assert metrics.read(path) == [{"round": 0, "loss": 1.5}, {"round": 1, "loss": None}]
    path.write_text('{"round": 0}\n{bad\n{"round": 1}\n')
    with pytest.raises(InputError, match="line 2"):
        metrics.read(path)


def test_a_resumed_run_drops_metrics_only_where_they_differ(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with metrics.Writer(path) as writer:
        for t in range(5):
            writer.write(round=t, loss=t / 3)
            writer.write(round=t, evaluation={"top1": t})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"round": 5, "lo')
    with metrics.Writer(path, resume_at=2) as writer:
        assert path.read_bytes() == whole  # killed here, nothing is lost but half a line
        for t in range(2, 4):
            writer.write(round=t, loss=t / 3)
            writer.write(round=t, evaluation={"top1": t})
        assert path.read_bytes() == whole
        writer.write(round=4, loss=9.0)
        assert [r.get("loss") for r in metrics.read(path) if "loss" in r] == [0, 1 / 3, 2 / 3, 1.0, 9.0]
        writer.write(round=4, evaluation={"top1": 4})
    assert len(metrics.read(path)) == 10
    path.write_bytes(b'{"round": 0}\n{bad\n{"round": 1}\n')
    with pytest.raises(InputError, match="line 2"):
        metrics.Writer(path, resume_at=0)
    with metrics.Writer(tmp_path / "new.jsonl", resume_at=3) as writer:
        writer.write(round=3)
    assert metrics.read(tmp_path / "new.jsonl") == [{"round": 3}]


def test_every_word_of_the_secret_changes_the_key():
    words = np.arange(8, dtype=np.uint32)
    base = jax.random.key_data(entropy.key_from_words(words)).tobytes()
    for i in range(8):
        changed = words.copy()
        changed[i] ^= 1
        assert jax.random.key_data(entropy.key_from_words(changed)).tobytes() != base
    assert entropy.secret_words().tobytes() != entropy.secret_words().tobytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a test."""

    rounds: int
    """Rounds."""
    restarts: tuple[int, ...]
    """Restarts."""
    resume: bool
    """Resume."""


PRESETS = {
    "demo": Settings(rounds=3, restarts=(), resume=False),
    "big": Settings(rounds=9, restarts=(), resume=False),
}


def parse(*argv):
    return command.parse(Settings, argv, prog="test", presets=PRESETS, description="A test.")


def test_presets_give_defaults_that_options_change():
    assert parse() == PRESETS["demo"]
    assert parse("--preset", "big", "--restarts", "2", "5", "--resume") == Settings(
        rounds=9, restarts=(2, 5), resume=True
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--rounds", "x"),
            r"Error parsing --rounds: .*'x'; --rounds INT Rounds\. \(default: 3\); see --help",
        ),
        (("--no-such", "1"), "Unrecognized options: --no-such, 1; see --help"),
        (
            ("--restart", "1"),
            r"Unrecognized options: --restart, 1; Perhaps you meant: --restarts .*; see --help",
        ),
        (("--rounds",), "Missing value for argument '--rounds'.*; see --help"),
        (("--preset", "huge"), "unknown preset 'huge'; choose one of demo, big"),
        (("--preset",), "--preset needs a name: one of demo, big"),
    ],
)
def test_unreadable_options_give_one_line(argv, message):
    with pytest.raises(InputError) as caught:
        parse(*argv)
    assert re.fullmatch(f"test: {message}", str(caught.value))


def test_the_help_names_every_command(capsys):
    from accounting import cli as accounts
    from trainers.common import data_cli
    from trainers.documents import cli as documents
    from trainers.keyboard import cli as keyboard
    from trainers.translation import cli as translation

    assert cli.main(["--help"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    listed = {area: line.rpartition(": ")[2].split(", ") for area, line in lines.items()}
    for area, commands in (
        ("keyboard", keyboard.COMMANDS),
        ("translation", translation.COMMANDS),
        ("account", accounts.COMMANDS),
        ("documents", re.search(r"{(.*)}", documents.USAGE)[1].split(",")),
        ("data", re.search(r"data (\S*)`", data_cli.__doc__)[1].split("|")),
    ):
        assert listed[area] == list(commands)
    assert listed.keys() == cli.AREAS.keys()


def test_the_trainer_takes_the_accountants_names(capsys):
    for name, message in (("BandMF", "nowhere.jsonl"), ("bandits", "invalid choice 'bandits'")):
        assert (
            cli.main(
                ["keyboard", "train", "--preset", "tiny", "--data", "nowhere.jsonl", "--mechanism", name]
            )
            == 2
        )
        assert message in capsys.readouterr().err


def test_unknown_area_exits_with_2(capsys):
    assert cli.main(["keybord"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_refusals_of_a_command_are_one_line(capsys, monkeypatch):
    def main(argv):
        raise ValueError("noise_multiplier must be positive,\n got -1")

    monkeypatch.setitem(sys.modules, "trainers.keyboard.cli", type("M", (), {"main": staticmethod(main)}))
    assert cli.main(["keyboard"]) == 2
    assert capsys.readouterr().err == "jaxpriv keyboard: noise_multiplier must be positive, got -1\n"


def test_a_reader_that_goes_away_is_no_error():
    command = f"'{sys.executable}' -m trainers account tree --help | true"
    out = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.stderr == ""


def test_help_loads_no_jax():
    code = "import sys; from trainers import cli; cli.main(['--help']); print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "False"


def test_json_ends_standard_output(capsys):
    command.finish({"rho": np.float64(0.5), "epsilon": float("inf")}, as_json=True, text="a table")
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == {"rho": 0.5, "epsilon": None}
    assert captured.err == "a table\n"
