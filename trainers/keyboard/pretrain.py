"""The first of two stages: central training on public text, whose result the federated rounds start from.

    jaxpriv keyboard train --pretrain-data public.parquet

Nobody's privacy is spent: no client's text is trained on. The stage has a folder of its own in the run's,
`pretraining/`, can be killed at any moment and goes on to the same bits, and ends with `model.safetensors`, which
other runs may start from (`--initial-model`).
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, UInt64

from trainers.common import checkpoint, files, manifest, metrics, plots, progress, run_dir, tensors
from trainers.common.errors import InputError
from trainers.keyboard import corpus, evaluate, model, overlap
from trainers.keyboard.config import Config
from trainers.keyboard.model import PAD, ModelConfig, Params

FOLDER, MODEL = "pretraining", "model.safetensors"
_TEXT = "sketch of the text"
COMMAND = "jaxpriv keyboard train (first stage, public text)"
FORMAT = "jaxpriv-keyboard-public-model"
# Every 50th row is held out; the bar's pictures and checkpoints come at most so many steps apart.
_HOLD_OUT, _MOST_STEPS = 50, 500
_MOST_STEPS_EVER = 2**31
# Batches are as long as their longest row, rounded up to this: few shapes, little padding.
_STEP = 5
_WARM_UP = 0.05
# What the public model depends on.
_SETTINGS = (
    "pretrain_epochs",
    "pretrain_learning_rate",
    "pretrain_batch_size",
    "sequence_length",
    "embedding_size",
    "hidden_size",
    "shared_embeddings",
    "seed",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """Where the starting parameters come from, known before anything is written.

    examples: the public text to train on, int32 [rows, sequence_length + 1]; None where a finished model is given.
    params: that model; None where it is still to be trained.
    facts: the settings and digests that it depends on.
    shared: what the text has in common with the clients', in words, for the operator only.
    sketch: what the text can be told by later (`overlap.sketch`); goes into the finished model's file.
    """

    examples: Int[np.ndarray, "rows width"] | None
    params: Params | None
    facts: dict[str, Any]
    shared: tuple[str, ...] = ()
    sketch: UInt64[np.ndarray, "runs"] | None = None

    @property
    def digests(self) -> dict[str, str]:
        """What a resumed run must find unchanged."""
        return {f"pretraining {name}": digest for name, digest in self.facts["digests"].items()}

    @property
    def note(self) -> str:
        """For the statement. How many lines the text shares with the clients' is not said: that depends on theirs."""
        text, epochs = self.facts["digests"]["text"], self.facts["settings"]["pretrain_epochs"]
        return (
            "the starting parameters come from text alone that was given as public (SHA-256 "
            f"{text}, {epochs:g} epoch{'' if epochs == 1 else 's'}); what of it is a device's own text is not covered, "
            "and no other text of a device was trained on before the first round"
        )


class State(NamedTuple):
    """What a resumed stage goes on from. step: batches done. loss: summed since the last line of metrics."""

    params: Params
    optimizer: Any
    step: np.ndarray
    loss: Float[Array, ""]


def prepare(config: Config, data: corpus.Corpus, sizes: ModelConfig) -> Start | None:
    """Reads the public text, or the finished model, that `config` names; None where it names none.

    Raises:
      InputError: it cannot be used.
    """
    if config.pretrain_data != "none" and config.initial_model != "none":
        raise InputError(
            "--pretrain-data trains a starting model and --initial-model gives one; leave one out"
        )
    if config.initial_model != "none":
        return read_model(config.initial_model, data, sizes)
    if config.pretrain_data == "none":
        return None
    for name in ("pretrain_epochs", "pretrain_learning_rate", "pretrain_batch_size"):
        if not 0 < getattr(config, name) < float("inf"):
            raise InputError(f"--{name.replace('_', '-')} must be above 0, got {getattr(config, name)}")
    text = corpus.pretraining_text(config, data)
    examples = text.examples[(text.examples[:, 1:] != PAD).any(1)]
    if len(examples) < 2:
        raise InputError(f"{config.pretrain_data} has fewer than two usable examples to pretrain on")
    if config.pretrain_epochs * len(examples) >= _MOST_STEPS_EVER:
        raise InputError(
            f"--pretrain-epochs {config.pretrain_epochs:g} over {len(examples)} rows are more steps than 32 bits "
            "count; lower it"
        )
    settings = {name: getattr(config, name) for name in _SETTINGS}
    digests = {"text": text.digest, "vocabulary": data.vocabulary.digest}
    return Start(examples, None, {"settings": settings, "digests": digests}, tuple(text.shared), text.sketch)


def run(config: Config, start: Start, sizes: ModelConfig, held_out, folder: pathlib.Path) -> Params:
    """Trains, or goes on training, in `folder`; returns the parameters, which `folder`/model.safetensors then holds.

    Args:
      held_out: examples of clients to score on (not covered by any guarantee), as `evaluate.evaluate` takes them.
    """
    if start.examples is None:
        assert start.params is not None
        return start.params
    if (folder / MODEL).exists():
        params, facts, _ = _load(folder / MODEL)
        _require_same(facts, start.facts, folder)
        return params
    folder.mkdir(exist_ok=True)
    public_held_out, rows = start.examples[::_HOLD_OUT], start.examples
    rows = np.delete(rows, np.s_[::_HOLD_OUT], 0)
    public_held_out = public_held_out[: config.evaluation_examples]
    order = Batches(rows, config.pretrain_batch_size, config.seed)
    total = max(1, round(config.pretrain_epochs * order.per_epoch))
    every = min(_MOST_STEPS, -(-total // 8))
    optimizer = _optimizer(config.pretrain_learning_rate, total)
    step = _make_step(sizes, optimizer)
    params = model.init_params(sizes, seed=config.seed)
    state = State(params, optimizer.init(params), np.asarray(0, np.int64), jnp.float32(0.0))
    at = checkpoint.latest(folder / "checkpoints")
    if at is not None:
        _require_same(checkpoint.read_facts(folder / "checkpoints", at), start.facts, folder)
        state = checkpoint.load(folder / "checkpoints", at, state)
    else:
        manifest.write(folder, command=COMMAND, config=config, digests=start.facts["digests"])
    first = int(state.step)
    bar = progress.bar(total=total, initial=first, what="public pretraining", unit="batch")
    with metrics.Writer(folder / "metrics.jsonl", resume_at=first, counter="step") as log, bar:
        for t, batch in order.starting_at(first, total):
            params, optimizer_state, loss = step(state.params, state.optimizer, batch)
            done = t + 1
            state = State(params, optimizer_state, np.asarray(done, np.int64), state.loss + loss)
            if done % every == 0 or done == total:
                mean = float(state.loss) / (done - (done - 1) // every * every)
                if not np.isfinite(mean):
                    raise InputError(
                        f"public pretraining diverged before batch {done}; start again with a lower "
                        "--pretrain-learning-rate"
                    )
                log.write(
                    step=t,
                    epoch=done / order.per_epoch,
                    loss=mean,
                    public_evaluation=evaluate.evaluate(state.params, public_held_out, sizes)._asdict(),
                    evaluation=evaluate.evaluate(state.params, held_out, sizes)._asdict(),
                    covered_by_guarantee=False,
                )
                log.sync()
                state = state._replace(loss=jnp.float32(0.0))
                checkpoint.save(folder / "checkpoints", done, state, facts=start.facts)
            bar.update()
    _draw(folder)
    _save(folder / MODEL, state.params, start.facts, start.sketch)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return state.params


class Batches:
    """Rows of like length side by side, in an order that depends on seed and epoch alone.

    Rows are shuffled and cut into batches among those of equal length but for rounding; then the batches are
    shuffled. A batch is time first, with zeros where a length has too few rows to fill it.
    """

    def __init__(self, rows: Int[np.ndarray, "rows width"], batch_size: int, seed: int):
        self._rows, self._size, self._seed = rows, batch_size, seed
        steps = rows.shape[1] - 1
        length = steps - (rows[:, :0:-1] != PAD).argmax(1)
        self._steps = np.minimum(steps, -(-length // _STEP) * _STEP)
        self.per_epoch = sum(-(-int(count) // batch_size) for count in np.bincount(self._steps))

    def epoch(self, number: int) -> list[Int[np.ndarray, "batch"]]:
        """The row numbers of every batch of one epoch."""
        draw = np.random.default_rng([self._seed, number])
        batches = []
        for steps in np.unique(self._steps):
            mine = draw.permutation(np.flatnonzero(self._steps == steps))
            batches += np.split(mine, range(self._size, len(mine), self._size))
        return [batches[i] for i in draw.permutation(len(batches))]

    def starting_at(self, first: int, total: int) -> Iterator[tuple[int, Int[np.ndarray, "time batch"]]]:
        """`(number, tokens)` of batches `first` to `total` - 1."""
        number, batches = -1, []
        for t in range(first, total):
            if t // self.per_epoch != number:
                number = t // self.per_epoch
                batches = self.epoch(number)
            rows = batches[t % self.per_epoch]
            tokens = np.zeros((self._steps[rows[0]] + 1, self._size), np.int32)
            tokens[:, : len(rows)] = self._rows[rows, : len(tokens)].T
            yield t, tokens


def _optimizer(rate: float, total: int) -> optax.GradientTransformation:
    """Adam; the rate rises over the first twentieth of the steps and falls to zero along a cosine."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, round(_WARM_UP * total)), total + 1)
    return optax.adam(schedule)


def _make_step(sizes: ModelConfig, optimizer: optax.GradientTransformation):
    def step(params: Params, state: Any, tokens: Int[Array, "time rows"]):
        loss, gradient = jax.value_and_grad(model.loss)(params, tokens[:-1], tokens[1:], cell=sizes.cell)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def read_model(where: str, data: corpus.Corpus, sizes: ModelConfig) -> Start:
    """The public model of a run folder, or of a file that a pretraining stage wrote.

    Raises:
      InputError: there is none, it is of other words or sizes, or it was made of the clients' own text.
    """
    path = pathlib.Path(where)
    if path.is_dir():
        inside = [p for p in (path / FOLDER / MODEL, path / MODEL) if p.exists()]
        if not inside:
            raise InputError(
                f"{path} holds no {FOLDER}/{MODEL}: only a model of public text may be started from, since the rounds "
                "of another run would count too; pretrain with --pretrain-data"
            )
        path = inside[0]
    params, facts, sketch = _load(files.existing_file(path, "initial model"))
    if facts["digests"]["vocabulary"] != data.vocabulary.digest:
        raise InputError(
            f"initial model {path} was trained with other words; give the same --vocabulary and size"
        )
    expected = jax.eval_shape(lambda: model.init_params(sizes, seed=0))
    found = {name: value.shape for name, value in params.items()}
    if found != {name: value.shape for name, value in expected.items()}:
        raise InputError(
            f"initial model {path} has other sizes ({found['embedding'][1]} x {found['recurrent_kernel'][0]}, "
            f"{'separate' if 'output_embedding' in found else 'shared'} embeddings); set --embedding-size, "
            "--hidden-size and --shared-embeddings alike"
        )
    digest = files.digest_of(*(np.asarray(params[name]).tobytes() for name in sorted(params)))
    shared = overlap.require_public_model(
        f"--initial-model {path}", sketch, data.seen, "or --initial-model none"
    )
    return Start(None, params, facts | {"digests": facts["digests"] | {"model": digest}}, tuple(shared))


def _save(path: pathlib.Path, params: Params, facts: dict[str, Any], sketch: np.ndarray | None) -> None:
    about = {FORMAT: json.dumps(metrics.plain(facts), sort_keys=True)}
    arrays = {name: np.asarray(value) for name, value in params.items()}
    tensors.write(path, arrays | ({} if sketch is None else {_TEXT: sketch}), about)


def _load(path: pathlib.Path) -> tuple[Params, dict[str, Any], np.ndarray | None]:
    """Parameters, facts, and the sketch of the text; None in a file that has none."""
    try:
        arrays, about = tensors.read(path)
    except ValueError as error:
        raise InputError(f"{path} cannot be read as safetensors ({error}); make it again") from None
    if FORMAT not in about:
        raise InputError(
            f"{path} does not say that public text alone made it; give the model of a pretraining stage"
        )
    sketch = arrays.pop(_TEXT, None)
    if sketch is not None and (sketch.dtype != np.uint64 or sketch.ndim != 1):
        raise InputError(f"{path} does not say of which text it was made; make it again")
    return {name: jnp.asarray(value) for name, value in arrays.items()}, json.loads(about[FORMAT]), sketch


def _require_same(saved: dict[str, Any], now: dict[str, Any], folder: pathlib.Path) -> None:
    now = metrics.plain(now)
    for what in ("settings", "digests"):
        run_dir.require_same(saved[what], now[what], where=f"the pretraining in {folder}", what=what)


def _draw(folder: pathlib.Path) -> None:
    """learning.png: accuracy and perplexity by epoch, on public text and on clients."""
    rows = metrics.read(folder / "metrics.jsonl")
    made, axes = plots.figure(2)
    epochs = [r["epoch"] for r in rows]
    kinds = {"held-out public text": "public_evaluation", "held-out clients": "evaluation"}
    for axis, name, title in zip(axes, ("top1_words", "perplexity"), ("top-1 words, %", "perplexity")):
        plots.curves(
            axis,
            {label: (epochs, [r[kind][name] for r in rows]) for label, kind in kinds.items()},
            xlabel="epochs of public text",
            ylabel=title,
            log_y=name == "perplexity",
        )
    plots.save(made, folder / "learning.png")
