"""What documents have spent, and the statement over several releases: no earlier release is lost."""

import dataclasses
import json
import math
import pathlib
import tempfile
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import accounting
from jaxpriv import selection
from tests.accounting_runs import valid
from trainers.common.errors import InputError
from trainers.documents import cache, ledger, release
from trainers.documents.config import Config, ReleaseConfig
from trainers.documents.ledger import Entry


def spent(book, *document):
    return sorted((e.epsilon, e.method) for e in book.spent(*document))


def test_an_id_and_a_text_that_were_apart_unite_what_they_spent(tmp_path):
    book = ledger.Ledger(tmp_path / "ledger.json")
    book.add("a", "one", Entry(30.0, "m"))
    for _ in range(2):
        book.add("b", "two", Entry(0.5, "m"))
    book.add("a", "two", Entry(1.0, "m"))
    book.write()
    for one in (book, ledger.Ledger(tmp_path / "ledger.json")):
        assert spent(one, "a", "two") == [(0.5, "m"), (0.5, "m"), (1.0, "m"), (30.0, "m")]
        assert sum(e for e, _ in spent(one, "a", "one")) == 32.0
        assert sum(e for e, _ in spent(one, "b", "two")) == 32.0


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9))
def test_whatever_shares_a_name_in_any_number_of_steps_is_one_document(released):
    """Against the connected parts of ids and texts by brute force, also of a ledger that is read again."""
    path = pathlib.Path(tempfile.mkdtemp()) / "ledger.json"
    book = ledger.Ledger(path)
    for n, (i, t) in enumerate(released):
        book.add(f"id {i}", f"Text {t}.", Entry(float(n + 1), "m"))
    book.write()
    again = ledger.Ledger(path)
    for i, t in released:
        joined, size = {("id", i), ("text", t)}, 0
        while len(joined) > size:
            size = len(joined)
            for a, b in released:
                if joined & {("id", a), ("text", b)}:
                    joined |= {("id", a), ("text", b)}
        right = [float(n + 1) for n, (a, _) in enumerate(released) if ("id", a) in joined]
        for one in (book, again):
            assert sorted(e.epsilon for e in one.spent(f"id {i}", f"Text {t}.")) == right


def test_a_ledger_whose_names_were_not_united_is_united_when_read(tmp_path):
    path = tmp_path / "ledger.json"
    book = ledger.Ledger(path)
    a, b, x, y = (book.names(n, t)[k] for n, t, k in (("a", "", 0), ("b", "", 0), ("", "X", 1), ("", "Y", 1)))
    first, second, third = ([e, "m", "", False, str(e)] for e in (1.0, 2.0, 3.0))
    old = {a: [first, second, third], x: [first], b: [second], y: [first, second, third]}
    path.write_text(json.dumps({"salt": book._salt.hex(), "spent": old}))
    again = ledger.Ledger(path)
    for document in (("b", "new"), ("new", "X"), ("a", "new")):
        assert spent(again, *document) == [(1.0, "m"), (2.0, "m"), (3.0, "m")]


def test_a_ledger_grows_with_its_releases_and_not_with_their_square(tmp_path):
    book, sizes = ledger.Ledger(tmp_path / "ledger.json"), []
    for i in range(200):
        book.add("diary", f"Day {i}.", Entry(1.0, "m"))
        if i in (99, 199):
            book.write()
            sizes.append((tmp_path / "ledger.json").stat().st_size)
    assert sizes[1] < 2.1 * sizes[0]
    assert len(ledger.Ledger(tmp_path / "ledger.json").spent("other", "Day 3.")) == 200


def test_texts_of_the_same_sentences_are_one_document(tmp_path):
    book = ledger.Ledger(tmp_path / "ledger.json")
    book.add("a", "One wave. Two.", Entry(1.0, "m"))
    for other in (
        "One wave.\n\n---\n\nTwo.",
        "\ufeffOne wave. Two.",
        "One wave.\n\n* * *\n\nTwo.\n...",
        "One\twave. Two. ",
    ):
        assert spent(book, "b", other) == [(1.0, "m")]
    assert not spent(book, "b", "One wave. Two. Three.")


def test_white_space_makes_no_new_text(tmp_path):
    book = ledger.Ledger(tmp_path / "ledger.json")
    book.add("a", "Caf\u00e9. Tea.", Entry(1.0, "m"))
    assert spent(book, "b", "Cafe\u0301.\r\nTea.\n") == [(1.0, "m")]
    assert not spent(book, "b", "Coffee. Tea.")


def test_a_linked_ledger_is_written_where_the_link_leads(tmp_path):
    (tmp_path / "shared").mkdir()
    link, real = tmp_path / "link.json", tmp_path / "shared" / "ledger.json"
    link.symlink_to(real)
    with ledger.opened(link) as book:
        book.add("a", "one", Entry(1.0, "m"))
        book.write()
    assert link.is_symlink()
    assert spent(ledger.Ledger(real), "a", "one") == [(1.0, "m")]


def rows(*entries):
    """A ledger as earlier versions wrote it."""
    return json.dumps({"salt": "00" * 32, "spent": {"name": list(entries)}})


def documents(*those):
    return json.dumps({"salt": "00" * 32, "documents": those})


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "{", "null", "[" * 100_000, '{"salt": "00", "spent": {}}', '{"salt": "", "spent": {}}'),
        *(
            json.dumps({"salt": "00" * 32, "spent": spent})
            for spent in ([], None, {"name": 3}, {"name": [3]})
        ),
        *(rows([epsilon, "m"]) for epsilon in (-1.0, 0, math.nan, math.inf, True, None, "1")),
        *(rows(["a", "b"]), rows([1.0]), rows([1.0, "m", "", False, "t", 6]), rows("ab")),
        *(rows([1.0, 2]), rows([1.0, "m", 3]), rows([1.0, "m", "", "no"]), rows([1.0, "m", "", False, 7])),
        rows([1.0, "m", "", False, "t"], [2.0, "m", "", False, "t"]),
        *(documents({"names": names, "releases": [[1.0, "m"]]}) for names in ([], [1], "ab", None)),
        *(documents({"names": ["a"], "releases": released}) for released in ([3], 3, None, [["a", "b"]])),
        *(documents(3), documents({}), '{"salt": "' + "00" * 32 + '", "documents": 3}'),
    ],
)
def test_a_damaged_ledger_is_refused(tmp_path, text):
    (tmp_path / "ledger.json").write_text(text)
    with pytest.raises(InputError, match="damaged"):
        ledger.Ledger(tmp_path / "ledger.json")
    with pytest.raises(InputError, match="folder"):
        ledger.Ledger(tmp_path)


def stated(*documents, sampler="permute_and_flip", utility="bounded_sum", draws=True):
    """The statement over documents with these entries, the last of which is this call's."""
    fitted = SimpleNamespace(
        config=dataclasses.replace(Config(), selection=sampler), public=SimpleNamespace(rows=np.arange(20))
    )
    config = ReleaseConfig(run_dir="", data="", output="", epsilon=documents[0][-1].epsilon)
    method = SimpleNamespace(name="m", utility=utility, draws=draws)
    encoded = SimpleNamespace(ids=[f"d{i}" for i in range(len(documents))], counts=np.full(len(documents), 3))
    found = release.state(config, fitted, method, encoded, documents)
    valid(found)
    return found.data


def test_the_smaller_rho_of_the_exponential_mechanism_is_for_its_own_releases():
    flips, exponential = (Entry(0.1, "bounded_sum", s) for s in ("permute_and_flip", "exponential"))
    mixed = stated([flips] * 9 + [exponential], sampler="exponential")
    assert mixed["rho"] == pytest.approx(9 * 0.1**2 / 2 + 0.1**2 / 8)
    assert stated([exponential] * 10, sampler="exponential")["rho"] == pytest.approx(10 * 0.1**2 / 8)


FLIP, EXPONENTIAL, NOISE = "permute_and_flip", "exponential", ""


def test_rho_and_epsilon_are_the_largest_of_any_document_though_not_of_one():
    """Many small releases add up to the larger epsilon, one large release has the larger rho."""
    many, one = [Entry(0.2, "m", FLIP)] * 100, [Entry(10.0, "m", FLIP)]
    for documents in ((many, one), (one, many)):
        found = stated(*documents)
        assert found["rho"] == pytest.approx(10**2 / 2)
        assert found["epsilon"] > stated(one)["epsilon"] == 10
        assert len(found["alternatives"]) == 1
    assert "alternatives" not in stated(one, one)
    assert "alternatives" not in stated(one, one + many)  # who did more holds for who did less


def test_what_one_document_assumes_all_do():
    draws, noise = [Entry(20.0, "m", FLIP)], [Entry(5.0, "m", NOISE)]
    assert any("real arithmetic" in a for a in stated(draws, noise)["assumptions"])
    large = [Entry(20.0, "m", NOISE)]
    assert stated(large)["delta"] == 0
    assert stated(large, [Entry(5.0, "m", FLIP)])["delta"] > 0
    assert stated(large, [Entry(5.0, "m", FLIP, insecure=True)])["simulation"]


histories = st.lists(
    st.lists(
        st.builds(
            Entry,
            st.sampled_from([0.1, 1.0, 4.0, 40.0]),
            st.just("m"),
            st.sampled_from([FLIP, EXPONENTIAL, NOISE]),
        ),
        min_size=1,
        max_size=4,
    ).map(lambda entries: entries * 6),
    min_size=1,
    max_size=4,
)


@hypothesis.settings(max_examples=25)
@hypothesis.given(histories)
def test_no_document_has_spent_more_than_is_stated(documents):
    found = stated(*documents)
    for entries in documents:
        alone = accounting.compose(
            [
                accounting.PureDP(
                    epsilon=e.epsilon,
                    bounded_range=e.sampler == EXPONENTIAL,
                    adjacency="replace-one",
                    unit="sentence",
                )
                for e in entries
            ],
            delta=found["delta"] - found.get("approximation", 0.0),
        )
        assert alone.epsilon <= found["epsilon"] * (1 + 1e-9)
        assert alone.rho <= found["rho"] * (1 + 1e-9)
        drawn, total = sum(bool(e.sampler) for e in entries), sum(e.epsilon for e in entries)
        if found["delta"]:
            distance = drawn * selection.residual(5000, max_score=1000)
            assert found["approximation"] >= distance * (1 + math.exp(total))
    written = pathlib.Path(tempfile.mkdtemp()) / "privacy.json"
    written.write_text(json.dumps(found))
    assert accounting.report(written).data == found  # composed again


def test_no_two_ids_share_a_key_though_half_of_their_digests_agree(monkeypatch):
    """Whoever chooses ids must not find two with one key: digests that agree in all but their last byte differ."""

    def digest(data):
        return SimpleNamespace(digest=lambda: bytes(31) + data[-1:])

    config = ReleaseConfig(run_dir="", data="", output="", epsilon=1.0, insecure_noise_seed=1)
    monkeypatch.setattr(release, "hashlib", SimpleNamespace(sha256=digest))
    rows = jax.random.key_data(release.document_keys(config, ["a", "b", "c", "a"], [0, 0, 0, 1]))
    assert len({tuple(row) for row in rows.tolist()}) == 4
    for i, (name, counter) in enumerate((("a", 0), ("b", 0), ("c", 0), ("a", 1))):  # alone as among others
        alone = release.document_keys(config, [name], [counter])
        assert (jax.random.key_data(alone)[0] == rows[i]).all()


def test_earlier_noise_keeps_its_assumption_and_earlier_draws_their_delta():
    noise, draw = Entry(5.0, "low_rank"), Entry(5.0, "bounded_sum", "permute_and_flip")
    for entries, draws in (([noise, draw], True), ([draw, noise], False)):
        found = stated(entries, draws=draws)
        assert any("real arithmetic" in a for a in found["assumptions"])
        assert found["delta"] > 0
    assert not any("real arithmetic" in a for a in stated([draw])["assumptions"])


def test_an_earlier_release_from_a_public_seed_is_no_guarantee():
    assert stated([Entry(5.0, "m", "permute_and_flip", insecure=True), Entry(5.0, "m", "permute_and_flip")])[
        "simulation"
    ]


def test_delta_grows_with_e_to_the_epsilon():
    small, large = (stated([Entry(e, "m", "exponential")])["delta"] for e in (1.0, 30.0))
    assert large / small == pytest.approx((1 + np.exp(30)) / (1 + np.exp(1)))
    for epsilon in (300.0, 1e6):
        beyond = stated([Entry(epsilon, "m", "exponential")])
        assert (beyond["epsilon"], beyond["delta"]) == (epsilon, 0)
        assert any("exact law" in a and "total variation" in a for a in beyond["assumptions"])


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 10.0])
def test_more_releases_never_have_a_smaller_epsilon_nor_a_delta_that_is_no_privacy(epsilon):
    found = [stated([Entry(epsilon, "m", FLIP)] * n) for n in (1, 2, 7, 50, 69, 70, 73, 80, 200)]
    assert [one["epsilon"] for one in found] == pytest.approx(
        [epsilon * n for n in (1, 2, 7, 50, 69, 70, 73, 80, 200)]
    )
    assert all(one["delta"] <= 1e-6 for one in found)


def test_only_depth_draws_uniformly_for_one_sentence():
    entries = [Entry(5.0, "m", "exponential")]
    for utility, said in (("strict_depth", True), ("bounded_sum", False)):
        assert any("uniformly" in n for n in stated(entries, utility=utility)["notes"]) == said


@pytest.mark.parametrize("which", ["keys", "vectors"])
@pytest.mark.parametrize("damage", ["empty", "truncated", "other", "absent"])
def test_a_damaged_shard_is_dropped_with_one_line_and_its_texts_encoded_again(
    capsys, tmp_path, which, damage
):
    cache.VectorCache(tmp_path, 2).put(["a", "b"], np.ones((2, 2), np.float32))
    (file,) = tmp_path.glob(f"*.{which}.npy")
    if damage == "absent":
        file.unlink()
    elif damage == "other":
        with open(file, "wb") as out:
            np.save(out, np.ones((2, 3), np.float32))
    else:
        file.write_bytes(file.read_bytes()[: -3 if damage == "truncated" else 0])
    store = cache.VectorCache(tmp_path, 2)
    assert not store.get(["a", "b"])
    said = capsys.readouterr().err
    assert len(said.splitlines()) == (0 if (which, damage) == ("keys", "absent") else 1)
    store.put(["a"], np.full((1, 2), 3, np.float32))
    assert (store.get(["a", "b"])["a"] == 3).all()
    assert not capsys.readouterr().err


def test_cached_vectors_are_for_their_owner_only(tmp_path):
    cache.VectorCache(tmp_path, 2).put(["a secret"], np.ones((1, 2), np.float32))
    assert all(f.stat().st_mode & 0o077 == 0 for f in tmp_path.iterdir())
