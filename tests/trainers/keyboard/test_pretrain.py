"""The public first stage: what it trains on, that it can be killed anywhere, what it refuses and what it states."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from accounting import reporting
from tests.trainers.keyboard import toy
from tests.trainers.keyboard.test_train import same_run
from trainers.common import checkpoint, metrics
from trainers.common.errors import InputError
from trainers.common.vocabulary import Vocabulary
from trainers.keyboard import corpus, model, pretrain, session, train


def write_public(path: pathlib.Path, *, rows: int = 200) -> pathlib.Path:
    """Sentences of the toy language, from nobody."""
    rng = np.random.default_rng(9)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            words = [rng.choice(toy.SUBJECTS), rng.choice(toy.VERBS), rng.choice(toy.OBJECTS)]
            file.write(json.dumps({"text": " ".join(words[: rng.integers(1, 4)])}) + "\n")
    return path


def config(folder: pathlib.Path, run: str = "run", **changes):
    public = folder / "public.jsonl"
    if not public.exists():
        write_public(public)
    settings = {
        "pretrain_data": str(public),
        "pretrain_epochs": 2.5,
        "pretrain_batch_size": 16,
        "pretrain_learning_rate": 0.03,
        "rounds": 2,
    }
    return toy.config(folder, run, **(settings | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    made = config(tmp_path_factory.mktemp("pretrained"))
    return made, session.train(made)


def test_batches_hold_every_row_once_an_epoch_and_lose_no_target():
    rng = np.random.default_rng(0)
    rows = np.zeros((57, 13), np.int32)
    for row, length in zip(rows, rng.integers(1, 13, len(rows))):
        row[: length + 1] = rng.integers(1, 9, length + 1)
    rows[:, 0] = np.arange(100, 157)  # names the row
    batches = pretrain.Batches(rows, 4, seed=3)
    for epoch in (0, 1):
        first = epoch * batches.per_epoch
        seen = list(batches.starting_at(first, first + batches.per_epoch))
        assert [t for t, _ in seen] == list(range(first, first + batches.per_epoch))
        columns = {int(c[0]): c for _, tokens in seen for c in tokens.T if c[0]}
        assert sorted(columns) == sorted(rows[:, 0])
        for row in rows:
            got = columns[int(row[0])]
            assert np.array_equal(got, row[: len(got)])
            assert not row[len(got) :].any()
    orders = [np.concatenate(batches.epoch(e)).tolist() for e in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_one_step_is_adam_on_the_mean_loss():
    sizes = model.ModelConfig(num_tokens=9, embedding_size=3, hidden_size=4)
    params = model.init_params(sizes, seed=0)
    tokens = np.random.default_rng(1).integers(1, 9, (6, 5)).astype(np.int32)
    optimizer = pretrain._optimizer(0.1, 10)
    state = optimizer.init(params)
    step = pretrain._make_step(sizes, optimizer)
    loss, gradient = jax.value_and_grad(model.loss)(params, tokens[:-1], tokens[1:], cell="cifg")
    expected = {k: np.asarray(v) for k, v in params.items()}
    now, state, first = step(
        jax.tree.map(jax.numpy.array, params), state, tokens
    )  # rate 0: the warm-up's start
    assert float(first) == pytest.approx(float(loss), rel=1e-6)
    for name, value in expected.items():
        np.testing.assert_array_equal(now[name], value)
    now, state, _ = step(now, state, tokens)
    for name, value in expected.items():
        g = np.asarray(gradient[name])
        moved = value - 0.1 * g / (np.abs(g) + 1e-8)  # both moments are those of one gradient
        np.testing.assert_allclose(now[name], moved, atol=1e-4)


def test_the_federated_rounds_start_from_the_public_model(whole):
    made, _ = whole
    folder = pathlib.Path(made.run_dir)
    params, facts, _ = pretrain._load(folder / "pretraining" / "model.safetensors")
    started = checkpoint.load(
        folder / "checkpoints", 0, model.init_params(sizes_of(made), seed=0), under=".round.params"
    )
    jax.tree.map(np.testing.assert_array_equal, params, started)
    lines = metrics.read(folder / "pretraining" / "metrics.jsonl")
    assert lines[-1]["public_evaluation"]["perplexity"] < 0.7 * lines[0]["public_evaluation"]["perplexity"]
    assert lines[-1]["epoch"] == pytest.approx(2.5, abs=0.1)
    assert all(line["covered_by_guarantee"] is False for line in lines)
    assert (folder / "pretraining" / "learning.png").stat().st_size > 0
    assert facts["settings"]["pretrain_epochs"] == 2.5


def sizes_of(made):
    return train.model_sizes(made, Vocabulary.load(pathlib.Path(made.run_dir) / "vocabulary.json"))


def test_the_statement_names_the_public_text(whole):
    made, _ = whole
    stated = reporting.report(made.run_dir).data
    digest = corpus.pretraining_text(made, corpus.load(made))[1]
    assert any(digest in note and "text alone that was given as public" in note for note in stated["notes"])


@pytest.mark.parametrize("killed", ["in the first stage", "between the stages", "in the second stage"])
def test_a_run_killed_in_either_stage_goes_on_to_the_same_bits(whole, tmp_path, monkeypatch, killed):
    made = config(tmp_path, pretrain_data=whole[0].pretrain_data, checkpoint_every=1)
    reference = pathlib.Path(whole[0].run_dir)
    stage = tmp_path / "run" / "pretraining"
    if killed == "in the second stage":
        real_append = train.record.ParticipationLog.append

        def append(self, number, *rest, **more):
            real_append(self, number, *rest, **more)
            if number == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(train.record.ParticipationLog, "append", append)
    elif killed == "between the stages":
        monkeypatch.setattr(pretrain, "_save", interrupted)
    else:
        real_save, count = checkpoint.save, []

        def save(folder, *rest, **more):
            count.append(folder)
            if len(count) == 3:
                raise KeyboardInterrupt  # its line of metrics is written, its checkpoint is not
            real_save(folder, *rest, **more)

        monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(KeyboardInterrupt):
        session.train(made)
    monkeypatch.undo()
    assert (tmp_path / "run" / "config.json").exists() == (killed == "in the second stage")
    session.train(config(tmp_path, pretrain_data=made.pretrain_data, checkpoint_every=1, resume=True))
    same_run(whole[0], made)
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (stage / name).read_bytes() == (reference / "pretraining" / name).read_bytes()


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_resume_refuses_other_public_text_or_settings(whole, tmp_path, monkeypatch):
    made = config(tmp_path)
    monkeypatch.setattr(pretrain, "_draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.train(made)
    monkeypatch.undo()
    with pytest.raises(InputError, match="pretrain_learning_rate was"):
        session.train(config(tmp_path, pretrain_learning_rate=0.01, resume=True))
    write_public(tmp_path / "public.jsonl", rows=150)
    with pytest.raises(InputError, match="other digests"):
        session.train(config(tmp_path, resume=True))
    finished = dataclasses.replace(whole[0], pretrain_epochs=1.0, resume=True)
    with pytest.raises(InputError, match="pretrain_epochs was"):
        session.train(finished)


def test_another_run_may_start_from_the_same_public_model(whole, tmp_path):
    made, (result, _) = whole
    copy = tmp_path / "model.safetensors"
    copy.write_bytes((pathlib.Path(made.run_dir) / "pretraining" / "model.safetensors").read_bytes())
    again = toy.config(tmp_path, rounds=2, initial_model=str(copy))
    other, _ = session.train(again)
    assert other["perplexity"] == result["perplexity"]  # the same start, cohorts and noise
    assert any("given as public" in note for note in reporting.report(again.run_dir).data["notes"])
    data, sizes = corpus.load(made), sizes_of(made)
    by_folder = pretrain.prepare(dataclasses.replace(again, initial_model=made.run_dir), data, sizes)
    assert by_folder.facts == pretrain.prepare(again, data, sizes).facts
    params, facts, _ = pretrain._load(copy)
    pretrain._save(copy, params | {"bias": params["bias"] + 1}, facts, None)
    with pytest.raises(InputError, match="pretraining model"):
        session.train(dataclasses.replace(again, resume=True))


def test_a_starting_model_must_be_public_and_of_the_same_words_and_sizes(whole, tmp_path):
    made, _ = whole

    def refused(message, **changes):
        with pytest.raises(InputError, match=message):
            session.train(toy.config(tmp_path, **({"initial_model": made.run_dir} | changes)))

    refused("other sizes", hidden_size=8)
    refused("--shared-embeddings alike", shared_embeddings=True)
    refused("other words", vocabulary_size=9)
    refused("only a model of public text", initial_model=str(tmp_path))
    save_file({"bias": np.zeros(3, np.float32)}, tmp_path / "anonymous.safetensors")
    refused("public text alone made it", initial_model=str(tmp_path / "anonymous.safetensors"))
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    refused("cannot be read as safetensors", initial_model=str(tmp_path / "broken.safetensors"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretrain_data": "the clients' file"}, "is the clients' own data"),
        ({"pretrain_data": "absent.jsonl"}, "does not exist"),
        ({"pretrain_epochs": 0.0}, "--pretrain-epochs must be above 0"),
        ({"pretrain_epochs": float("nan")}, "--pretrain-epochs must be above 0"),
        ({"pretrain_learning_rate": -1.0}, "--pretrain-learning-rate must be above 0"),
        ({"pretrain_batch_size": 0}, "--pretrain-batch-size must be above 0"),
        ({"initial_model": "some"}, "leave one out"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(tmp_path, changes, message):
    made = config(tmp_path, **changes)
    if made.pretrain_data == "the clients' file":
        made = config(tmp_path, pretrain_data=made.data)
    with pytest.raises(InputError, match=message):
        session.train(made)
    assert not (tmp_path / "run").exists()


def test_diverged_pretraining_ends_in_one_line(tmp_path):
    with pytest.raises(InputError, match="lower --pretrain-learning-rate"):
        session.train(config(tmp_path, pretrain_learning_rate=1e30))


def test_the_noise_free_comparison_starts_from_the_same_model(whole, tmp_path):
    made = toy.config(tmp_path, rounds=1, compare=True, initial_model=whole[0].run_dir)
    session.train(made)
    folder = pathlib.Path(made.run_dir)
    like = model.init_params(sizes_of(made), seed=0)
    start = [
        checkpoint.load(f / "checkpoints", 0, like, under=".round.params")
        for f in (folder, folder / "no_noise")
    ]
    jax.tree.map(np.testing.assert_array_equal, *start)
