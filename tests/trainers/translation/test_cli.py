"""The commands: a whole tiny comparison, its resume, the protocol through files, and refusals in one line."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from tqdm.auto import tqdm

from trainers.cli import main
from trainers.common import metrics
from trainers.translation import corpora, datastore, experiment, federated, layout, retrieval, session

ROOT = pathlib.Path(__file__).resolve().parents[3]
WORDS = ["haus", "garten", "frau", "stadt", "baum", "licht", "weg", "tag", "wort", "hand", "stein", "fluss"]
ENGLISH = [
    "house",
    "garden",
    "woman",
    "town",
    "tree",
    "light",
    "way",
    "day",
    "word",
    "hand",
    "stone",
    "river",
]


def corpus(path, name, count, seed):
    """A toy language pair, in train, validation and test files."""
    rng = np.random.default_rng(seed)
    for part, n in (("train", count), ("valid", 12), ("test", 12)):
        rows = []
        for _ in range(n):
            words = rng.integers(0, 12, rng.integers(2, 6))
            tag = f"{name}{rng.integers(0, 90)}"
            row = {"en": " ".join([tag, *(ENGLISH[w] for w in words)])}
            rows.append(
                {**row, "de": " ".join([tag, *(WORDS[w] for w in words)]), "sub": "ab"[len(rows) % 2]}
            )
        lines = "".join(json.dumps(r) + "\n" for r in rows)
        (path / f"{name}.{part}.jsonl").write_text(lines, encoding="utf-8")
    return str(path / f"{name}.train.jsonl")


def run(capsys, *argv):
    status = main(["translation", *map(str, argv), "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out.strip().splitlines()[-1]) if status == 0 else err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A tiny run of all methods."""
    folder = tmp_path_factory.mktemp("translation")
    server = corpus(folder, "server", 300, 0)
    options = ["train", "--preset", "tiny", "--server", server, "--run-dir", str(folder / "run")]
    options += ["--vocabulary-size", "330", "--batch-tokens", "256", "--test-sentences", "4", "--json"]
    for i, name in enumerate(("it", "law")):
        options += ["--client", f"{name}={corpus(folder, name, 40, i + 1)}"]
    assert main(["translation", *options]) == 0
    return folder, options


def test_train_writes_a_whole_run_folder(finished, capsys):
    folder, options = finished
    status = main(["translation", *options, "--resume"])
    out, err = capsys.readouterr()
    assert status == 0
    assert not any(text in out + err for text in private_texts(folder))
    result = json.loads(out.strip().splitlines()[-1])
    for method in ("p_nmt", "c_nmt", "fedavg_1", "fedavg_inf_server", "ft_ensemble", "fednn"):
        assert set(result["bleu"][method]) == {"general", "it", "it/a", "it/b", "law", "law/a", "law/b"}
    for method in ("ft", "ak_mt"):
        assert "general" not in result["bleu"][method]
    for row in metrics.read(folder / "run" / "metrics.jsonl"):
        assert result["bleu"][row["method"]] == pytest.approx(row["bleu"])
        assert result["chrf"][row["method"]] == pytest.approx(row["chrf"])
    assert all("epsilon: none" in text for text in result["guarantee"].values())
    # Both members get all records; headers and signatures differ.
    assert result["bytes_down"] == pytest.approx(2 * result["bytes_up"], abs=5000)
    assert result["bytes_up"] > 10_000
    for name in ("config.json", "manifest.json", "metrics.jsonl", "results.md", "privacy.md", "bleu.png"):
        assert (folder / "run" / name).stat().st_size > 0
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 10
    assert "rounds of FedAvg" in (folder / "run" / "results.md").read_text()
    text = (folder / "run" / "privacy.md").read_text()
    assert "epsilon: none for every method" in text
    assert "compression" in text
    assert "of two the rest is the other's" in text
    assert "how many records each client sends" in text


def test_the_protocol_changes_no_translation(finished):
    """Sealing, shuffling and opening give the memory back; the bytes are those of the files."""
    folder, _ = finished
    config = session.read_config(str(folder / "run"))
    bench = experiment.Bench(config, corpora.load(config), folder / "run")
    bench.prepare()
    clients = [federated.Client(d, e, len(e)) for d, e in bench.examples.items()]
    parts = [bench.memory(d) for d in bench.domains]
    dead = folder / "run" / ".exchange.dead.tmp"  # of a killed run: decrypted records
    (dead / "joint").mkdir(parents=True)
    (dead / ".lock").touch()
    (dead / "joint" / "values.bin").write_bytes(b"private")
    joint, traffic = bench.exchange(clients, parts)
    assert not dead.exists()
    direct = bench.store(parts)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(direct, joint))
    stepper = retrieval.stepper(bench.graphdef, bench.retrieval())
    told = [
        bench.translate(stepper, bench.weights(store), test, tqdm(disable=True))
        for store in (direct, joint)
        for test in bench.tests
    ]
    assert told[: len(bench.tests)] == told[len(bench.tests) :]
    sizes = {c.name: len(p.values) * experiment.record_bytes(bench) for c, p in zip(clients, parts)}
    assert set(traffic.up) == set(sizes)
    assert all(0 < traffic.up[name] - size < 1000 for name, size in sizes.items())
    row = next(r for r in metrics.read(folder / "run" / "metrics.jsonl") if r["method"] == "fednn")
    assert row["bytes_up"] == pytest.approx(sum(traffic.up.values()), abs=100)  # names and times in headers
    assert not list((folder / "run").glob(".exchange*"))
    private = [p for p in (folder / "run" / "cache").iterdir() if p.is_file()]
    assert private
    assert all(p.stat().st_mode & 0o077 == 0 for p in [folder / "run" / "cache", *private])


def test_a_fixed_weight_beside_the_adaptive_one(finished, capsys):
    folder, options = finished
    status = main(["translation", *options, "--resume", "--methods", "fednn_fixed"])
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert status == 0
    assert set(result["bleu"]["fednn_fixed"]) == {"general", "it", "it/a", "it/b", "law", "law/a", "law/b"}
    assert "validation pairs" in result["guarantee"]["fednn_fixed"]
    table = (folder / "run" / "results.md").read_text()
    assert (
        table.index("P-NMT") < table.index("FedNN |") < table.index("FedNN, fixed")
    )  # earlier calls' rows stay


def test_a_network_of_one_domain_in_the_others(finished, capsys):
    folder, _ = finished
    status, out = run(capsys, "transfer", "--run-dir", folder / "run")
    assert status == 0
    assert set(out["bleu"]) == {"general", "it", "law"}
    config = dataclasses.replace(session.read_config(str(folder / "run")), methods=("fednn",))
    adaptive = session.train(config)[0]["bleu"]["fednn"]
    assert out["bleu"]["general"]["law"] == pytest.approx(adaptive["law"], abs=1e-6)  # the run's own network
    text = (folder / "run" / "transfer.md").read_text()
    assert "epsilon: none" in text
    assert text.count("\n| ") == 4


def test_required_options_say_so(capsys):
    with pytest.raises(SystemExit):
        main(["translation", "share", "--help"])
    text = capsys.readouterr().out
    assert text.count("(required)") == 5
    assert "(default: '')" not in text


def private_texts(folder):
    """Every sentence of the clients, both sides."""
    rows = [
        json.loads(line)
        for name in ("it", "law")
        for line in (folder / f"{name}.train.jsonl").read_text().splitlines()
    ]
    return {row[side] for row in rows for side in ("en", "de")}


def test_no_private_sentence_in_what_is_released(finished):
    """Everything in the folder but `cache`, which holds models trained on private text."""
    folder, _ = finished
    texts = [text.encode() for text in private_texts(folder)]
    files = [p for p in (folder / "run").rglob("*") if p.is_file() and "cache" not in p.parts]
    names = {p.name for p in files}
    assert {"privacy.json", "transfer.md", "transfer.jsonl", "model.npz", "metrics.jsonl"} <= names
    assert any("checkpoints" in p.parts for p in files)
    for path in files:
        data = path.read_bytes()
        assert not any(text in data for text in texts), path


def test_protocol_through_files(finished, capsys, tmp_path):
    folder, _ = finished
    public = folder / "run" / "public"
    book = public / "codebook.npz"
    model = ["--model", public]
    for name in ("it", "law"):
        assert run(capsys, "keygen", "--name", name, "--out", tmp_path)[0] == 0
        public_key = (tmp_path / f"{name}.public.json").read_bytes()
        (tmp_path / f"{name}.secret.json").rename(tmp_path / "elsewhere")
        status, said = run(capsys, "keygen", "--name", name, "--out", tmp_path)
        assert (status, "keys are not overwritten" in said) == (2, True)
        assert (tmp_path / f"{name}.public.json").read_bytes() == public_key
        (tmp_path / "elsewhere").rename(tmp_path / f"{name}.secret.json")
        data = folder / f"{name}.train.jsonl"
        store = ["store", *model, "--codebook", book, "--data", data, "--out", tmp_path / f"{name}.store"]
        status, made = run(capsys, *store)
        assert status == 0
        assert made["records"] > made["pairs"] == 40
    members = [tmp_path / "it.public.json", tmp_path / "law.public.json"]
    status, _ = run(
        capsys, "keygen", "--round", tmp_path / "round.json", "--secret", tmp_path / "law.secret.json",
        "--members", *members, *model, "--codebook", book,
    )  # fmt: skip
    assert status == 0
    total = 0
    for name in ("it", "law"):
        status, sent = run(
            capsys, "share", "--round", tmp_path / "round.json", "--secret", tmp_path / f"{name}.secret.json",
            "--members", *members, "--store", tmp_path / f"{name}.store", "--out", tmp_path / f"{name}.up",
        )  # fmt: skip
        assert status == 0
        assert sent["bytes_up"] == (tmp_path / f"{name}.up").stat().st_size
        total += sent["records"]
    status, mixed = run(
        capsys, "shuffle", "--round", tmp_path / "round.json", "--out", tmp_path / "all",
        "--uploads", tmp_path / "it.up", tmp_path / "law.up",
    )  # fmt: skip
    assert (status, mixed["records"]) == (0, total)
    # Whatever the server is given, writes and prints: no record, no key.
    argv = [
        "--round",
        tmp_path / "round.json",
        "--out",
        tmp_path / "more",
        "--uploads",
        tmp_path / "it.up",
        tmp_path / "law.up",
    ]
    assert main(["translation", "shuffle", *map(str, argv)]) == 0
    seen = "".join(capsys.readouterr()).encode()
    seen += b"".join((tmp_path / n).read_bytes() for n in ("round.json", "it.up", "law.up", "all", "more"))
    secrets = [json.loads((tmp_path / f"{n}.secret.json").read_text()) for n in ("it", "law")]
    hidden = [s[k] for s in secrets for k in ("wrap_key", "sign_key")]
    for name in ("it", "law"):
        store = datastore.open_store(tmp_path / f"{name}.store")
        records = layout.pack(store.facts, store.keys, store.values)
        assert not any(record.tobytes() in seen for record in records)
    assert not any(text.encode() in seen for text in hidden)
    assert not any(bytes.fromhex(key) in seen for key in hidden)
    status, opened = run(
        capsys, "open", "--round", tmp_path / "round.json", "--secret", tmp_path / "it.secret.json",
        "--members", *members, "--shuffled", tmp_path / "all", "--codebook", book, "--out", tmp_path / "joint",
    )  # fmt: skip
    assert (status, opened["records"]) == (0, total)
    assert "epsilon: none" in opened["guarantee"]

    (tmp_path / "text").write_text("house garden\n\n   \nriver\n", encoding="utf-8")
    asked = [
        "--store",
        tmp_path / "joint",
    ]  # keys narrower than the default shadow; the network beside the model
    for extra in ([], asked):
        status, out = run(capsys, "translate", *model, "--input", tmp_path / "text", *extra)
        assert status == 0
        assert len(out["translations"]) == 4
        assert out["translations"][1:3] == ["", ""]


def test_attack_says_what_a_memory_gives_away(finished, capsys, tmp_path):
    """A guesser who has the public model and the codebook finds every member; the report says so."""
    folder, _ = finished
    public = folder / "run" / "public"
    status, out = run(
        capsys, "attack", "--model", public, "--codebook", public / "codebook.npz", "--steps", "30",
        "--attacker", folder / "it.train.jsonl", "--defender", f"law={folder / 'law.train.jsonl'}",
        "--window", "4", "--output", tmp_path / "attack.md",
    )  # fmt: skip
    assert status == 0
    assert out["membership"]["law"]["members_found"] == 100
    assert out["membership"]["law"]["others_found"] == 0
    rare = out["rare_values"]["law"]
    assert rare["in_no_other_client"] >= 1  # its own tags
    assert f"{rare['in_one_sentence']} of its values" in (tmp_path / "attack.md").read_text()
    assert set(out["reconstruction"]["law"]) == {"plain", "coded"}
    for row in out["reconstruction"]["law"].values():
        assert 0 < row["f1"] <= max(row["precision"], row["recall"])
    assert "epsilon: none" in out["guarantee"]
    truths = re.findall("plain: `([^`]*)` read as", (tmp_path / "attack.md").read_text())
    assert len(truths) == 5
    assert all(any(t in text for text in private_texts(folder)) for t in truths)
    assert (tmp_path / "attack.md").stat().st_mode & 0o077 == 0  # it holds private text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["shout"], "unknown command"),
        (["train", "--client", "it"], "--client needs NAME=FILE"),
        (["train", "--server", "missing.jsonl", "--client", "a=missing.jsonl"], "missing.jsonl"),
        (["train", "--methods", "magic"], "unknown method"),
        (["train", "--seed", "4294967297"], "--seed"),
        (["train", "--gate", "0"], "--gate"),
        (["train", "--subspaces", "7"], "--subspaces must divide"),
        (["translate"], "--input FILE is needed"),
        (["translate", "--input", "x", "--beams", "0"], "--beams"),
        (["translate", "--input", "x", "--temperature", "0"], "--temperature must be positive"),
        (["translate", "--input", "x", "--temperature", "-1"], "--temperature must be positive"),
        (["store"], "--data FILE"),
        (["share"], "--round FILE is needed"),
        (["evaluate", "--run-dir", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["translation", *argv]) == 2
    err = capsys.readouterr().err.strip()
    assert words in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_run_folder_refusals(finished, capsys):
    _, options = finished
    assert main(["translation", *options]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["translation", *options, "--resume", "--k", "2"]) == 2
    assert "holds a run with --k 4" in capsys.readouterr().err
