"""No sentence of a test set is in another set, and no private train part depends on other private pairs."""

import dataclasses
import json

import pytest

from tests.trainers.common.test_pair_uses import ABSENT, SPLITS
from trainers.common.errors import InputError
from trainers.common.pairs import Pair, sides_of
from trainers.translation import checks, corpora, report
from trainers.translation.config import PRESETS


def write(path, pairs):
    path.write_text("".join(json.dumps({"en": a, "de": b}) + "\n" for a, b in pairs), encoding="utf-8")


def made(name, count):
    """Pairs with no sentence in common, within a set or between sets."""
    letters = "abcdefghijklmnopqrst"
    word = lambda i: letters[i // 20] + letters[i % 20]
    return [(f"{name} source {word(i)}", f"{name} ziel {word(i)}") for i in range(count)]


@pytest.fixture
def files(tmp_path):
    """Train, validation and test files of a server and two clients, and pairs held out."""
    for name in ("server", "it", "law"):
        pairs = made(name, 400 if name == "server" else 60)
        write(tmp_path / f"{name}.train.jsonl", pairs[20:])
        write(tmp_path / f"{name}.valid.jsonl", pairs[:10])
        write(tmp_path / f"{name}.test.jsonl", pairs[10:20])
    write(tmp_path / "held.train.jsonl", made("held", 60))
    write(tmp_path / "held.valid.jsonl", made("heldvalid", 2))
    write(tmp_path / "held.test.jsonl", made("heldtest", 2))
    return tmp_path


def config(folder, **changes):
    text = {name: str(folder / f"{name}.train.jsonl") for name in ("server", "it", "law", "held")}
    given = dict(server=(text["server"],), client=(f"it={text['it']}", f"law={text['law']}"))
    return dataclasses.replace(PRESETS["tiny"], **{**given, "held_out": (text["held"],), **changes})


def appended(path, pairs):
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps({"en": a, "de": b}) + "\n" for a, b in pairs)


def test_texts_at_several_clients_are_counted_and_one_text_given_twice_is_refused(files):
    read = corpora.load(config(files))
    assert checks.check_apart(read) == ""
    appended(files / "law.train.jsonl", made("it", 60)[20:33])
    said = checks.check_apart(corpora.load(config(files)))
    assert said.startswith("13 of the 80 different train pairs stand at more than one client, at most at 2;")
    appended(files / "law.train.jsonl", made("it", 60)[33:])
    with pytest.raises(
        InputError, match="40 of the 40 train pairs of client it are among the 80 of client law"
    ):
        checks.check_apart(corpora.load(config(files)))


def test_what_a_model_made_elsewhere_has_seen_is_counted(files):
    read = corpora.load(config(files))
    it, law = (read.clients[name] for name in ("it", "law"))
    seen = corpora.seen(
        read, corpora.side_digests([*it.train[:5], it.test[0], Pair(law.test[1].source, "anders")])
    )
    assert seen == (True, {"it": 5, "law": 0}, 2)
    said = report.statement(["p_nmt"], "pq", {}, seen)
    assert "in common: it 5; 2 test pairs have a side in it" in said
    assert "used for nothing else here." in said
    checks.check_public(read, corpora.side_digests([*it.train[:5], *read.server.train]))
    with pytest.raises(InputError, match="was trained on 40 of the 40 train pairs of client it"):
        checks.check_public(read, corpora.side_digests([*it.train, *read.server.train]))
    said = report.statement(["p_nmt"], "pq", {}, corpora.seen(read, None))
    assert "its folder does not say of what" in said
    assert "used for nothing else here." in said
    assert report.statement(["p_nmt"], "pq", {}).endswith("used for nothing else.\n")


def test_every_train_set_is_filtered_against_every_test_set(files):
    tests = made("it", 20)[10:]
    appended(files / "law.train.jsonl", [(a.upper() + "!", "anders") for a, _ in tests])
    appended(files / "it.train.jsonl", made("law", 20)[10:13])
    appended(files / "held.train.jsonl", [*tests[:3], *made("server", 30)[20:]])
    appended(files / "law.valid.jsonl", tests[:1])
    read = corpora.load(config(files))
    assert [len(read.clients[name].train) for name in ("it", "law")] == [40, 40]
    assert len(read.clients["law"].validation) == 10
    held_out = sides_of([*read.memory, *read.questions])
    assert len(held_out) > 100
    assert held_out.isdisjoint(sides_of(read.server.train))
    for splits in (read.server, *read.clients.values()):
        assert len(splits.test) == 10
        everything = [
            read.server.train,
            read.memory,
            read.questions,
            *(s.train for s in read.clients.values()),
        ]
        assert sides_of(splits.test).isdisjoint(sides_of(p for part in everything for p in part))
    said = "\n".join(read.notes)
    assert "10 train pairs of law have a side in a test set" in said
    assert "3 train pairs of it have a side in a test set" in said
    assert "held-out pairs have a side in a test set or the model's training" in said


def test_runs_begun_before_are_read_as_they_were(files):
    appended(files / "law.train.jsonl", made("it", 20)[10:])
    old = corpora.load(config(files), filtered=False)
    assert len(old.clients["law"].train) == 50
    assert corpora.digest(old) != corpora.digest(corpora.load(config(files)))


def test_one_pair_more_changes_nobody_elses_train_pairs(files):
    """Clients that give one file each; the new pair shares its target with many."""
    hub = [(f"hub {a}", "das fenster") for a, _ in made("it", 60)]
    write(files / "one.jsonl", [*made("it", 60), *hub])
    write(files / "two.jsonl", [*made("law", 60), *((f"other {a}", b) for a, b in hub)])
    given = config(files, client=(f"it={files / 'one.jsonl'}", f"law={files / 'two.jsonl'}"))
    before = corpora.load(given)
    sizes = set()
    for word in ("stone", "river", "tree", "light", "hand", "day", "town", "garden", "way"):
        write(files / "one.jsonl", [(f"{word} seven", "das fenster"), *made("it", 60), *hub])
        after = corpora.load(given)
        assert after.clients["law"].train == before.clients["law"].train
        assert after.server.train == before.server.train
        more = set(after.clients["it"].train) ^ set(before.clients["it"].train)
        assert {p.source for p in more} <= {f"{word} seven"}
        sizes.add(len(more))
        seen = sides_of(p for s in after.clients.values() for p in s.train)
        assert all(seen.isdisjoint(sides_of(s.test)) for s in after.clients.values())
    assert 1 in sizes


@pytest.mark.parametrize("rest", [ABSENT, "", "train", "mixed"])
def test_one_record_moves_no_other_pair_of_any_client_whatever_its_split(files, rest):
    """Also one for testing that shares its sentences with many pairs for training."""
    hub = [(f"hub {a}", "das fenster") for a, _ in made("it", 40)]
    record = lambda pair, split: dict(zip(("en", "de"), pair)) | ({} if split == ABSENT else {"split": split})
    base = [
        record(pair, SPLITS[i % len(SPLITS)] if rest == "mixed" else rest)
        for i, pair in enumerate([*made("it", 60), *hub])
    ]
    given = config(files, client=(f"it={files / 'one.jsonl'}", f"law={files / 'law.train.jsonl'}"))

    def trained(rows):
        (files / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        read = corpora.load(given)
        return [
            set(part) for part in (read.clients["it"].train, read.clients["law"].train, read.server.train)
        ]

    before = trained(base)
    assert len(before[0]) > 30
    for split in SPLITS:
        for pair in ((hub[0][0], "das fenster"), made("law", 30)[25], ("something new", "das fenster")):
            for rows in ([record(pair, split), *base], [*base[1:], record(pair, split)]):
                own = {Pair(*pair), Pair(base[0]["en"], base[0]["de"])}
                assert [part - own for part in trained(rows)] == [part - own for part in before]


@pytest.mark.parametrize("named", ["server", "held_out"])
def test_private_pairs_that_are_given_as_public_are_refused(files, named):
    """By what is in the files, under whatever name, in other case and order; what a few have in common is counted."""
    text = (files / "it.train.jsonl").read_text().upper().replace('"EN"', '"en"').replace('"DE"', '"de"')
    lines = text.splitlines(keepends=True)[::-1]

    for part in ("valid", "test"):
        write(files / f"copy.{part}.jsonl", made(f"copy{part}", 2))

    def read(count):
        (files / "copy.train.jsonl").write_text("".join(lines[:count]))
        given = {named: (*getattr(config(files), named), str(files / "copy.train.jsonl"))}
        return corpora.load(config(files, **given))

    few = read(20)
    assert few.shared() == {"it": 20, "law": 0}
    checks.before_writing(config(files), few, 16)
    with pytest.raises(InputError, match="40 of the 40 train pairs of client it are among the server's"):
        checks.before_writing(config(files), read(40), 16)


def test_public_pairs_that_are_a_part_of_the_private_ones_are_refused(files):
    many = [(f"{a} and {b}", f"{b} und {a}") for a, b in made("more", 400)]
    write(files / "it.train.jsonl", [*made("it", 60)[20:], *many, *made("server", 400)[20:]])
    read = corpora.load(config(files, held_out=()))
    with pytest.raises(InputError, match="train pairs of client it are among the server's"):
        checks.before_writing(config(files), read, 16)


def test_a_client_without_enough_pairs_is_named(files):
    write(files / "one.jsonl", made("it", 1))
    read = corpora.load(
        config(files, client=(f"it={files / 'one.jsonl'}", f"law={files / 'law.train.jsonl'}"))
    )
    with pytest.raises(InputError, match=r"client it has no (train|test) pair \("):
        checks.before_writing(config(files), read, 16)
    twice = config(files, client=(f"it={files / 'it.train.jsonl'}",) * 2)
    with pytest.raises(InputError, match="--client it is given twice"):
        corpora.load(twice)
