"""A run folder goes on only with what it began with, and no refused call changes it."""

import importlib.util
import json
import shutil

import numpy as np
import pytest

from tests.trainers.translation.test_cli import run
from trainers.cli import main
from trainers.translation import corpora, data, dealing, decode, session
from trainers.translation import model as models


@pytest.fixture
def copy(small_run, tmp_path):
    """A copy of the finished run, and of its data, with a description that points to the copy."""
    for path in small_run.parent.glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    shutil.copytree(small_run, tmp_path / "run")
    place = tmp_path / "run" / "config.json"
    place.write_text(place.read_text().replace(str(small_run.parent), str(tmp_path)))
    return tmp_path / "run"


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def again(folder, *more):
    """The command line that continues a run."""
    saved = json.loads((folder / "config.json").read_text())
    argv = ["train", "--preset", "tiny", "--server", *saved["server"], "--run-dir", str(folder), "--resume"]
    argv += [
        "--vocabulary-size",
        "330",
        "--batch-tokens",
        "256",
        "--test-sentences",
        "3",
        "--methods",
        "p_nmt",
    ]
    for client in saved["client"]:
        argv += ["--client", client]
    return [*argv, *map(str, more)]


def refused(folder, capsys, words, *argv):
    before = contents(folder)
    assert main(["translation", *map(str, argv)]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said
    assert len(said.splitlines()) == 1
    assert contents(folder) == before


def test_other_data_than_it_began_with_is_refused(copy, capsys):
    server = copy.parent / "server.train.jsonl"
    server.write_text(server.read_text() + json.dumps({"en": "a new house", "de": "neu"}) + "\n")
    for argv in (again(copy), ["evaluate", "--run-dir", copy], ["transfer", "--run-dir", copy]):
        refused(copy, capsys, "began with other pairs", *argv)


def test_another_public_model_than_it_began_with_is_refused(copy, capsys):
    model = data.load(copy / "public")
    other = data.make(
        model.config, {**model.params, "embedding": model.params["embedding"] + 1}, model.vocabulary
    )
    data.save(copy / "public", other)
    for argv in (again(copy), ["evaluate", "--run-dir", copy], ["transfer", "--run-dir", copy]):
        refused(copy, capsys, "began with another public model", *argv)


def test_a_folder_of_an_earlier_version_is_continued_as_it_began(copy, capsys):
    config = session.read_config(str(copy))
    old = corpora.digest(corpora.load(config, filtered=False))
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["reading"]
    (copy / "manifest.json").write_text(json.dumps({**manifest, "digests": {"pairs": old}}))
    record = json.loads((copy / "metrics.jsonl").read_text())
    (copy / "metrics.jsonl").write_text(json.dumps({**record, "pairs": old, "seconds": 1234.5}) + "\n")
    place = json.loads((copy / "config.json").read_text())
    del place["skip_bad"]  # an option that it did not know
    (copy / "config.json").write_text(json.dumps(place))
    for _ in range(2):
        assert main(["translation", "evaluate", "--run-dir", str(copy)]) == 0
        assert "and is continued so" in capsys.readouterr().out
    assert len((copy / "metrics.jsonl").read_text().splitlines()) == 1  # nothing was computed anew
    assert "model" in json.loads((copy / "manifest.json").read_text())["digests"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--settings", "nonsense"], "unknown setting 'nonsense'"),
        (["--settings", "non_iid:0"], "unknown setting 'non_iid:0'"),
        (["--settings", "iid:0"], "unknown setting 'iid:0'"),
        (["--settings", "iid:02"], "unknown setting 'iid:02'"),
        (["--settings", "alpha:1.5"], "unknown setting 'alpha:1.5'"),
        (["--settings", "non_iid:3"], "clients must be a multiple of the 2 domains"),
        (["--settings", "iid:100000"], "would have no pair; use fewer clients"),
        (["--settings", "iid", "iid"], "--settings must be at least one, each once"),
        (["--methods", "p_nmt", "p_nmt"], "--methods must be at least one, each once"),
        (["--learning-rate", "nan"], "--learning-rate must be positive"),
    ],
)
def test_a_refused_option_leaves_a_finished_run_as_it_is(copy, capsys, options, words):
    refused(copy, capsys, words, *again(copy, *options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--settings", "non_iid:3"], "clients must be a multiple of the 2 domains"),
        (["--search", "shadow", "--shadow", "0"], "--shadow must be at least 1"),
        (["--search", "shadow", "--shadow", "17"], "--shadow must be at most the model's width 16"),
        (
            ["--key-encryption", "pca", "--subspaces", "17"],
            "--subspaces must be at most the model's width 16",
        ),
        (["--dim", "6"], "--dim must be a multiple of 4"),
        (["--encoder-layers", "-1"], "--encoder-layers must be at least 1"),
        (["--local-learning-rate", "inf"], "--local-learning-rate must be positive"),
        (["--length-penalty", "nan"], "--length-penalty must be from -5 to 5"),
        (["--beams", "300"], "--beams must be at most 64"),
        (["--batch-tokens", "100000000000"], "--batch-tokens must be at most 262144"),
        (["--dim", "4000000"], "--dim must be at most 4096"),
        (["--max-length", "1000000"], "--max-length must be at most 8192"),
        (["--decoder-layers", "100"], "--decoder-layers must be at most 64"),
        (["--k", "100000"], "--k must be at most 1024"),
        (["--search", "faiss"], "pip install faiss-cpu"),
        (["--vocabulary-size", "9999"], "change --vocabulary-size"),
    ],
)
def test_a_refused_run_leaves_no_folder(small_run, tmp_path, capsys, monkeypatch, options, words):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "faiss" else find(name))
    argv = [a for a in again(small_run, *options) if a != "--resume"]
    argv[argv.index("--run-dir") + 1] = str(tmp_path / "new")
    refused(tmp_path, capsys, words, *argv)
    assert not (tmp_path / "new").exists()


def test_alpha_may_be_written_as_a_number():
    assert dealing.parse("alpha:1.0") == dealing.parse("alpha:1") == ("alpha", 1.0)
    assert dealing.parse("alpha:0.0") == ("alpha", 0.0)
    assert dealing.parse("non_iid:6") == ("non_iid", 6)


def test_a_torn_line_of_results_is_mended_not_continued(copy, capsys):
    whole = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(whole[: len(whole) // 2])
    for _ in range(2):
        assert main(["translation", "evaluate", "--run-dir", str(copy)]) == 0
        assert len((copy / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((copy / "metrics.jsonl").read_text())["method"] == "p_nmt"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.json", "[]", "config.json"),
        ("config.json", "{", "config.json"),
        ("manifest.json", "[]", "manifest.json"),
        ("config.json", '{"client": [5]}', "config.json is not the description of a translation run"),
        ("metrics.jsonl", '{"a": 1}\n', "line 1: no record of such a run (setting is missing"),
        ("metrics.jsonl", "[" * 100_000 + "\n", "line 1: not JSON"),
        ("metrics.jsonl", "5\n", "line 1: no record"),
        (
            "public/model.json",
            '{"model": {"vocabulary_size": "many"}}',
            "vocabulary_size must be a positive integer",
        ),
        ("public/model.json", "[1]", "describes no model"),
    ],
)
def test_damage_is_one_line_that_names_the_file(copy, capsys, file, text, words):
    (copy / file).write_text(text)
    refused(copy, capsys, words, "evaluate", "--run-dir", copy)


@pytest.mark.parametrize(
    "change",
    [
        {"bleu": 5},
        {"bleu": {"it": "high"}},
        {"trial": "q"},
        {"setting": 5},
        {"method": "magic"},
        {"seconds": True},
    ],
)
def test_a_result_of_another_kind_is_damage(copy, capsys, change):
    place = copy / "metrics.jsonl"
    record = json.loads(place.read_text())
    place.write_text(json.dumps({**record, **change}) + "\n")
    refused(copy, capsys, "metrics.jsonl", "evaluate", "--run-dir", copy)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_killed_before_its_settings_were_written_begins(small_run, tmp_path, capsys, resume):
    argv = [a for a in again(small_run) if resume or a != "--resume"]
    argv[argv.index("--run-dir") + 1] = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    shutil.copy(small_run / "manifest.json", tmp_path / "run")
    (tmp_path / "run" / ".config.json.killed.tmp").touch()
    assert main(["translation", *argv, "--public-model", str(small_run / "public")]) == 0
    capsys.readouterr()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["run_dir"] == str(tmp_path / "run")
    assert not list((tmp_path / "run").glob(".*.tmp"))
    said = (tmp_path / "run" / "privacy.md").read_text()
    assert (
        "made elsewhere (--public-model). Of what it was trained on, no train pair of a client is a part"
        in said
    )
    assert "made elsewhere" not in (small_run / "privacy.md").read_text()


def test_what_a_public_model_was_trained_on_comes_with_it(copy, capsys):
    _, read = session.reopen(str(copy))
    sides = data.trained_on(copy / "public")
    assert sides is not None
    assert (sides == corpora.side_digests(read.server.train)).all()
    argv = [a for a in again(copy) if a != "--resume"]
    argv[argv.index("--run-dir") + 1] = str(copy.parent / "other")
    argv += ["--public-model", str(copy / "public")]
    data.save_trained_on(copy / "public", corpora.side_digests(read.clients["it"].train))
    refused(copy.parent, capsys, "--public-model was trained on", *argv)
    np.savez(copy / "public" / "trained_on.npz", sides=np.zeros(3))
    refused(copy.parent, capsys, "does not say what the model was trained on", *argv)


def test_a_folder_that_holds_no_run_is_not_continued(small_run, tmp_path, capsys):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one").write_text("dear")
    argv = again(small_run)
    argv[argv.index("--run-dir") + 1] = str(tmp_path / "letters")
    refused(tmp_path, capsys, "is not the folder of a run", *argv)


@pytest.mark.parametrize("seed", ["-1", "4294967296", str(2**63), str(2**64)])
def test_seeds_that_would_collide_are_refused(small_run, tmp_path, capsys, seed):
    argv = [a for a in again(small_run, "--seed", seed) if a != "--resume"]
    argv[argv.index("--run-dir") + 1] = str(tmp_path / "new")
    refused(tmp_path, capsys, "--seed", *argv)


@pytest.mark.parametrize("kind", ["folder", "empty", "absent"])
@pytest.mark.parametrize("command", ["server", "client", "store", "translate", "model", "attack"])
def test_paths_that_hold_nothing_are_named(small_run, tmp_path, capsys, kind, command):
    place = tmp_path / "place.jsonl"
    if kind == "folder":
        place.mkdir()
    elif kind == "empty":
        place.touch()
    data_file, model = small_run.parent / "it.train.jsonl", small_run / "public"
    argv = {
        "server": [
            "train",
            "--preset",
            "tiny",
            "--server",
            place,
            "--client",
            f"a={data_file}",
            "--run-dir",
            tmp_path / "r",
        ],
        "client": [
            "train",
            "--preset",
            "tiny",
            "--server",
            data_file,
            "--client",
            f"a={place}",
            "--run-dir",
            tmp_path / "r",
        ],
        "store": ["store", "--model", model, "--data", place, "--out", tmp_path / "o"],
        "translate": ["translate", "--model", model, "--input", place],
        "model": ["store", "--model", place, "--data", data_file, "--out", tmp_path / "o"],
        "attack": ["attack", "--model", model, "--attacker", place, "--defender", f"a={data_file}"],
    }[command]
    refused(tmp_path, capsys, str(place), *argv)


def test_a_window_that_no_memory_holds_is_refused(small_run, tmp_path, capsys):
    argv = ["attack", "--model", small_run / "public", "--attacker", "x", "--defender", "a=b"]
    refused(tmp_path, capsys, "--window must be at most 64", *argv, "--window", "100000000")


def test_results_go_where_they_can(small_run, tmp_path, capsys):
    model = ["--model", small_run / "public"]
    (tmp_path / "text").write_text("house\n")
    nowhere = tmp_path / "none" / "file"
    refused(
        tmp_path,
        capsys,
        f"--output {nowhere}",
        "translate",
        *model,
        "--input",
        tmp_path / "text",
        "--output",
        nowhere,
    )
    refused(
        tmp_path,
        capsys,
        f"--output {nowhere}",
        "attack",
        *model,
        "--attacker",
        "x",
        "--defender",
        "a=b",
        "--output",
        nowhere,
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--k", "0"),
        ("--gate", "0"),
        ("--length-penalty", "nan"),
        ("--length-penalty", "-300"),
        ("--beams", "300"),
        ("--temperature", "inf"),
    ],
)
def test_numbers_of_translate_are_checked(small_run, tmp_path, capsys, option, value):
    (tmp_path / "text").write_text("house\n")
    argv = ["translate", "--model", small_run / "public", "--input", tmp_path / "text", option, value]
    refused(tmp_path, capsys, option, *argv)


def test_lines_are_translated_as_when_alone(small_run, tmp_path, capsys):
    def told(text):
        (tmp_path / "text").write_text(text, encoding="utf-8")
        status, out = run(capsys, "translate", "--model", small_run / "public", "--input", tmp_path / "text")
        assert status == 0
        return out["translations"]

    first, second, third, last = told("hello\n\n   \nworld\n")
    assert (second, third) == ("", "")
    assert [first] == told("hello\n")
    assert [last] == told("world\n")


def test_a_line_of_a_thousand_words_among_short_ones(small_run, tmp_path, capsys):
    """It is translated as when alone, in a batch of its own; one beyond all measure is named."""
    made = data.load(small_run / "public")
    pieces = np.asarray(made.params["embedding"])
    pieces = pieces + 0.3 * np.random.default_rng(0).standard_normal(pieces.shape).astype(np.float32)
    pieces[models.END] = 0  # the trained one says nothing yet, this one goes on to the limit
    wild = {**made.params, "embedding": pieces}
    data.save(tmp_path / "model", data.make(made.config, wild, made.vocabulary))
    argv = ["translate", "--model", tmp_path / "model", "--input", tmp_path / "text"]
    long, short = "way " * 1000, ["house", "tree river", *["way"] * 7]
    told = []
    for lines in ([*short[:4], long, *short[4:]], short, [long]):
        (tmp_path / "text").write_text("\n".join(lines) + "\n", encoding="utf-8")
        status, out = run(capsys, *argv)
        assert status == 0
        told.append(out["translations"])
    together, apart, (alone,) = told
    assert len(alone) > 100
    assert together[4] == alone
    assert len(set(apart)) > 1
    assert together[:4] + together[5:] == apart
    (tmp_path / "text").write_text("house\n" + "house " * 9000 + "\n", encoding="utf-8")
    refused(tmp_path, capsys, f"{tmp_path / 'text'}, line 2 has", *argv)


def test_lines_are_cleaned_as_training_pairs_are(small_run, tmp_path, capsys, monkeypatch):
    """Composed and decomposed letters, a byte order mark inside, blanks of other kinds: what looks equal is equal."""
    seen, search = [], decode.search
    monkeypatch.setattr(decode, "search", lambda *a, **more: seen.extend(a[2]) or search(*a, **more))
    lines = [
        "caf\u00e9 house",
        "cafe\u0301 house",
        "\ufeffcaf\u00e9 house",
        "caf\u00e9\u00a0house",
        "caf\u00e9\f\u2003house\u2028",
    ]
    (tmp_path / "text").write_text("\n".join(lines) + "\n", encoding="utf-8")
    status, out = run(capsys, "translate", "--model", small_run / "public", "--input", tmp_path / "text")
    assert status == 0
    assert len(out["translations"]) == len(seen) == len(lines)
    assert len({tuple(pieces.tolist()) for pieces in seen}) == 1


def test_a_memory_smaller_than_k_and_than_the_shadow_is_searched(small_run, tmp_path, capsys):
    public = small_run / "public"
    source = tmp_path / "three.train.jsonl"
    source.write_text("".join((small_run.parent / "it.train.jsonl").read_text().splitlines(True)[:3]))
    for part in ("valid", "test"):
        shutil.copy(small_run.parent / f"it.{part}.jsonl", tmp_path / f"three.{part}.jsonl")
    (tmp_path / "text").write_text("house garden\n", encoding="utf-8")
    assert run(capsys, "store", "--model", public, "--data", source, "--out", tmp_path / "store")[0] == 0
    asked = ["translate", "--model", public, "--input", tmp_path / "text", "--store", tmp_path / "store"]
    fixed = ["--mixing", "fixed", "--k", "100000"]
    shown = [run(capsys, *asked, *fixed, *more) for more in ([], ["--search", "exact"])]
    assert [status for status, _ in shown] == [0, 0]
    assert shown[0][1]["translations"] == shown[1][1]["translations"]


def test_bad_records_can_be_left_out_as_the_message_says(small_run, tmp_path, capsys):
    lines = (small_run.parent / "it.train.jsonl").read_text().splitlines()[:5]
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines, "{"]) + "\n")
    argv = [
        "store",
        "--model",
        small_run / "public",
        "--data",
        tmp_path / "bad.jsonl",
        "--out",
        tmp_path / "out",
    ]
    status, said = run(capsys, *argv)
    assert status == 2
    assert "--skip-bad" in said
    status, out = run(capsys, *argv, "--skip-bad")
    assert status == 0
    assert any("1 bad records were skipped" in note for note in out["notes"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"client_pairs": 10}, "a pair displaces another"),
        ({"settings": ["iid"]}, "changes who holds the others"),
    ],
)
def test_a_release_is_refused_where_one_pair_moves_others(copy, capsys, change, words):
    place = copy / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
    argv = ["release", "--run-dir", copy, "--delta", "1e-4", "--adjacency"]
    refused(copy, capsys, words, *argv, "add-remove")
    refused(copy, capsys, words, *argv, "replace-one")  # for a pair that its hash sets aside for testing


def test_a_release_of_a_run_whose_public_pairs_clients_decided_is_refused(copy, capsys):
    place = copy / "manifest.json"
    place.write_text(json.dumps({k: v for k, v in json.loads(place.read_text()).items() if k != "reading"}))
    argv = ["release", "--run-dir", copy, "--delta", "1e-4", "--adjacency", "add-remove"]
    refused(copy, capsys, "clients' pairs decided which public ones were read", *argv)


def test_the_result_says_how_many_pairs_are_public_too(copy, capsys):
    status, result = run(capsys, "evaluate", "--run-dir", copy)
    assert status == 0
    _, read = session.reopen(str(copy))
    assert result["shared_pairs"] == read.shared()
    assert set(result["shared_pairs"]) == {"it", "law"}


def test_a_closed_standard_output_is_named(small_run, tmp_path, capsys, monkeypatch):
    (tmp_path / "text").write_text("house\n")
    monkeypatch.setattr("sys.stdout", None)
    assert (
        main(
            [
                "translation",
                "translate",
                "--model",
                str(small_run / "public"),
                "--input",
                str(tmp_path / "text"),
            ]
        )
        == 2
    )
    assert "standard output is closed; give --output FILE" in capsys.readouterr().err


def test_many_clients_without_a_pair_are_not_all_listed(copy, capsys):
    refused(
        copy, capsys, "it-64 and 9877 more would have no pair", *again(copy, "--settings", "non_iid:10000")
    )
