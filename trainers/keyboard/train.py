"""Simulated federated training with DP-FTRL, killed and resumed at will.

    jaxpriv keyboard train

trains on the docstrings of installed packages: some minutes on two cores, and prints the private model beside the
same model without noise and an n-gram, then the privacy statement. Everything goes to the run folder:

    config.json                         what was asked for
    manifest.json                       what ran, digests of the data, what reading them met (owner only)
    mechanism.json participation.jsonl  what the accountant needs (`jaxpriv account report RUN_DIR`)
    privacy.json privacy.md             the statement
    metrics.jsonl                       by round: released figures, and evaluations (which no guarantee covers)
    operator.jsonl timing.jsonl         by round: the operator's figures (not covered, not for release); seconds
    checkpoints/                        the whole state, with the secret noise key (owner only)
    plots/ vocabulary.json ngram.json
"""

import dataclasses
import pathlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import accounting
from accounting import evidence, record
from jaxpriv import keys, participation, sharding
from trainers.common import checkpoint, entropy, manifest, metrics, processes, progress, run_dir, statements
from trainers.common.errors import InputError
from trainers.common.vocabulary import Vocabulary
from trainers.keyboard import batches, checks, compose, corpus, evaluate, model, plan, pretrain
from trainers.keyboard import round as rounds
from trainers.keyboard.config import PRESETS, Config

# Settings that a resumed run may change: they change no number.
FREE = ("resume", "json", "run_dir", "coordinator", "process_id")
MOST_NON_FINITE_ROUNDS = 3
MOST_ABANDONED_ATTEMPTS = 1000
COMPLETED_EXAMPLES = 512  # of each evaluation, on which multi-word completions are counted too
COMMAND = "jaxpriv keyboard train"


class State(NamedTuple):
    """Everything that a resumed run goes on from; private, since it holds the noise key.

    round: model, server optimizer, noise and quantile states. devices: timers and counts. attempts: cohorts drawn
    so far, abandoned ones included. non_finite: rounds running in which every update was non-finite.
    secret: the 256 bits that the noise key comes from.
    """

    round: rounds.RoundState
    devices: participation.State
    attempts: np.ndarray
    non_finite: np.ndarray
    secret: np.ndarray


class Outcome(NamedTuple):
    """params: after the last round. test: on clients never trained on. seconds: of rounds and evaluations."""

    params: model.Params
    test: evaluate.Evaluation
    seconds: float


class Run:
    """One training run in its folder."""

    def __init__(
        self,
        config: Config,
        data: corpus.Corpus,
        folder: pathlib.Path,
        first_stage: pretrain.Start | None = None,
        notes: Sequence[str] = (),
        deployment_share: float = 1.0,
        stage: Mapping[str, Any] | None = None,
    ):
        self.config, self.data, self.folder = config, data, folder
        self.sizes = model_sizes(config, data.vocabulary)
        self.dimension = model.num_params(self.sizes)
        checks.require_memory(config, self.sizes, self.dimension)
        self.initial: model.Params | None = None  # None: initial values of the seed
        self.stated_in = [folder]  # whose statements count this run's rounds
        self.before_first_round: Callable[[], None] = lambda: None
        self.plan = plan.make(
            config,
            population=data.num_clients,
            vocabulary_origin=data.vocabulary.origin,
            dimension=self.dimension,
            notes=[
                *notes,
                *([] if first_stage is None else [first_stage.note]),
                *([plan.HOURS] if config.availability == "diurnal" and data.hours is not None else []),
            ],
            deployment_share=deployment_share,
            stage=stage,
        )
        self.server = server_optimizer(config)
        self.mesh = _mesh(config.devices)
        self.step = rounds.make_round(
            self.plan.round, self.sizes, self.server, self.plan.mechanism, self.mesh
        )
        self.peak_hours = _peak_hours(data.hours)
        self.cohort_key = keys.stream(keys.root(config.seed), "cohorts")
        self.facts = {
            "settings": run_dir.settings(config, FREE),
            "digests": data.digests | ({} if first_stage is None else first_stage.digests),
            "strategy": {"coefficients": self.plan.record.strategy},
            "mechanism": dataclasses.asdict(self.plan.record),
        }

    def start(self) -> State:
        """The state before the first round, with a fresh secret."""
        if self.config.insecure_noise_seed is None:
            secret = entropy.secret_words()
        else:
            seed = keys.stream(keys.root(self.config.insecure_noise_seed), "insecure noise")
            secret = np.asarray(jax.random.bits(seed, (8,), jnp.uint32))
        draws = self.plan.mechanism is not None or self.plan.round.secure is not None
        noise_key = entropy.key_from_words(secret) if draws else None
        params = self.initial
        if params is None:
            params = model.init_params(self.sizes, seed=self.config.seed)
        return State(
            round=rounds.init(self.plan.round, params, self.server, self.plan.mechanism, noise_key),
            devices=participation.init(self.data.num_clients),
            attempts=np.asarray(0, np.int64),
            non_finite=np.asarray(0, np.int64),
            secret=secret,
        )

    def resume(self) -> tuple[int, State]:
        """The newest whole checkpoint's round and state; that of round 0 is written before the first round.

        Raises:
          InputError: the checkpoint is of another run (other settings, data or vocabulary), or none is left: then
            the noise key is lost, and going on would release rounds a second time with other noise.
        """
        at = checkpoint.latest(self.checkpoints)
        if at is None:
            raise InputError(
                f"{self.folder} has no whole checkpoint left, and with it went its noise key; rounds that it released "
                "stay released: account for them, and start a new run with another --run-dir"
            )
        saved = checkpoint.read_facts(self.checkpoints, at)
        self._require_same_run(saved.get("run"), at)
        now = metrics.plain(self.facts)
        where = f"the run in {self.folder}"
        run_dir.require_same_settings(saved["settings"], self.config, free=FREE, presets=PRESETS, where=where)
        for what in ("digests", "strategy"):
            run_dir.require_same(saved[what], now[what], where=where, what=what)
        recorded, _ = evidence.checked_record(self.folder)
        recorded = metrics.plain(dataclasses.asdict(recorded))
        # The notes stay those that the run began with, which another version may word otherwise.
        self.facts["mechanism"]["notes"] = now["mechanism"]["notes"] = recorded["notes"]
        if recorded["stage"] is None:  # an earlier version did not say it
            self.facts["mechanism"]["stage"] = now["mechanism"]["stage"] = None
        run_dir.require_same(
            recorded, now["mechanism"], where=self.folder / record.MECHANISM_FILE, what="mechanism"
        )
        return at, checkpoint.load(self.checkpoints, at, self.start())

    def _require_same_run(self, run: str | None, at: int) -> None:
        """Refuses a checkpoint that is not of the run whose manifest is here, though all its settings are the same."""
        self.facts["run"] = run
        written = self.folder / "manifest.json"
        if (run_dir.read_manifest(self.folder).get("run") if written.is_file() else None) != run:
            raise InputError(
                f"{self.checkpoints / str(at)} is of another run than {written} (or that is lost): with its noise key "
                "the rounds since might be released again with other noise; restore the run's own"
            )

    @property
    def bytes_a_round(self) -> tuple[int, int]:
        """What one client sends (its message) and receives (the model in float32); keys of a protocol apart."""
        down = 4 * self.dimension
        secured = self.plan.round.secure
        return (down if secured is None else secured.bytes_up), down

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.folder / "checkpoints"

    def begin(self) -> tuple[int, State]:
        """The first round to run and the state before it, the same in every process; a new run is written down."""
        folder = self.folder
        first, state = 0, self.start()
        resuming = self.config.resume and (folder / "config.json").exists()
        resuming = bool(processes.largest(int(processes.is_first() and resuming)))
        with processes.together():
            if resuming:
                first, state = self.resume()
            elif processes.is_first() and (sign := evidence.sign_of_release(folder)):
                raise InputError(
                    f"{folder} has released rounds, as {sign} shows, but no config.json; they stay released: account "
                    "for them, and start a new run with another --run-dir"
                )
            elif processes.is_first():
                self.data.vocabulary.save(folder / "vocabulary.json")
                record.write_mechanism(folder, self.plan.record)
                record.ParticipationLog(folder).close()  # from now on a run without one has lost it
        first, state = processes.from_first((np.asarray(first, np.int64), state))
        if not resuming:
            self.facts["run"] = secrets.token_hex(16)  # tells what belongs together
            self.save(0, state)
            if processes.is_first():
                data = {"shared_lines": self.data.shared, "data": self.data.notes}
                facts = {"digests": self.facts["digests"], "run": self.facts["run"], **data}
                manifest.write(folder, command=COMMAND, config=self.config, **facts)
        if self.mesh is not None:
            state = state._replace(round=sharding.replicate(state.round, self.mesh))
        return int(first), state

    def save(self, done: int, state: State) -> None:
        """Writes the checkpoint after `done` rounds; processes call it in step."""
        checkpoint.save(self.checkpoints, done, sharding.local_copy(state), facts=self.facts)

    def must_save(self, done: int) -> bool:
        return done % self.config.checkpoint_every == 0 or done == self.config.rounds

    def pack(self, reporters: list[int]) -> batches.RoundBatch:
        """The round's examples on the devices of this process; of several processes, those of its own clients."""
        config = self.config
        settings: dict[str, Any] = {
            "batch_size": config.batch_size,
            "max_examples": config.max_examples,
            "chunk_size": config.chunk_size,
            "num_clients": config.report_goal,
            "width": config.sequence_length + 1,
        }
        own = [i for i in reporters if i % jax.process_count() == jax.process_index()]
        examples = [self.data.train[i] for i in own]
        if self.mesh is None:
            return batches.pack_round(own, examples, **settings)
        parts = batches.pack_parts(
            own, examples, num_parts=len(self.mesh.local_devices), largest=processes.largest, **settings
        )
        return sharding.place_parts(parts, self.mesh)

    def advance(self, state: State, reporters: list[int]) -> tuple[State, rounds.RoundInfo]:
        """One round with these clients; processes call it in step."""
        new, info = self.step(state.round, self.pack(reporters))
        streak = int(state.non_finite) + 1 if rounds.diverged(info) else 0
        return state._replace(round=new, non_finite=np.asarray(streak, np.int64)), info

    def assist(self) -> None:
        """What every process but the first does: the part of its own clients in every round; it writes nothing."""
        first, state = self.begin()
        for t in range(first, self.config.rounds):
            state, reporters, _ = self.next_cohort(state, t)
            state, _ = self.advance(state, reporters)
            _require_convergence(state, t)
            if self.must_save(t + 1):
                self.save(t + 1, state)

    def train(self, stop: threading.Event) -> Outcome:
        """Runs, or goes on with, all rounds, and returns the model with its scores on the test clients.

        Args:
          stop: set from outside to end it between two rounds, as Ctrl-C does.
        """
        config, folder = self.config, self.folder
        first, state = self.begin()
        validation = self.data.held_out[: config.evaluation_examples]
        log = record.ParticipationLog(folder)
        bar = progress.bar(
            total=config.rounds, initial=first, what=f"{config.mechanism} {folder.name}", unit="round"
        )
        with (
            metrics.Writer(folder / "metrics.jsonl", resume_at=first) as released,
            metrics.Writer(folder / "operator.jsonl", private=True, resume_at=first) as operator,
            metrics.Writer(folder / "timing.jsonl", private=True, resume_at=first) as timing,
            bar,
        ):
            for t in range(first, config.rounds):
                if stop.is_set():
                    raise KeyboardInterrupt
                began = time.perf_counter()
                state, reporters, failed = self.next_cohort(state, t)
                ids, lost = ([self.data.ids[i] for i in devices] for devices in (reporters, failed))
                if t == 0:
                    self.before_first_round()
                # Before the line is there: an earlier stop's statement does not count it.
                for place in () if log.knows(t) else self.stated_in:
                    statements.withdraw(place)
                log.append(t, ids, failed=lost)
                state, info = self.advance(state, reporters)
                label = {} if self.plan.mechanism else {"covered_by_guarantee": False}
                released.write(round=t, **info.released._asdict(), **label)
                operator.write(round=t, covered_by_guarantee=False, **_operator(info.operator))
                timing.write(round=t, seconds=time.perf_counter() - began)
                _require_convergence(state, t)
                done = t + 1
                if done % config.evaluate_every == 0 or done == config.rounds:
                    self.evaluate(state, validation, t, released, timing)
                if self.must_save(done):
                    for writer in (released, operator, timing):
                        writer.sync()
                    self.save(done, state)
                bar.update()
        log.close()
        params = sharding.local_copy(state.round.params)
        test = evaluate.evaluate(params, self.data.test, self.sizes)
        seconds = sum(line["seconds"] for line in metrics.read(folder / "timing.jsonl"))
        return Outcome(params, test, seconds)

    def next_cohort(self, state: State, t: int) -> tuple[State, list[int], list[int]]:
        """Draws cohorts until the report goal is met: `(state, reporters, other devices that downloaded)`.

        Raises:
          InputError: the goal cannot be met, or the cohort would break what the accountant is told.
        """
        failed, devices = [], state.devices
        for _ in range(MOST_ABANDONED_ATTEMPTS):
            attempt = int(state.attempts)
            devices, cohort = self._select(keys.fold(self.cohort_key, attempt), state.devices, t, attempt)
            state = state._replace(devices=devices, attempts=np.asarray(attempt + 1, np.int64))
            if bool(cohort.breaks_limits):
                raise InputError(
                    f"round {t}: a cohort breaks the limits that the guarantee is stated for "
                    f"(separation {self.plan.min_separation}, {self.plan.max_participations} participations); "
                    "nothing of this round was released"
                )
            chosen, reports = np.asarray(cohort.chosen), np.asarray(cohort.reports)
            failed += chosen[np.asarray(cohort.is_chosen) & ~reports].tolist()
            if bool(cohort.released):
                return state, sorted(chosen[reports].tolist()), sorted(failed)
            self._require_enough(devices, t)
        raise InputError(
            f"round {t + 1}: no cohort of {self.config.report_goal} reported in {MOST_ABANDONED_ATTEMPTS} attempts; "
            f"{self._free(devices, t)[0]} devices are free, so too few of them are available at once or too many "
            "drop out: raise --over-selection, or lower --drop-out or --report-goal"
        )

    def _free(self, devices: participation.State, t: int) -> tuple[int, int, int]:
        """Devices that may be chosen for round t, that wait for their timer, and that had their last turn."""
        spent = np.asarray(devices.count) >= self.plan.max_participations
        waiting = (np.asarray(devices.ready) > t) & ~spent
        return int((~waiting & ~spent).sum()), int(waiting.sum()), int(spent.sum())

    def _require_enough(self, devices: participation.State, t: int) -> None:
        """Stops where no retry can help: timers count released rounds, so an abandoned attempt frees nobody."""
        free, waiting, spent = self._free(devices, t)
        if free < self.config.report_goal:
            b, k = self.plan.min_separation, self.plan.max_participations
            raise InputError(
                f"round {t + 1} can never be filled: {free} devices are free for {self.config.report_goal} places, "
                f"{waiting} wait (a timer of {b} rounds starts at every download, also where the report is lost or cut "
                f"off, and only released rounds advance it), {spent} have taken part {k} times; start again with "
                f"--min-separation below {b}, fewer --rounds, or less --drop-out, --over-selection or --timer-jitter"
            )

    def _select(self, key, devices: participation.State, t: int, attempt: int):
        config = self.config
        available: Any = 1.0
        if config.availability == "diurnal":
            available = participation.diurnal(float(attempt % 24), peak=self.peak_hours)
        return _select(
            key,
            devices,
            jnp.int32(t),
            report_goal=config.report_goal,
            num_chosen=self.plan.selected,
            available=available,
            drop_out=config.drop_out,
            min_separation=self.plan.min_separation,
            max_participations=self.plan.max_participations,
            max_jitter=config.timer_jitter,
        )

    def evaluate(
        self, state: State, examples, t: int, released: metrics.Writer, timing: metrics.Writer
    ) -> None:
        """Writes scores on held-out clients, and what the rounds so far have cost."""
        began = time.perf_counter()
        params = sharding.local_copy(state.round.params)
        scores = evaluate.evaluate(params, examples, self.sizes)
        spent = self.spent(t + 1)
        at = np.array([compose.THRESHOLD])
        shown = compose.measure(params, examples[:COMPLETED_EXAMPLES], self.sizes, thresholds=at)[0]
        released.write(
            round=t,
            evaluation=scores._asdict(),
            smart_compose=shown._asdict(),
            covered_by_guarantee=False,
            **spent,
        )
        timing.write(round=t, seconds=time.perf_counter() - began)

    def spent(self, num_rounds: int) -> dict[str, float | None]:
        """rho and epsilon of the first `num_rounds` rounds, over all schedules within the enforced limits."""
        if self.plan.mechanism is None:
            return {"rho": None, "epsilon": None}
        found = accounting.compose(self.plan.record.mechanisms(num_rounds), delta=self.config.delta)
        return {"rho": found.rho, "epsilon": found.epsilon}


def _mesh(devices: int | None) -> Mesh | None:
    """`devices` of every process; None where one device is all."""
    count = devices or 1
    if count > jax.local_device_count():
        raise InputError(f"--devices {count}: there are {jax.local_device_count()}; lower it")
    if count == jax.process_count() == 1:
        return None
    every = range(jax.process_count())
    return sharding.make_mesh([d for p in every for d in jax.local_devices(process_index=p)[:count]])


def _require_convergence(state: State, t: int) -> None:
    streak = int(state.non_finite)
    if streak >= MOST_NON_FINITE_ROUNDS:
        raise InputError(
            f"round {t + 1}: every update of the last {streak} rounds was NaN or infinite, so training "
            "has diverged; start again with a lower --client-learning-rate or --server-learning-rate"
        )


def _peak_hours(hours: list[np.ndarray] | None) -> Any:
    """The hour of day each device is most often active at; 2 at night where nothing is known."""
    if hours is None:
        return 2.0
    peaks = [np.bincount(h.astype(np.int64), minlength=24).argmax() if len(h) else 2 for h in hours]
    return jnp.asarray(peaks, jnp.float32)


def model_sizes(config: Config, vocabulary: Vocabulary) -> model.ModelConfig:
    """The model that these settings train on this vocabulary."""
    return model.ModelConfig(
        num_tokens=vocabulary.size,
        embedding_size=config.embedding_size,
        hidden_size=config.hidden_size,
        shared_embeddings=config.shared_embeddings,
    )


def server_optimizer(config: Config) -> optax.GradientTransformation:
    """SGD with momentum on the noised mean, its rate falling linearly over the last rounds: post-processing."""
    rate: optax.ScalarOrSchedule = config.server_learning_rate
    if config.server_cooldown:
        rate = optax.linear_schedule(
            rate, 0.0, config.server_cooldown, config.rounds - config.server_cooldown
        )
    return optax.sgd(rate, momentum=config.server_momentum or None)


_select = jax.jit(participation.select, static_argnames=("report_goal", "num_chosen", "max_jitter"))


def _operator(info: Any) -> dict[str, Any]:
    """Sums over clients as means a person can read."""
    usable = max(int(info.num_present) - int(info.num_empty) - int(info.num_non_finite), 1)
    return {
        "num_present": info.num_present,
        "num_empty": info.num_empty,
        "num_non_finite": info.num_non_finite,
        "num_clipped": info.num_clipped,
        "num_examples": info.num_examples,
        "mean_norm": float(info.norm) / usable,
        "training_loss": float(info.metrics["loss"]) / max(float(info.metrics["batches"]), 1.0),
        **(info.encoding or {}),  # of secure aggregation: coordinates clamped, clients who rounded again
    }
