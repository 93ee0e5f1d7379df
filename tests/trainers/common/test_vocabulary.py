"""Tokens as the IRC corpus has them, ids as TFF's next-word prediction has them."""

import doctest

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.common import packed, readers, tff_sqlite, tokenizer
from trainers.common.errors import InputError
from trainers.common.packed import PackedTokens
from trainers.common.vocabulary import Vocabulary


@pytest.mark.parametrize("module", [tokenizer, tff_sqlite, packed])
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("fi_FI _name_ _x_", "fi fi _name_ x"),
        ("so--then it''s -l", "so-then it's - l"),
        ("a..b ....c .d", "a ... b ... c . d"),
        ("?!?? :))", "? ! ? : )"),
        ("1.0.6 12-25", "1 . 0 . 6 12-25"),
        ("Äpfel ÑANDÚ 東京。", "äpfel ñandú 東京 。"),
        ("\x00\x07 \u2028", ""),
        ("\U0001f468\u200d\U0001f469 hi", "\U0001f468 \u200d \U0001f469 hi"),
    ],
)
def test_tokens(text, tokens):
    assert tokenizer.tokenize(text) == tokens.split(" ") if tokens else tokenizer.tokenize(text) == []


def test_tokens_equal_those_of_the_corpora(shared):
    for name in ("irc_federated", "public_pretrain"):
        table = pq.read_table(shared / "data" / "fedtext" / f"{name}.parquet")
        sample = table.take(np.arange(0, table.num_rows, 7))
        for text, tokens in zip(sample["text"].to_pylist(), sample["tokens"].to_pylist()):
            assert " ".join(tokenizer.tokenize(text)) == tokens


def test_packed_tokens_are_the_lists_they_came_from():
    lists = [["a", "b", "a"], [], ["c"], ["b"] * 5]
    tokens = PackedTokens.from_lists(lists)
    assert [tokens[i] for i in range(4)] == lists
    assert tokens[-1] == lists[-1]
    with pytest.raises(IndexError):
        tokens[4]
    taken = tokens.take(np.array([3, 1, 0]), max_tokens=2)
    assert [taken[i] for i in range(3)] == [["b", "b"], [], ["a", "b"]]
    spaced = PackedTokens.from_spaced(pa.array(["a b  a", "", None, " c ", "   ", "b\tb"]))
    assert [spaced[i] for i in range(6)] == [["a", "b", "a"], [], [], ["c"], [], ["b", "b"]]


def test_rows():
    vocabulary = Vocabulary(("the", "cat"), "public")
    assert (len(vocabulary), vocabulary.size) == (2, 6)
    pad, oov, bos, eos = vocabulary.specials
    assert (pad, oov, bos, eos) == (0, 3, 4, 5)
    rows = vocabulary.encode([["the", "cat"], ["a", "the", "cat"], ["cat", "the", "the", "the"], []], 3)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[4, 1, 2, 5], [4, 3, 1, 2], [4, 2, 1, 1], [4, 5, 0, 0]]
    assert vocabulary.decode(rows[1]) == ["<bos>", "<oov>", "the", "cat"]
    assert vocabulary.decode([0, 5]) == ["<pad>", "<eos>"]
    assert vocabulary.coverage(PackedTokens.from_lists([["the", "x"], ["cat", "y"]])) == 0.5
    assert vocabulary.encode([], 3).shape == (0, 4)


def test_rows_equal_the_convention_written_out(shared):
    folder = shared / "data" / "fedtext"
    data = readers.read_clients(folder / "irc_federated.parquet", split="validation")
    vocabulary = Vocabulary.from_tsv(folder / "vocab_train_clients.tsv", 4000)
    rows = vocabulary.encode(data.tokens, 20)
    words = {w: i for i, w in enumerate(vocabulary.words, 1)}
    for example in range(0, data.num_examples, 17):
        ids = [words.get(t, 4001) for t in data.tokens[example]]
        expected = [4002, *ids[:20]] + ([4003] if len(ids) < 20 else [])
        assert rows[example].tolist() == expected + [0] * (21 - len(expected))


def test_words_of_public_text_by_count_then_alphabet():
    tokens = PackedTokens.from_lists([["b", "a", "c", "_url_", "_url_", "_url_"], ["b", "_foo_", "_foo_"]])
    vocabulary = Vocabulary.from_public_texts(tokens, 2)
    assert vocabulary.words == ("b", "a")
    assert vocabulary.covered_by_guarantee
    assert Vocabulary.from_public_texts(tokens, 99).words == ("b", "a", "c")
    part = tokens.take(np.array([0]))  # words that a selection no longer holds are not in its vocabulary
    assert Vocabulary.from_public_texts(part, 99).words == ("a", "b", "c")


def test_words_of_clients_count_clients_not_uses(tmp_path):
    (tmp_path / "d.jsonl").write_text(
        '{"client_id": 1, "text": ["loud loud loud", "loud"]}\n'
        '{"client_id": 2, "text": "shared"}\n{"client_id": 3, "text": "shared"}\n'
    )
    vocabulary = Vocabulary.from_clients(readers.read_clients(tmp_path / "d.jsonl"), 2)
    assert vocabulary.words == ("shared", "loud")
    assert not vocabulary.covered_by_guarantee
    assert vocabulary.origin == "clients"


def test_vocabularies_recorded_with_the_corpus(shared):
    folder = shared / "data" / "fedtext"
    made = Vocabulary.from_public_texts(readers.read_texts(folder / "public_pretrain.parquet").tokens, 10_000)
    recorded = Vocabulary.from_tsv(folder / "vocab_public.tsv")
    assert (
        len(set(made.words) & set(recorded.words)) > 9_800
    )  # the same counts; ties at the end fall otherwise
    assert recorded.origin == "public"
    assert Vocabulary.from_tsv(folder / "vocab_train_clients.tsv", 10).origin == "clients"


def test_files(tmp_path):
    path = tmp_path / "words.tsv"
    path.write_bytes(b"\xef\xbb\xbfthe\t9\r\n_url_\t8\r\n\r\ncat\t7\r\ndog\t1\r\n")
    vocabulary = Vocabulary.from_tsv(path, 2)
    assert vocabulary.words == ("the", "cat")
    assert vocabulary.origin == "unstated"
    assert not vocabulary.covered_by_guarantee
    assert Vocabulary.from_tsv(path, 2, origin="public").covered_by_guarantee
    vocabulary.save(tmp_path / "v.json")
    loaded = Vocabulary.load(tmp_path / "v.json")
    assert (loaded.words, loaded.origin, loaded.digest) == (vocabulary.words, "unstated", vocabulary.digest)
    assert Vocabulary.from_tsv(tmp_path / "v.json", 1).words == ("the",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a\nb\na\n", "line 3: 'a' occurs twice"),
        (b"a\ncaf\xe9\n", "line 2: not UTF-8"),
        (b"_url_\n\n", "holds no word"),
        (b"", "is empty"),
    ],
)
def test_bad_files(tmp_path, content, says):
    (tmp_path / "v.tsv").write_bytes(content)
    with pytest.raises(InputError, match=says):
        Vocabulary.from_tsv(tmp_path / "v.tsv")
    with pytest.raises(InputError):
        Vocabulary.load(tmp_path / "v.tsv")


def test_refuses_what_cannot_be_a_vocabulary():
    with pytest.raises(ValueError, match="occurs twice"):
        Vocabulary(("a", "a"), "public")
    with pytest.raises(ValueError, match="at least one word"):
        Vocabulary((), "public")
    with pytest.raises(ValueError, match="seq_len"):
        Vocabulary(("a",), "public").encode([["a"]], 0)
    with pytest.raises(ValueError, match="size"):
        Vocabulary.from_public_texts(PackedTokens.from_lists([["a"]]), 0)


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("vocab_public.tsv", "public"),
        ("nonpublic_words.tsv", "unstated"),
        ("public_words_of_clients.tsv", "clients"),
        ("words.tsv", "unstated"),
    ],
)
def test_whole_words_of_the_file_name_say_whose_text_it_was(tmp_path, name, origin):
    (tmp_path / name).write_text("the\t3\n")
    assert Vocabulary.from_tsv(tmp_path / name).origin == origin
