"""Whether a pair is trained on, or is in a memory, depends on its own record, never on what another's `split` says."""

import contextlib
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.common import parallel_text
from trainers.common.errors import InputError
from trainers.common.pairs import clean_pair

ABSENT = "absent"
SPLITS = [ABSENT, None, "", "  ", "train", "Training", "val", "test", "news", "None", 3, False]
TEXTS = [
    "house",
    "garden 7",
    "stone river",
    "",
    "Garden 8",
    "light",
]  # some meet, by `pairs.key`, or are blank

records = st.builds(
    lambda left, right, split: {"en": left, "de": right} | ({} if split == ABSENT else {"split": split}),
    st.sampled_from(TEXTS),
    st.sampled_from(TEXTS),
    st.sampled_from(SPLITS),
)
changes = st.tuples(
    st.lists(records, max_size=8), st.integers(0, 8), st.none() | records, st.none() | records
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("uses")


def files(change):
    """A file's records with one of them more, less, or another in its place; and the two records that it is about."""
    rest, place, one, other = change
    place = min(place, len(rest))
    listed = [[*rest[:place], *([] if r is None else [r]), *rest[place:]] for r in (one, other)]
    return zip(listed, (one, other))


def others(read, path, listed, own):
    """What is read of these records, without the pair of one of them."""
    path.write_text("".join(json.dumps(r) + "\n" for r in listed))
    kept = Counter((p.source, p.target) for p in read(path))
    pair = None if own is None else clean_pair(own["en"], own["de"])
    if pair is not None and kept[pair[:2]]:
        alone = len(read_alone(read, path.with_name("alone.jsonl"), own))
        kept.subtract({pair[:2]: alone})
    return +kept


def read_alone(read, path, record):
    path.write_text(json.dumps(record) + "\n")
    return read(path)


@settings(max_examples=150)
@given(change=changes)
def test_a_memory_of_one_file(folder, change):
    read = lambda path: parallel_text.read_train(path)[0]
    before, after = (others(read, folder / "a.jsonl", *file) for file in files(change))
    assert before == after


@settings(max_examples=150)
@given(change=changes)
def test_the_train_part_of_one_file(folder, change):
    def read(path):
        with contextlib.suppress(InputError):  # a party without any pair cannot take part
            return parallel_text.read_pair_splits(path)[0].train
        return []

    before, after = (others(read, folder / "a.jsonl", *file) for file in files(change))
    assert before == after


def test_what_a_split_means(folder):
    rows = [
        {"en": f"w{i}", "de": f"v{i}"} | ({} if s == ABSENT else {"split": s}) for i, s in enumerate(SPLITS)
    ]
    path = folder / "all.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    pairs, notes = parallel_text.read_train(path)
    assert [p.source for p in pairs] == [f"w{i}" for i in range(6)]
    assert notes == ["6 records whose `split` is for something else were left out"]
    splits, notes = parallel_text.read_pair_splits(path)
    assert {"w4", "w5"} <= {p.source for p in splits.train} <= {f"w{i}" for i in range(6)}
    assert "w6" in {p.source for p in splits.validation}
    assert "w7" in {p.source for p in splits.test}
    assert notes[0] == "all: 4 records whose `split` is for something else were left out"
    # What is for something else may be unfinished.
    path.write_text('{"en": "a", "de": null, "split": "test"}\n{"en": "b", "de": "c", "split": "train"}\n')
    assert [p.source for p in parallel_text.read_train(path)[0]] == ["b"]


def test_no_pair_is_read_like_one_where_that_would_tell(folder):
    unit = "<tu><tuv lang='en'><seg>a</seg></tuv><tuv lang='{}'><seg>b</seg></tuv></tu>"
    (folder / "none.jsonl").write_text("")
    (folder / "none.en").write_text("")
    (folder / "none.de").write_text("")
    (folder / "none.tmx").write_text(f"<tmx><body>{unit.format('fr')}</body></tmx>")
    (folder / "none.csv").write_text("en,de,split\na,b,test\n")
    for name in ("none.jsonl", "none.en", "none", "none.tmx", "none.csv"):
        pairs, notes = parallel_text.read_train(folder / name)
        assert pairs == []
        assert "no pair was read" in notes[-1]
        with pytest.raises(InputError):
            parallel_text.read_train(folder / name, may_be_empty=False)
    assert "its languages: en, fr" in parallel_text.read_train(folder / "none.tmx")[1][-1]
