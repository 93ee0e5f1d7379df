"""Client data comes in whole, in order and by client, or is refused in one line that names the place."""

import contextlib
import gzip
import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.common import hugging_face, parallel_text, readers
from trainers.common.errors import InputError

RECORDS = [
    {"client_id": "b", "text": ["Hello there!", "it's fine.."]},
    {"client_id": "a", "text": ["One two"]},
    {"client_id": "b", "text": ["later"]},
]


def write_jsonl(path, records, end="\n"):
    path.write_bytes("".join(json.dumps(r, ensure_ascii=False) + end for r in records).encode())
    return path


def refusal(*args, read=readers.read_clients, **options):
    with pytest.raises(InputError) as refused:
        read(*args, **options)
    message = str(refused.value)
    assert "\n" not in message
    return message


def everything(data):
    return {i: data.client_tokens(n) for n, i in enumerate(data.ids)}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "client_id;text\na;b\n", "by ',' in a .csv file, and by ';' in this one; save it with ','"),
        ("a.csv", "client_id\ttext\na\tb\n", "and by tabs in this one; save it with ',', or name it .tsv"),
        (
            "a.tsv",
            "client_id,text\na,b\n",
            "by tabs in a .tsv file, and by ',' in this one; save it with tabs",
        ),
        ("a.csv", "user\na\n", "it has: user (the first line of a table names its columns); choose one with"),
        ("a.jsonl", '{"user;id": "a"}\n', "it has: user;id; choose one with --client-field"),
    ],
)
def test_cells_separated_by_something_else_are_told(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    assert message in refusal(tmp_path / name)


def test_a_folder_that_is_mistyped_is_no_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    assert "my/nowhere does not exist" in refusal("my/nowhere", read=readers.read_splits)
    assert not hugging_face.is_name("my/nowhere")
    assert hugging_face.is_name("hf:my/nowhere")
    assert hugging_face.is_name("owner/name")
    monkeypatch.setattr(hugging_face.importlib.util, "find_spec", lambda name: None)
    assert "owner/name does not exist here; check the path" in refusal("owner/name")


def test_a_client_is_one_whatever_the_number_of_its_records(tmp_path):
    data = readers.read_clients(write_jsonl(tmp_path / "d.jsonl", RECORDS))
    assert data.ids == ["b", "a"]
    assert everything(data) == {
        "b": [["hello", "there", "!"], ["it's", "fine", "..."], ["later"]],
        "a": [["one", "two"]],
    }
    assert data.client_texts(0) == ["Hello there!", "it's fine..", "later"]
    assert data.report.merged_records == 1
    assert data.owners.tolist() == [0, 0, 0, 1]


def flat(records):
    return [{"client_id": r["client_id"], "text": t} for r in records for t in r["text"]]


def as_csv(path, rows, delimiter=","):
    def cell(t):
        return '"' + t.replace('"', '""') + '"'

    lines = [delimiter.join(cell(c) for c in ("client_id", "text"))]
    lines += [delimiter.join(cell(c) for c in r.values()) for r in rows]
    path.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    return path


def test_every_format_gives_the_same_data(tmp_path):
    rows = flat(RECORDS)
    nested = pa.table({k: [r[k] for r in RECORDS] for k in ("client_id", "text")})
    pq.write_table(nested, tmp_path / "nested.parquet")
    plain = pa.table({k: [r[k] for r in rows] for k in ("client_id", "text")})
    pq.write_table(plain, tmp_path / "plain.parquet")
    coded = plain.set_column(0, "client_id", plain["client_id"].dictionary_encode())
    pq.write_table(coded, tmp_path / "coded.parquet")
    write_jsonl(tmp_path / "crlf.jsonl", RECORDS, end="\r\n")
    (tmp_path / "bom.jsonl").write_bytes(
        b"\xef\xbb\xbf" + write_jsonl(tmp_path / "d.jsonl", rows).read_bytes()
    )
    with gzip.open(tmp_path / "z.jsonl.gz", "wt") as file:
        file.write("\n\n".join(map(json.dumps, rows)))
    as_csv(tmp_path / "d.csv", rows)
    as_csv(tmp_path / "d.tsv", rows, "\t")
    digests = {p.name: readers.read_clients(p).digest for p in sorted(tmp_path.iterdir())}
    assert len(digests) == 9
    assert len(set(digests.values())) == 1, digests


def test_tokens_come_before_text_and_ids_keep_their_kind(tmp_path):
    records = [
        {"client_id": 7, "text": "Ab-c  d", "tokens": "ab - c d", "hour": 3},
        {"client_id": 5, "text": "x", "tokens": ["x", "y"], "hour": 23},
    ]
    data = readers.read_clients(write_jsonl(tmp_path / "d.jsonl", records))
    assert everything(data) == {7: [["ab", "-", "c", "d"]], 5: [["x", "y"]]}
    assert data.hours is not None
    assert data.hours.tolist() == [3, 23]
    renamed = readers.read_clients(tmp_path / "d.jsonl", text_field="text", client_field="hour")
    assert renamed.ids == [3, 23]


def test_other_data_have_another_digest(tmp_path):
    base = readers.read_clients(write_jsonl(tmp_path / "a.jsonl", RECORDS)).digest
    variants = [
        [RECORDS[1], RECORDS[0], RECORDS[2]],  # other order
        [*RECORDS[:2], {"client_id": "a", "text": ["later"]}],  # the same texts, other owners
        [*RECORDS[:2], {"client_id": "b", "text": ["latex"]}],
        [*RECORDS, {"client_id": "c", "text": []}],
    ]
    found = {readers.read_clients(write_jsonl(tmp_path / "v.jsonl", v)).digest for v in variants}
    assert base not in found
    assert len(found) == len(variants)


def test_selecting_clients_equals_reading_only_them(tmp_path):
    data = readers.read_clients(write_jsonl(tmp_path / "a.jsonl", RECORDS))
    only = readers.read_clients(write_jsonl(tmp_path / "b.jsonl", [RECORDS[1]]))
    assert data.select([1]).digest == only.digest
    assert data.select([1]).client_tokens(0) == [["one", "two"]]


def test_cap_keeps_the_first_examples_of_each_client(tmp_path):
    records = [
        {"client_id": c, "text": f"{c} {i}"} for i in range(5) for c in ("a", "b") if c == "a" or i < 2
    ]
    data = readers.read_clients(write_jsonl(tmp_path / "d.jsonl", records), max_examples_per_client=3)
    assert everything(data) == {"a": [["a", "0"], ["a", "1"], ["a", "2"]], "b": [["b", "0"], ["b", "1"]]}
    assert (data.report.capped_clients, data.report.capped_examples) == (1, 2)


def test_line_separators_of_unicode_do_not_end_a_record(tmp_path):
    record = {"client_id": "a", "text": "one\u2028two\x0cthree\x85four"}
    data = readers.read_clients(write_jsonl(tmp_path / "d.jsonl", [record]))
    assert data.client_tokens(0) == [["one", "two", "three", "four"]]


def test_damage_inside_a_parquet_file_is_never_a_crash(tmp_path):
    pq.write_table(
        pa.table({"client_id": ["a"] * 999, "text": [f"t{i}" for i in range(999)]}), tmp_path / "d.parquet"
    )
    whole = (tmp_path / "d.parquet").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[rng.integers(4, len(whole) - 8)] ^= 0xFF
        (tmp_path / "d.parquet").write_bytes(damaged)
        with contextlib.suppress(InputError):  # anything else is a bug
            readers.read_clients(tmp_path / "d.parquet")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"client_id": "a", "text": "caf\xe9"}', "not UTF-8 (byte 0xe9"),
        (b'{"client_id": "a"}', "no 'text'"),
        (b'{"client_id": "a", "text": null}', "null"),
        (b'{"client_id": "a", "text": {"x": 1}}', "an object"),
        (b'{"client_id": "a", "text": ["x", 1]}', "list of"),
        (b'{"client_id": 1.5, "text": "x"}', "a fraction"),
        (b'{"client_id": true, "text": "x"}', "true or false"),
        (b'{"client_id": null, "text": "x"}', "null"),
        (b'{"client_id": "", "text": "x"}', "empty"),
        (b'{"client_id": 1, "text": "x"}', "a number here and a string"),
        (b'{"client_id": 99999999999999999999, "text": "x"}', "64 bits"),
        (b'{"client_id": "a", "text": "\\ud800"}', "surrogate"),
        (b'["a", "x"]', "not an object"),
        (b'{"client_id": "a", "text": ' + b"[" * 5000, "JSON"),
    ],
)
def test_bad_records_are_named_or_skipped(tmp_path, line, says):
    path = tmp_path / "d.jsonl"
    good = b'{"client_id": "ok", "text": "fine"}'
    path.write_bytes(good + b"\n" + line + b"\n" + good)
    message = refusal(path)
    assert f"{path}, line 2" in message
    assert says in message
    assert message.endswith("; mend it")  # this caller has no option to leave it out
    assert "--skip-bad" in refusal(path, skip_bad=False)
    data = readers.read_clients(path, skip_bad=True)
    assert everything(data) == {"ok": [["fine"], ["fine"]]}
    assert data.report.skipped_records == 1


def test_no_client_text_in_what_is_logged(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"client_id": "a", "text": "zqx zqx"}\n{"client_id": "b", "text": ["zqx", 1]}\n{"zqx')
    data = readers.read_clients(path, skip_bad=True)
    assert data.report.skipped_records == 2
    assert "zqx" not in " ".join(data.report.lines())


def test_unknown_columns_list_those_that_exist(tmp_path):
    write_jsonl(tmp_path / "d.jsonl", RECORDS)
    as_csv(tmp_path / "d.csv", flat(RECORDS))
    pq.write_table(pa.table({"client_id": ["a"], "text": ["x"]}), tmp_path / "d.parquet")
    for name in ("d.jsonl", "d.csv", "d.parquet"):
        message = refusal(tmp_path / name, text_field="body")
        assert "'body'" in message
        assert "client_id, text" in message
        assert "--text-field" in message
        assert "--client-field" in refusal(tmp_path / name, client_field="user")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"client_id,text\na,x\nb\n", "line 3: 1 cells"),
        (b'client_id,text\na,"x"y\nb,y\n', "line 2: not valid CSV"),
        (b"client_id,text\na,caf\xe9\n", "line 2: not UTF-8"),
        (b"client_id,text\na,x\0y\n", "line 2: holds a NUL byte"),
        (b"client_id,client_id\na,x\n", "occurs twice"),
        (b"client_id,text\n", "no usable record"),
        ("client_id,text\na,x\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_bad_csv(tmp_path, content, says):
    (tmp_path / "d.csv").write_bytes(content)
    assert says in refusal(tmp_path / "d.csv")


def test_csv_cells_may_hold_anything(tmp_path):
    long = "word " * 40_000  # beyond the csv module's usual limit on a cell
    rows = [{"client_id": "a", "text": 'a "quoted", text\nof two lines'}, {"client_id": "b", "text": long}]
    data = readers.read_clients(as_csv(tmp_path / "d.csv", rows))
    assert data.client_tokens(0)[0][:4] == ["a", '"', "quoted", '"']
    assert len(data.client_tokens(1)[0]) == readers.MAX_TOKENS_PER_EXAMPLE


def test_damaged_gzip(tmp_path):
    path = tmp_path / "d.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(RECORDS[0]) + "\n")
    path.write_bytes(path.read_bytes()[:-12])
    assert "damaged gzip" in refusal(path, skip_bad=True)
    path.write_bytes(b"not gzip")
    assert "damaged gzip" in refusal(path)


def test_nulls_in_parquet_name_the_row(tmp_path):
    pq.write_table(pa.table({"client_id": ["a", "b", "c"], "text": ["x", None, "z"]}), tmp_path / "d.parquet")
    assert "row 2: 'text' is null" in refusal(tmp_path / "d.parquet")
    data = readers.read_clients(tmp_path / "d.parquet", skip_bad=True)
    assert data.ids == ["a", "c"]
    pq.write_table(pa.table({"client_id": [1.0], "text": ["x"]}), tmp_path / "d.parquet")
    assert "a fraction" in refusal(tmp_path / "d.parquet")
    pq.write_table(pa.table({"client_id": [1], "text": [b"caf\xe9"]}), tmp_path / "d.parquet")
    assert "'text' is" in refusal(tmp_path / "d.parquet")


def test_hours_out_of_range(tmp_path):
    for hour in (24, -1, 3.5, "noon"):
        records = [{"client_id": "a", "text": "x", "hour": 1}, {"client_id": "a", "text": "x", "hour": hour}]
        assert "line 2: 'hour'" in refusal(write_jsonl(tmp_path / "d.jsonl", records))
    pq.write_table(pa.table({"client_id": ["a"], "text": ["x"], "hour": [24]}), tmp_path / "d.parquet")
    assert "row 1: 'hour'" in refusal(tmp_path / "d.parquet")


def test_hours_that_the_first_record_lacks_are_not_dropped_in_silence(tmp_path):
    records = [{"client_id": "a", "text": "x"}, {"client_id": "b", "text": "x", "hour": 99}]
    assert "line 2: 'hour' is in some records only" in refusal(write_jsonl(tmp_path / "d.jsonl", records))
    pq.write_table(
        pa.table({"client_id": ["a", "b"], "text": ["x", "x"], "hour": [None, 3]}), tmp_path / "d.parquet"
    )
    assert "row 2: 'hour'" in refusal(tmp_path / "d.parquet")
    nowhere = [{"client_id": "a", "text": "x"}, {"client_id": "b", "text": "x", "hour": None}]
    assert readers.read_clients(write_jsonl(tmp_path / "d.jsonl", nowhere)).hours is None


# Splits.


def test_files_beside_a_train_file(tmp_path):
    for name, client in (("x.train.jsonl", "a"), ("x.val.jsonl", "b"), ("x.test.jsonl", "c")):
        write_jsonl(tmp_path / name, [{"client_id": client, "text": "t"}])
    splits = readers.read_splits(tmp_path / "x.train.jsonl")
    assert [part.ids for part in splits[:3]] == [["a"], ["b"], ["c"]]
    assert splits.shared_clients == 0
    assert readers.read_clients(tmp_path / "x.train.jsonl", split="validation").ids == ["b"]
    assert readers.siblings(tmp_path / "x_train_y.csv") == {"train": tmp_path / "x_train_y.csv"}
    assert readers.siblings(tmp_path / "training.csv") == {}
    assert readers.siblings(tmp_path / "strain.csv") == {}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_split_column(tmp_path, kind):
    path = tmp_path / f"d.{kind}"
    rows = [("a", "train"), ("b", "valid"), ("c", "test"), ("c", "train"), ("d", "kept back")]
    records = [{"client_id": c, "text": c, "split": s} for c, s in rows]
    if kind == "jsonl":
        write_jsonl(path, records)
    else:
        pq.write_table(pa.Table.from_pylist(records), path)
    splits = readers.read_splits(path)
    assert [part.ids for part in splits[:3]] == [["a", "c"], ["b"], ["c"]]
    assert splits.shared_clients == 1  # c is no unseen device
    write_jsonl(tmp_path / "two.jsonl", [r for r in records if r["split"] != "test"])
    assert "no test split" in refusal(tmp_path / "two.jsonl", split="test")


def test_without_splits_clients_are_divided_by_their_id(tmp_path):
    records = [{"client_id": f"c{i}", "text": "x"} for i in range(400)]
    splits = readers.read_splits(write_jsonl(tmp_path / "d.jsonl", records))
    ids = [set(part.ids) for part in splits[:3]]
    assert sum(map(len, ids)) == 400 == len(set.union(*ids))
    assert 20 <= len(ids[1]) <= 60  # 40 expected, standard deviation 6
    assert 20 <= len(ids[2]) <= 60
    # Other clients and another order leave everybody where they were.
    again = readers.read_splits(write_jsonl(tmp_path / "e.jsonl", records[:200][::-1]))
    assert set(again.train.ids) == ids[0] & set(f"c{i}" for i in range(200))


def test_plain_text_is_public_text(tmp_path):
    (tmp_path / "p.txt").write_text("one two\n\n  \nthree\u2028four\n", encoding="utf-8")
    texts = readers.read_texts(tmp_path / "p.txt", text_field="body")
    assert texts.texts.to_pylist() == ["one two", "three\u2028four"]


def test_public_text_has_no_clients(tmp_path):
    write_jsonl(tmp_path / "p.jsonl", [{"text": "One two"}, {"text": ["", "three"]}])
    texts = readers.read_texts(tmp_path / "p.jsonl")
    assert [texts.tokens[i] for i in range(len(texts.tokens))] == [["one", "two"], ["three"]]
    assert texts.texts.to_pylist() == ["One two", "three"]
    assert texts.report.blank_examples == 1


def test_records_with_other_fields(tmp_path):
    write_jsonl(tmp_path / "d.jsonl", [{"text": "a\0b", "label": 3}, {"text": "c", "label": None}])
    assert "line 2: no 'label'" in refusal(tmp_path / "d.jsonl", ["text", "label"], read=readers.read_records)
    records, report = readers.read_records(
        tmp_path / "d.jsonl", ["text", "label"], optional=["group"], skip_bad=True
    )
    assert records == [{"text": "ab", "label": 3, "group": None}]
    assert (report.skipped_records, report.nul_characters) == (1, 1)
    assert "no column 'kind'" in refusal(tmp_path / "d.jsonl", ["kind"], read=readers.read_records)


def test_names_of_data_sets_need_the_package(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = refusal("owner/some-data-set")
    assert "owner/some-data-set" in message
    assert "pip install datasets" in message


# What the readers use of the `datasets` package, which is no dependency: a data set is a mapping of splits.
DATASETS = """
HELD = {
    "train": [{"client_id": c, "text": f"text of {c}", "translation": {"en": c, "de": c * 2}} for c in "aab"],
    "dev": [{"client_id": "c", "text": "held out", "translation": {"en": "c", "de": "cc"}}],
    "test": [{"client_id": "d", "text": "last", "translation": {"en": "d", "de": "dd"}}],
}

def load_dataset(path, name=None, *, split=None):
    if (path, name) not in [("owner/set", None), ("owner/set", "small")]:
        raise ConnectionError(f"Couldn't reach {path!r}\\nand more")
    return HELD if split is None else HELD[split]
"""


def test_data_sets_by_name(tmp_path, monkeypatch):
    (tmp_path / "datasets.py").write_text(DATASETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.chdir(tmp_path)
    splits = readers.read_splits("owner/set")
    assert [part.ids for part in splits[:3]] == [["a", "b"], ["c"], ["d"]]
    assert readers.read_clients("hf:owner/set:small").num_clients == 4
    pairs, notes = parallel_text.read_pair_splits("owner/set")
    assert [len(part) for part in pairs] == [3, 1, 1]
    assert notes == []
    assert "ConnectionError: Couldn't reach 'owner/absent'" in refusal("owner/absent")
    assert "does not exist" in refusal("owner/absent.csv")
    monkeypatch.delitem(sys.modules, "datasets")


def test_the_irc_corpus(shared):
    data = readers.read_clients(shared / "data" / "fedtext" / "irc_federated.parquet", split="train")
    assert data.num_clients == 13_506
    assert data.num_examples + data.report.capped_examples == 165_005
    assert data.counts.max() == 256
    assert data.hours is not None
    assert data.client_tokens(0)[0] == [
        "there's",
        "a",
        "checksums",
        ".",
        "md5",
        "file",
        "inside",
        "the",
        "iso",
        "?",
    ]
