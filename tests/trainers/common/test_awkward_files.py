"""The files of the case collection, and the same bytes made here: refused in one line, or read to the stated values."""

import contextlib
import gzip
import pathlib
import resource
import time
import tracemalloc

import pytest

from trainers import cli
from trainers.common import readers
from trainers.common.errors import InputError

MILLION = b"".join(
    b'{"client_id": "%s", "text": ["%s"]}\n' % (name, b" ".join([b"ab"] * tokens))
    for name, tokens in ((b"big", 1_000_000), (b"small", 3))
)
FILES = {
    "clients_truncated.jsonl": (
        b'{"client_id": "u1", "text": ["one"]}\n{"client_id": "u2", "text": ["two"]}\n{"client_id": "u3", "text": ["thr'
    ),
    "clients_nul.jsonl": (
        b'{"client_id": "u1", "text": ["before\\u0000after"]}\n{"client_id": "u2", "text": ["raw\0nul"]}\n'
        b'{"client_id": "u3", "text": ["fine"]}\n'
    ),
    "clients_zero.jsonl": (
        b'{"client_id": "u1", "text": []}\n{"client_id": "u2", "text": [""]}\n{"client_id": "u3", "text": ["   "]}\n'
        b'{"client_id": "u4", "text": ["a real sentence ."]}\n'
    ),
    "client_million.jsonl.gz": gzip.compress(MILLION),
    "empty.parquet": b"",
    "truncated.parquet": b"PAR1" + bytes(range(64)),
    "renamed.parquet": b'{"client_id": "u1", "text": ["not parquet"]}\n',
    "hugefooter.parquet": b"PAR1" + bytes(32) + (2**31 - 1).to_bytes(4, "little") + b"PAR1",
}


@pytest.fixture(params=["made here", "collected"])
def cases(request, tmp_path):
    if request.param == "collected":
        return request.getfixturevalue("shared") / "cases" / "files"
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_the_bytes_made_here_are_those_of_the_collection(shared):
    def content(data, name):
        return gzip.decompress(data) if name.endswith(".gz") else data

    for name, made in FILES.items():
        assert content(made, name) == content((shared / "cases" / "files" / name).read_bytes(), name), name


def refusal(path, **options):
    with pytest.raises(InputError) as refused:
        readers.read_clients(path, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def everything(data):
    return {i: data.client_tokens(n) for n, i in enumerate(data.ids)}


def test_cut_off_record(cases):
    """The third record ends inside a string (AC25)."""
    assert "clients_truncated.jsonl, line 3" in refusal(cases / "clients_truncated.jsonl")
    data = readers.read_clients(cases / "clients_truncated.jsonl", skip_bad=True)
    assert everything(data) == {"u1": [["one"]], "u2": [["two"]]}
    assert data.report.skipped_records == 1
    first, second = data.report.lines()
    assert first == "1 bad records were skipped"
    assert "line 3" in second


def test_nul(cases):
    """An escaped NUL is taken out and the text goes on behind it; a raw one is no JSON (AC26)."""
    assert "clients_nul.jsonl, line 2" in refusal(cases / "clients_nul.jsonl")
    data = readers.read_clients(cases / "clients_nul.jsonl", skip_bad=True)
    assert everything(data) == {"u1": [["beforeafter"]], "u3": [["fine"]]}
    assert (data.report.nul_characters, data.report.skipped_records) == (1, 1)
    assert "1 NUL characters were removed" in data.report.lines()


def test_clients_without_examples_stay_known(cases, tmp_path):
    """[], [""] and ["   "] are no example; all four clients are there (AC27)."""
    data = readers.read_clients(cases / "clients_zero.jsonl")
    assert data.ids == ["u1", "u2", "u3", "u4"]
    assert everything(data) == {"u1": [], "u2": [], "u3": [], "u4": [["a", "real", "sentence", "."]]}
    assert data.report.empty_clients == 3
    (tmp_path / "none.jsonl").write_text('{"client_id": "u", "text": []}\n')
    nothing = readers.read_clients(tmp_path / "none.jsonl")
    assert (nothing.num_clients, nothing.num_examples) == (1, 0)


def test_a_million_tokens_of_one_client(cases):
    """The cap is kept and told, and what is held of the text is bounded by it, while it is read too (AC28)."""
    path = cases / "client_million.jsonl.gz"
    tracemalloc.start()
    try:
        data = readers.read_clients(path, max_tokens_per_example=100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert data.ids == ["big", "small"]
    assert data.tokens.lengths.tolist() == [100, 3]
    assert data.report.cut_examples == 1
    assert "1 examples were cut at the most tokens allowed" in data.report.lines()
    assert [len(data.client_texts(i)[0]) for i in (0, 1)] == [6400, 8]
    assert (
        peak < 8 * 3_000_000
    )  # some copies of its line; a million tokens as strings would take 50 MB and more


@contextlib.contextmanager
def little_memory(more: int):
    """Lets the process have at most `more` bytes of addresses beside those it has."""
    statm = pathlib.Path("/proc/self/statm")
    if not statm.exists():  # a system on which addresses cannot be limited
        yield
        return
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("empty.parquet", "empty"),
        ("truncated.parquet", "cut off"),
        ("renamed.parquet", "not a parquet file"),
        ("hugefooter.parquet", "damaged parquet footer (claims 2147483647 bytes of 44)"),
    ],
)
def test_broken_parquet(cases, capsys, name, says):
    """One line that names the file, at once, and without room for what the footer claims (AC29)."""
    began = time.process_time()
    with little_memory(2**30):
        message = refusal(cases / name)
    assert time.process_time() - began < 1
    assert says in message
    assert str(cases / name) in message
    assert cli.main(["data", "inspect", str(cases / name)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [f"jaxpriv data: {message}"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("doc_one.txt", "no column 'client_id'"), ("absent.jsonl", "does not exist"), (".", "is a folder")],
)
def test_what_is_no_file_of_clients(tmp_path, name, says):
    (tmp_path / "doc_one.txt").write_text("The only sentence here.\n")
    message = refusal(tmp_path / name)
    assert says in message
    assert (tmp_path / name).name in message
