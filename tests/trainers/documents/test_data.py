"""Where documents come from: splits given or by a hash of the id, the fitted folder's texts, a run's digests."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from tests.trainers.documents.conftest import SMALL
from trainers import cli
from trainers.common.errors import InputError
from trainers.documents import choices, data, fit, methods, preparation, store
from trainers.documents.config import Config, named


def write(path, size, **fields):
    rows = [{"id": f"i{n}", "text": f"Text {n}.", "label": "a", **fields} for n in range(size)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_one_file_is_divided_by_a_hash_of_the_ids_for_fit_and_evaluate_alike(tmp_path):
    for name in ("docs.jsonl", "docs_train.jsonl"):
        path = write(tmp_path / name, 400)
        for_fit, _ = data.load(path, ("train", "validation"))
        found, facts = data.load(path)
        assert {part: found[part].ids for part in for_fit} == {p: x.ids for p, x in for_fit.items()}
        sizes = [len(found[part].ids) for part in data.SPLITS]
        assert sum(sizes) == 400
        assert all(25 <= size <= 60 for size in sizes[1:])
        assert "hash" in facts["division"]
    longer = write(tmp_path / "docs.jsonl", 500)  # whoever joins moves nobody else
    assert set(found["test"].ids) <= set(data.load(longer)[0]["test"].ids)


def test_fit_needs_no_test_split_and_a_missing_one_alone_is_named(tmp_path):
    train = write(tmp_path / "docs_train.jsonl", 100)
    write(tmp_path / "docs_val.jsonl", 7)
    found, facts = data.load(train, ("train", "validation"))
    assert [len(x.ids) for x in found.values()] == [100, 7]
    assert facts["division"] == "splits given by the data"
    with pytest.raises(InputError, match="has train and validation documents, but no test ones") as caught:
        data.load(train)
    assert "no train" not in str(caught.value)
    (tmp_path / "docs_val.jsonl").rename(tmp_path / "docs_test.jsonl")
    found, facts = data.load(train)
    assert len(found["test"].ids) == 7
    assert len(found["train"].ids) + len(found["validation"].ids) == 100
    assert 0 < len(found["validation"].ids) < 25
    assert "10% of the train" in facts["division"]


def test_splits_that_lack_train_and_too_few_to_divide_are_refused(tmp_path):
    with pytest.raises(InputError, match="has test documents, but no train ones"):
        data.load(write(tmp_path / "a.jsonl", 20, split="test"))
    with pytest.raises(InputError, match="1 document, and a hash of their ids leaves none for"):
        data.load(write(tmp_path / "b.jsonl", 1))


def test_the_digest_follows_what_was_read(tmp_path):
    path = write(tmp_path / "docs.jsonl", 50)
    first = data.load(path)[1]["digest"]
    assert data.load(path)[1]["digest"] == first
    write(tmp_path / "docs.jsonl", 50, label="b")
    assert data.load(path)[1]["digest"] != first


def test_texts_of_a_fitted_folder_take_their_own_length(fitted, tmp_path):
    found = store.load(fitted)
    texts = ["é\ud800 \0 " * 200_000, "", "NFC \u00e9", *found.train.texts[3:-1], "x\0"]
    store.save(tmp_path, found._replace(train=found.train._replace(texts=texts)))
    assert store.load(tmp_path).train.texts == texts
    assert store.load(tmp_path).train.ids == found.train.ids
    assert (tmp_path / "documents.npz").stat().st_size < 3 * (fitted / "documents.npz").stat().st_size + 2e6


def _method(record, change):
    change(record["choices"]["bounded_sum"], record["validation_macro_f1"]["bounded_sum"])
    return record


DAMAGES = {
    "not json": "{",
    "a list": [],
    "format": lambda r: {**r, "format": 4},
    "no choices of a method": lambda r: _method(r, lambda c, _: c.clear()),
    "other epsilons": lambda r: _method(r, lambda c, _: c.update({"7": c["10"]})),
    "an epsilon that is none": lambda r: {
        **r,
        "choices": {"low_rank": {"x": r["choices"]["low_rank"]["10"]}},
    },
    "no score": lambda r: _method(r, lambda _, s: s.clear()),
    "no score of a method": lambda r: {**r, "validation_macro_f1": {}},
    "a score that is none": lambda r: _method(r, lambda _, s: s.update({"10": None})),
    "unknown method": lambda r: {**r, "choices": {"word_mdp": r["choices"]["low_rank"]}},
    "choices that are a list": lambda r: {**r, "choices": []},
    "a variant that is none": lambda r: _method(r, lambda c, _: c["10"].update({"overall": 3})),
    "unknown setting": lambda r: {**r, "config": {**r["config"], "new": 1}},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_fitted_folder_of_another_version_or_damaged_is_one_line(fitted, tmp_path, damage):
    folder = shutil.copytree(fitted, tmp_path / "fit")
    change = DAMAGES[damage]
    record = change(json.loads((folder / "fit.json").read_text())) if callable(change) else change
    (folder / "fit.json").write_text(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(InputError, match="fit again") as caught:
        store.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["public.npz", "documents.npz"])
@pytest.mark.parametrize("damage", ["truncated", "absent", "of another fit"])
def test_arrays_are_those_that_the_fit_was_written_with(fitted, tmp_path, name, damage):
    folder = shutil.copytree(fitted, tmp_path / "fit")
    if damage == "truncated":
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])
    elif damage == "absent":
        (folder / name).unlink()
    else:
        found = store.load(fitted)
        train = found.train._replace(ids=[*found.train.ids[1:], "other"])
        public = dataclasses.replace(found.public, centre=found.public.centre + 1)
        (tmp_path / "other").mkdir()
        store.save(tmp_path / "other", found._replace(train=train, public=public))
        shutil.copy(tmp_path / "other" / name, folder / name)
    with pytest.raises(InputError, match="fit again"):
        store.load(folder)


def test_close_epsilons_share_no_draws_and_no_column():
    one, two = 5.0000001, 5.0000002
    assert format(one, "g") == format(two, "g") == "5"
    assert [named(e) for e in (5.0, 0.1, one)] == ["5", "0.1", "5.0000001"]
    assert len({named(e) for e in (5.0, one, two, np.nextafter(5.0, 6.0))}) == 4
    seen = []

    def release(prepared, counts, key_rows, epsilon, variant):
        seen.append(jax.random.key_data(key_rows).tolist())
        return methods.Released(np.zeros((3, 1)), np.zeros(3, int))

    method = methods.Method(
        name="m", variants=("v",), utility="low_rank", draws=False, prepare=lambda *_: {}, release=release,
        predict=lambda *_: np.zeros(3, int), width=lambda variant: 1,
    )  # fmt: skip
    documents = data.Encoded(
        ["a"] * 3, [""] * 3, np.zeros(3, int), ("c",), np.zeros((0, 1)), np.zeros(4, int)
    )
    for epsilon in (one, two):
        choices.choose(method, {}, documents, jax.random.key(0), epsilon)
    assert seen[0] != seen[1]


def run(capsys, *arguments):
    status = cli.main(["documents", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("what", ["data", "encoder"])
def test_a_run_that_began_with_other_data_is_not_gone_on_with(
    capsys, fitted, toy_data, toy_encoder, tmp_path, what
):
    folder = shutil.copytree(fitted, tmp_path / "fit")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["digests"][what] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    methods = ("--methods", "deepcandidate", "bounded_sum", "low_rank")
    arguments = ("--data", toy_data, "--encoder", toy_encoder, "--run-dir", folder, "--resume", *methods)
    status, _, err = run(capsys, "fit", *SMALL, *arguments)
    assert status == 2
    assert "began with other digests" in err
    assert what in err
    assert len(err.splitlines()) == 1
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    status, _, err = run(capsys, "fit", *SMALL, *arguments, "--seed", 3)
    assert status == 2
    assert "began with other settings: seed was 0, now it is 3" in err


@pytest.mark.parametrize(
    ("size", "labels", "counts", "warned"),
    [(60, 0, 2, False), (60, -1, 2, True), (60, 0, 0, True), (3, 0, 2, True)],
)
def test_validation_documents_that_tell_nothing_are_said_in_one_line(capsys, size, labels, counts, warned):
    documents = data.Encoded(
        ["a"] * size, [""] * size, np.full(size, labels), ("c",), np.zeros((size * counts, 1)),
        np.arange(size + 1) * counts,
    )  # fmt: skip
    preparation._warn_of_little(documents)
    said = capsys.readouterr().err
    assert len(said.splitlines()) == warned
    assert ("too few to choose variants" in said) == warned


def test_fit_ends_with_its_table_and_what_a_release_will_guarantee():
    config = dataclasses.replace(Config(), epsilons=(1.0, 5.0000001), methods=("bounded_sum", "word_mdp"))
    result = {
        "run_dir": "runs/x",
        "documents": {"validation": 1},
        "division": "splits given by the data",
        "validation_macro_f1": {"bounded_sum": {"1": 50.0, "5.0000001": 80.0}},
        "choices": {"bounded_sum": {"1": "one way", "5.0000001": "another"}},
        "seconds": 3.0,
    }
    words = fit._words(config, result)
    assert "| bounded_sum | 50.0 (one way) | 80.0 (another) |" in words
    assert "1 public validation document (" in words
    assert "spends nothing" in words
    assert "Each sentence has 5.0001-differential privacy (replace-one adjacency" in words
    assert "word_mdp" not in words  # a fit makes no such row
