"""`translate`: line n of the output answers line n, of a file and of standard input, whatever the model says."""

import os
import sys
import threading

import numpy as np
import pytest

from tests.trainers.translation.test_cli import run
from trainers.cli import main
from trainers.translation import data
from trainers.translation import model as models


@pytest.fixture(scope="module")
def talking(small_run, tmp_path_factory):
    """A model with something to say; the tiny one ends at once, so that its every translation is empty."""
    made = data.load(small_run / "public")
    pieces = np.asarray(made.params["embedding"])
    pieces = pieces + 0.3 * np.random.default_rng(0).standard_normal(pieces.shape).astype(np.float32)
    pieces[models.END] = 0
    folder = tmp_path_factory.mktemp("talking")
    data.save(folder, data.make(made.config, {**made.params, "embedding": pieces}, made.vocabulary))
    return folder


@pytest.fixture
def piped(monkeypatch):
    """Makes these bytes standard input, or an open pipe's writing end of nothing."""
    read, write = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(read))

    def give(content):
        os.write(write, content)
        os.close(write)

    yield give
    sys.stdin.close()


def printed(capsys, *argv):
    status = main(["translation", "translate", *map(str, argv)])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("text", ["house\n", "house", "\n", "house\n\nriver\n"])
def test_empty_translations_keep_their_lines(small_run, tmp_path, capsys, text):
    (tmp_path / "text").write_text(text)
    argv = ("--model", small_run / "public", "--input", tmp_path / "text")
    status, out, err = printed(capsys, *argv)
    lines = text.removesuffix("\n").split("\n")
    words = sum(bool(line) for line in lines)
    assert (status, out) == (0, "\n" * len(lines))
    assert ("the model says nothing" in err) == (words > 0)
    status, result = run(capsys, "translate", *argv)
    assert (result["translations"], result["empty"]) == ([""] * len(lines), words)
    assert printed(capsys, *argv, "--output", tmp_path / "out")[0] == 0
    assert (tmp_path / "out").read_text() == "\n" * len(lines)
    for taken in ("out", "text"):  # its own input, too
        before = (tmp_path / taken).read_bytes()
        status, said = run(capsys, "translate", *argv, "--output", tmp_path / taken)
        assert status == 2
        assert f"--output {tmp_path / taken} exists" in said
        assert (tmp_path / taken).read_bytes() == before


def test_blank_lines_of_a_batch_stay_and_change_nothing(talking, tmp_path, capsys):
    """hello, nothing, three spaces, world: four lines, the first and last as when translated alone (AC50)."""
    (tmp_path / "text").write_text("hello\n\n   \nworld\n")
    status, out, _ = printed(capsys, "--model", talking, "--input", tmp_path / "text")
    assert status == 0
    first, second, third, fourth, rest = out.split("\n")
    assert (second, third, rest) == ("", "", "")
    assert first != fourth
    for word, answer in (("hello", first), ("world", fourth)):
        (tmp_path / word).write_text(f"{word}\n")
        assert answer.strip()
        assert printed(capsys, "--model", talking, "--input", tmp_path / word)[:2] == (0, f"{answer}\n")


def test_standard_input_is_answered_line_by_line(talking, tmp_path, capsys, piped):
    content = b"\xef\xbb\xbfhouse garden\r\n\n\x00\nriver way"
    (tmp_path / "text").write_bytes(content)
    model = ("--model", talking)
    status, told, _ = printed(capsys, *model, "--input", tmp_path / "text")
    assert (status, [bool(line) for line in told.split("\n")]) == (0, [True, False, False, True, False])
    piped(content)
    assert printed(capsys, *model)[:2] == (0, told)


def test_an_answer_comes_before_the_next_line_is_there(talking, monkeypatch):
    """A program that writes a line and waits for its translation is not left waiting."""
    (stdin, give), (take, stdout) = os.pipe(), os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(stdin))
    monkeypatch.setattr(sys, "stdout", os.fdopen(stdout, "w"))
    status = []
    argv = ["translation", "translate", "--model", str(talking)]
    thread = threading.Thread(target=lambda: status.append(main(argv)), daemon=True)
    thread.start()
    with os.fdopen(take) as answers:
        for _ in range(2):
            os.write(give, b"house\n")
            assert answers.readline().endswith("\n")
        os.close(give)
        thread.join(20)
    sys.stdin.close()
    assert status == [0]


def test_a_line_that_is_no_text_is_named_after_the_answers_before_it(talking, capsys, piped):
    piped(b"house\n\nca\xe9f\nriver\n")
    status, out, err = printed(capsys, "--model", talking)
    assert (status, out.count("\n")) == (2, 2)
    assert "standard input, line 3: not UTF-8 (byte 0xe9 at 3)" in err


def test_standard_input_into_a_file_or_one_object(talking, tmp_path, capsys, piped):
    piped(b"house\nriver\n")
    status, out = run(capsys, "translate", "--model", talking)
    assert (status, out["lines"], len(out["translations"])) == (0, 2, 2)
