"""TensorFlow Federated's client data, byte for byte, without TensorFlow; and LEAF's."""

import contextlib
import json
import sqlite3

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from trainers.common import readers, tff_sqlite
from trainers.common.errors import InputError


@pytest.fixture
def folder(shared):
    return shared / "data" / "fedtext"


def as_golden(features):
    """Features as the recorded file writes them: bytes in hex."""
    return {
        name: [kind, [v.hex() if isinstance(v, bytes) else v for v in values]]
        for name, (kind, values) in features.items()
    }


def test_decodes_what_tensorflow_wrote(folder):
    cases = [json.loads(line) for line in (folder / "tf_example_golden.jsonl").read_text().splitlines()]
    assert len(cases) == 14
    for case in cases:
        assert as_golden(tff_sqlite.decode_example(bytes.fromhex(case["hex"]))) == case["features"], case[
            "name"
        ]


def test_encodes_as_tensorflow_does(folder):
    for line in (folder / "tf_example_golden.jsonl").read_text().splitlines():
        case = json.loads(line)
        if case["name"] == "int_unpacked":  # legal, but nobody writes it
            continue
        message = bytes.fromhex(case["hex"])
        assert tff_sqlite.encode_example(tff_sqlite.decode_example(message)) == message, case["name"]


FEATURE = st.one_of(
    st.tuples(st.just("bytes_list"), st.lists(st.binary(max_size=200))),
    st.tuples(st.just("int64_list"), st.lists(st.integers(-(2**63), 2**63 - 1))),
    st.tuples(st.just("float_list"), st.lists(st.floats(width=32, allow_nan=False))),
    st.just((None, [])),
)


@hypothesis.settings(max_examples=50)
@hypothesis.given(st.dictionaries(st.text(max_size=20), FEATURE, max_size=5))
def test_a_message_survives_the_round_trip(features):
    assert tff_sqlite.decode_example(tff_sqlite.encode_example(features)) == features


@hypothesis.given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_refused(message):
    with contextlib.suppress(ValueError):  # nothing else may come out
        tff_sqlite.decode_example(message)


def test_every_cut_off_message_is_refused_or_shorter(folder):
    message = tff_sqlite.encode_example({"tokens": "hello world", "score": [1, 300], "x": 0.5})
    whole = tff_sqlite.decode_example(message)
    for n in range(1, len(message)):
        with pytest.raises(ValueError, match="cut off"):
            tff_sqlite.decode_example(message[:n])
    assert set(whole) == {"tokens", "score", "x"}


def test_the_sample_decodes_to_the_recorded_rows(folder):
    rows = [row.fields for row in tff_sqlite.rows(folder / "tff_sample.sqlite")]
    expected = [json.loads(line) for line in (folder / "tff_sample.expected.jsonl").read_text().splitlines()]
    assert len(rows) == len(expected) == 323
    for row, record in zip(rows, expected):
        assert row is not None
        assert row["split"] == record.pop("split_name")
        assert {k: row[k] for k in record} == record
    data = readers.read_clients(folder / "tff_sample.sqlite")
    assert data.num_clients == 50
    assert data.client_tokens(0)[0] == ["use", "grsync", "(", "a", "frontend", "for", "rsync", ")"]


def test_writing_the_sample_again_gives_the_same_rows_and_tables(folder, tmp_path):
    groups: dict[tuple, list] = {}
    for row in tff_sqlite.rows(folder / "tff_sample.sqlite"):
        record = dict(row.fields)
        groups.setdefault((record.pop("split"), record.pop("client_id")), []).append(record)
    path = tmp_path / "copy.sqlite"
    tff_sqlite.write(path, [(split, client, examples) for (split, client), examples in groups.items()])
    queries = (
        "SELECT client_id, split_name, serialized_example_proto FROM examples ORDER BY client_id, rowid",
        "SELECT client_id, split_name, num_examples FROM client_metadata ORDER BY client_id",
    )
    with sqlite3.connect(folder / "tff_sample.sqlite") as ours, sqlite3.connect(path) as theirs:
        for query in queries:
            assert ours.execute(query).fetchall() == theirs.execute(query).fetchall()
    assert sum(tff_sqlite.num_examples(path).values()) == 323


def test_writing_is_whole_or_absent(tmp_path):
    def clients():
        yield "train", "a", [{"tokens": "x"}]
        raise RuntimeError("killed")

    path = tmp_path / "d.sqlite"
    with pytest.raises(RuntimeError):
        tff_sqlite.write(path, clients())
    assert list(tmp_path.iterdir()) == []
    tff_sqlite.write(path, [("train", "a", [{"tokens": "x y"}, {"tokens": "z"}]), ("test", "b", [])])
    assert tff_sqlite.num_examples(path) == {("train", "a"): 2, ("test", "b"): 0}
    assert readers.read_clients(path, split="train").client_tokens(0) == [["x", "y"], ["z"]]


def test_values_of_one_kind_only():
    with pytest.raises(ValueError, match="mixes kinds"):
        tff_sqlite.encode_example({"x": [1, "a"]})
    with pytest.raises(ValueError, match="64 bits"):
        tff_sqlite.encode_example({"x": 2**63})
    assert tff_sqlite.decode_example(tff_sqlite.encode_example({"x": np.int32(5)})) == {
        "x": ("int64_list", [5])
    }


def test_other_databases_are_refused(tmp_path):
    sqlite3.connect(tmp_path / "d.sqlite").execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(InputError, match="examples and client_metadata"):
        readers.read_clients(tmp_path / "d.sqlite")
    (tmp_path / "d.sqlite").write_text("no database at all, but long enough to look like a header")
    with pytest.raises(InputError, match=r"d\.sqlite: not TensorFlow"):
        readers.read_clients(tmp_path / "d.sqlite")


def test_a_bad_example_names_its_row(tmp_path):
    path = tmp_path / "d.sqlite"
    tff_sqlite.write(path, [("train", "a", [{"tokens": "x"}, {"tokens": "y"}])])
    with sqlite3.connect(path) as database:
        database.execute("UPDATE examples SET serialized_example_proto = x'0a05' WHERE rowid = 2")
    with pytest.raises(InputError, match=r"example 2: not a tf.train.Example \(cut off\)"):
        readers.read_clients(path)
    assert readers.read_clients(path, skip_bad=True).client_tokens(0) == [["x"]]


def test_leaf_windows_are_the_utterances(folder):
    data = readers.read_clients(folder / "leaf_sample.json")
    raw = json.loads((folder / "leaf_sample.json").read_text())
    assert data.ids == raw["users"]
    assert data.counts.tolist() == raw["num_samples"]
    assert data.client_tokens(0)[0] == ["use", "grsync", "(", "a", "frontend", "for", "rsync", ")"]
    for n, user in enumerate(raw["users"]):
        for got, x, y in zip(data.client_tokens(n), raw["user_data"][user]["x"], raw["user_data"][user]["y"]):
            assert got == [w for w in [*x, y[-1]] if w not in ("<BOS>", "<EOS>", "<PAD>")]


def leaf(tmp_path, user_data, num_samples=None, indent=None):
    users = list(user_data)
    counts = num_samples or [len(d["x"]) for d in user_data.values()]
    text = json.dumps({"users": users, "num_samples": counts, "user_data": user_data}, indent=indent)
    (tmp_path / "leaf.json").write_text(text)
    return tmp_path / "leaf.json"


def test_other_shapes_of_leaf(tmp_path):
    path = leaf(
        tmp_path, {"romeo": {"x": ["what light throug", "hat light through"], "y": ["h", " "]}}, indent=2
    )
    assert readers.read_clients(path).client_texts(0) == ["what light through", "hat light through "]
    window = [["<BOS>", "a", "b"], ["c", "<EOS>", "<PAD>"]]
    nested = {"u": {"x": [window], "y": [{"target_tokens": [["a", "b", "c"], ["<EOS>", "<PAD>", "<PAD>"]]}]}}
    assert readers.read_clients(leaf(tmp_path, nested)).client_tokens(0) == [["a", "b", "c"], ["c"]]


def test_leaf_that_is_no_text_or_miscounts(tmp_path):
    image = {"u": {"x": [[0.5, 1.0]], "y": [3]}, "v": {"x": ["fine"], "y": [0]}}
    with pytest.raises(InputError, match="user 'u': an example that is no text"):
        readers.read_clients(leaf(tmp_path, image))
    assert readers.read_clients(leaf(tmp_path, image), skip_bad=True).ids == ["v"]
    with pytest.raises(InputError, match="num_samples says 5"):
        readers.read_clients(leaf(tmp_path, {"u": {"x": ["a"], "y": ["b"]}}, num_samples=[5]))
    twice = {"users": ["u", "u"], "num_samples": [1, 1], "user_data": {"u": {"x": ["a"], "y": ["b"]}}}
    (tmp_path / "leaf.json").write_text(json.dumps(twice))
    with pytest.raises(InputError, match="user 'u': stands twice in `users`"):
        readers.read_clients(tmp_path / "leaf.json")
    (tmp_path / "leaf.json").write_text('{"users": ["u"], "user_data"')
    with pytest.raises(InputError, match="not valid JSON"):
        readers.read_clients(tmp_path / "leaf.json")
