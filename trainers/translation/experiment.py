"""The comparison: a public model, private memories, and ten ways to translate, scored on every domain.

Every trained model is kept in the run folder under a digest of what it was made from, so a killed run
continues where it was, and methods and settings share what they have in common: an epoch of fine-tuning from
the public model is also the first round of FedAvg_1.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import keys, knn, pq
from trainers.common import files, metrics, progress
from trainers.common.errors import InputError
from trainers.common.pairs import Pair
from trainers.translation import (
    batches,
    corpora,
    crypto,
    data,
    datastore,
    dealing,
    decode,
    facts,
    federated,
    layout,
    memory,
    meta_k,
    protocol,
    retrieval,
    scoring,
    train,
)
from trainers.translation import model as models
from trainers.translation.config import Config, ModelConfig

TUNING = 60
"""Validation pairs a domain, at most, that a fixed mixture is tuned on."""


class Test(NamedTuple):
    """A test set: what is translated, what it should be, and which sentences make up its parts, if it has
    any.
    """

    domain: str
    sources: list[np.ndarray]
    references: list[str]
    parts: dict[str, list[int]]


Ways = dict[str, tuple[decode.Stepper, Any]]
"""How each domain is translated: a stepper and its weights."""


class Outcome(NamedTuple):
    """A method's scores in one setting and trial, by domain, and what it cost.

    seconds: of local or central training (0 where none was needed or it was shared).
    tokens_per_second: of decoding, first batches (compilation) included.
    flops: multiply-adds times two of training beyond the public model, all parties together.
    """

    bleu: dict[str, float]
    chrf: dict[str, float]
    tokens_per_second: float
    seconds: float
    flops: float
    bytes_up: int
    bytes_down: int


def sample(pairs: Sequence[Pair], most: int) -> list[Pair]:
    """At most so many pairs, always the same ones and not the head of a sorted file; 0 takes all."""
    if not most or len(pairs) <= most:
        return list(pairs)
    return sorted(pairs, key=lambda p: corpora.hashed(p.source))[:most]


class Bench:
    """One run's public model, memories and caches."""

    def __init__(self, config: Config, read: corpora.Corpora, run_dir: pathlib.Path):
        self.config, self.read, self.run_dir = config, read, run_dir
        self.cache = run_dir / "cache"
        self.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.cache.chmod(0o700)  # models trained on private text
        for folder in (run_dir, run_dir / "public", self.cache):
            files.sweep(folder)
        self.model = self._public_model()
        self.graphdef, self.params = self.model.graphdef, self.model.params
        vocabulary = self.model.vocabulary
        self.examples = {
            d: vocabulary.examples(sample(s.train, config.client_pairs)) for d, s in read.clients.items()
        }
        self.server_examples = vocabulary.examples(read.server.train)
        self.tests = self._tests()
        self.entries: dict[str, retrieval.Entries] = {}
        self.codebook: Any = None
        self.meta: knn.MetaK | None = None
        self.temperature = 1.0

    # The public model.

    def _public_model(self) -> data.Model:
        c = self.config
        if c.public_model is not None:
            return data.load(c.public_model)
        folder = self.run_dir / "public"
        if (folder / data.FACTS).exists():
            return data.load(folder)
        pairs = self.read.server.train
        vocabulary = data.train_vocabulary((side for p in pairs for side in p[:2]), c.vocabulary_size)
        shape = ModelConfig(
            vocabulary_size=len(vocabulary),
            dim=c.dim,
            ffn_dim=4 * c.dim,
            encoder_layers=c.encoder_layers,
            decoder_layers=c.decoder_layers,
            key=c.key,
        )
        graphdef, params = models.init(shape, keys.stream(keys.root(c.seed), "translation-model"))
        schedule = train.Schedule(
            updates=c.updates,
            learning_rate=c.learning_rate,
            warmup=min(100, max(1, c.updates // 5)),
            constant=True,
            cooldown=c.updates // 2,
            batch_tokens=c.batch_tokens,
            max_length=c.max_length,
            average=0.99,
        )
        params, info = train.fit(
            graphdef,
            params,
            vocabulary.examples(pairs),
            schedule=schedule,
            seed=c.seed,
            folder=folder / "checkpoints",
            what="public model",
        )
        made = data.make(shape, params, vocabulary)
        data.save_trained_on(folder, corpora.side_digests(pairs))
        data.save(folder, made, updates=info.updates, tokens=info.tokens, losses=info.losses)
        return made

    def _tests(self) -> list[Test]:
        sets: dict[str, list[Pair]] = {corpora.GENERAL: self.read.server.test}
        sets |= {d: s.test for d, s in self.read.clients.items()}
        most, out = self.config.test_sentences, []
        for domain, pairs in sets.items():
            pairs = sample(pairs, most)
            sources = self.model.vocabulary.encode(p.source for p in pairs)
            decode.check_lengths(sources, f"{domain}: test sentence")
            names = sorted({p.sub for p in pairs}) if domain != corpora.GENERAL else []
            parts = {n: [i for i, p in enumerate(pairs) if p.sub == n] for n in names}
            parts = parts if 1 < len(parts) <= 4 else {}
            out.append(Test(domain, sources, [p.target for p in pairs], parts))
        return out

    @property
    def domains(self) -> list[str]:
        return list(self.read.clients)

    # Memories.

    def memory(self, domain: str) -> retrieval.Entries:
        """The uncompressed records of a domain's train pairs, computed once."""
        if domain not in self.entries:
            self.entries[domain] = retrieval.all_entries(self.graphdef, self.params, self.examples[domain])
        return self.entries[domain]

    def prepare(self) -> None:
        """Fits the K-encryption on public keys and the Meta-k network on public held-out pairs."""
        if self.meta is not None:
            return
        c, vocabulary = self.config, self.model.vocabulary
        root = keys.root(c.seed)
        rng = np.random.default_rng([c.seed, 11])
        seen = [self.server_examples[i] for i in rng.permutation(len(self.server_examples))[:8000]]
        public_memory = retrieval.all_entries(
            self.graphdef, self.params, vocabulary.examples(self.read.memory)
        )
        sample = retrieval.all_entries(self.graphdef, self.params, seen).keys
        sample = np.concatenate([sample, public_memory.keys])
        sample = sample[rng.permutation(len(sample))[:65_536]]
        if c.key_encryption == "pq":
            self.codebook = jax.jit(pq.fit, static_argnames=("num_subspaces", "num_centroids"))(
                keys.stream(root, "translation-codebook"),
                jnp.asarray(sample),
                num_subspaces=c.subspaces,
                num_centroids=min(256, len(sample)),
            )
        elif c.key_encryption == "pca":
            self.codebook = pq.fit_pca(jnp.asarray(sample), num_components=c.subspaces)
        public = self.run_dir / "public"
        public.mkdir(exist_ok=True)
        if self.codebook is not None:
            datastore.save_codebook(public / "codebook.npz", self.codebook, self.model.digest)
        place = public / meta_k.NAMES["records"]
        if not place.exists():
            positions = meta_k.look(
                self.graphdef,
                self.params,
                memory.searchable(self.coded(public_memory), c.search, components=c.shadow),
                vocabulary.examples(self.read.questions),
                config=self.retrieval(),
            )
            meta, heat, _ = meta_k.fit_with_temperature(keys.stream(root, "translation-meta"), positions)
            meta_k.save(place, meta, heat, model=self.model.digest, kind="records")
        # One that names no model is of an earlier version, and this run's own.
        self.meta, self.temperature = meta_k.load(place, model=self.model.digest, kind="records", notes=[])

    def coded(self, entries: retrieval.Entries) -> datastore.Datastore:
        """These records after K-encryption."""
        return memory.coded(self.model, self.codebook, entries.keys, entries.values)

    def searchable(self, store: datastore.Datastore) -> Any:
        """A memory as `retrieval.find` takes it, searched as the settings say; of everybody's size."""
        rows = sum(len(e.target) + 1 for own in self.examples.values() for e in own)
        return memory.searchable(store, self.config.search, components=self.config.shadow, rows=rows)

    def store(self, parts: Sequence[retrieval.Entries]) -> Any:
        """What somebody searches who holds all parts, without the protocol."""
        return self.searchable(self.coded(join(parts)))

    def exchange(
        self, clients: Sequence[federated.Client], parts: Sequence[retrieval.Entries]
    ) -> tuple[Any, protocol.Traffic]:
        """The joint memory as a member has it after sealing, shuffling and opening, and the bytes of it."""
        stores = {client.name: self.coded(own) for client, own in zip(clients, parts)}
        with files.scratch_folder(self.run_dir, "exchange") as folder:
            quota = max(len(own.values) for own in parts)
            joint, traffic = protocol.simulate(folder, stores, self.codebook, quota=quota)
            return self.searchable(joint), traffic

    def retrieval(self, mixing: Literal["adaptive", "fixed"] = "adaptive") -> retrieval.Retrieval:
        c = self.config
        return retrieval.Retrieval(k=c.k, mixing=mixing, gate=c.gate, candidates=max(64, c.k))

    def fixed(self, store: Any) -> retrieval.Weights:
        """A fixed mixture for this memory, tuned on everybody's validation pairs, pooled."""
        sets = [self.read.server, *self.read.clients.values()]
        pooled = [
            p for s in sets for p in sorted(s.validation, key=lambda p: corpora.hashed(p.source))[:TUNING]
        ]
        if not pooled:
            raise InputError("fednn_fixed needs validation pairs to tune its weight on")
        examples = self.model.vocabulary.examples(pooled)
        positions = meta_k.look(self.graphdef, self.params, store, examples, config=self.retrieval())
        heat, weight = meta_k.tune_fixed(positions)
        return retrieval.Weights(self.params, store, jnp.float32(heat), weight=jnp.float32(weight))

    def weights(self, store: Any) -> retrieval.Weights:
        return retrieval.Weights(self.params, store, jnp.float32(self.temperature), meta=self.meta)

    # Training.

    def _digest(self, *parts: Any) -> str:
        record = json.dumps(metrics.plain(parts), default=str, sort_keys=True)
        return files.digest_of(self.model.digest, record)[:20]

    def local_schedule(self) -> train.Schedule:
        return train.Schedule(
            updates=1_000_000,
            epochs=1,
            learning_rate=self.config.local_learning_rate,
            warmup=1,
            constant=True,
            batch_tokens=self.config.batch_tokens,
            max_length=self.config.max_length,
            concatenate=0.0,
            average=0.0,
        )

    def local_epoch(self, params: Any, examples: Sequence[batches.Example], seed: int, what: str) -> Any:
        """One epoch from `params`, kept in the cache under a digest of start, pairs and settings."""
        schedule = self.local_schedule()
        start = files.digest_of(*(np.asarray(x).tobytes() for x in jax.tree.leaves(params)))
        pairs = files.digest_of(*(side.tobytes() for e in examples for side in e))
        name = self._digest("epoch", start, pairs, seed, dataclasses.asdict(schedule))
        place = self.cache / f"model-{name}.npz"
        if place.exists():
            return data.load_params(place, params)
        folder = self.cache / f"training-{name}"
        out, _ = train.fit(
            self.graphdef, params, examples, schedule=schedule, seed=seed, folder=folder, what=what
        )
        data.save_params(place, out, permissions=0o600)
        shutil.rmtree(folder, ignore_errors=True)
        return out

    def fine_tune(self, client: federated.Client, trial: int) -> Any:
        params = self.params
        for epoch in range(self.config.epochs):
            seed = trial_seed(self.config.seed, trial, epoch)
            params = self.local_epoch(params, client.examples, seed, f"{client.name}, epoch {epoch + 1}")
        return params

    def server_client(self, trial: int, number: int) -> federated.Client:
        """The server as a party: its weight is all its pairs, an epoch of it a fresh sample."""
        rng = np.random.default_rng([self.config.seed, trial, number, 13])
        chosen = rng.permutation(len(self.server_examples))[: self.config.server_sample]
        return federated.Client(
            corpora.GENERAL, [self.server_examples[i] for i in chosen], len(self.server_examples)
        )

    def central(self, clients: Sequence[federated.Client], trial: int) -> Any:
        """C-NMT: the public model trained on, on everybody's pairs and a fresh sample of the server's an
        epoch.
        """
        params = self.params
        for epoch in range(self.config.epochs):
            joined = [e for c in clients for e in c.examples] + list(
                self.server_client(trial, epoch).examples
            )
            seed = trial_seed(self.config.seed, trial, epoch)
            params = self.local_epoch(params, joined, seed, f"all pairs together, epoch {epoch + 1}")
        return params

    def averaged(self, clients: Sequence[federated.Client], trial: int, *, often: bool, server: bool) -> Any:
        """FedAvg_1 (an average after every epoch) or FedAvg_inf (one at the end)."""
        epochs = self.config.epochs
        params = self.params
        for number in range(epochs if often else 1):
            local, weights = [], []
            for client in [*clients, *([self.server_client(trial, number)] if server else [])]:
                own = params
                for epoch in [number] if often else range(epochs):
                    if client.name == corpora.GENERAL:
                        client = self.server_client(trial, epoch)
                    seed = trial_seed(self.config.seed, trial, epoch)
                    own = self.local_epoch(own, client.examples, seed, f"{client.name}, epoch {epoch + 1}")
                local.append(own)
                weights.append(client.weight)
            params = federated.average(local, weights)
        return params

    # Scores.

    def translate(self, stepper: decode.Stepper, weights: Any, test: Test, bar: Any) -> tuple[list[str], int]:
        """Translations of a test set, and the number of pieces produced."""
        found = decode.search(
            stepper,
            weights,
            test.sources,
            beams=self.config.beams,
            length_penalty=self.config.length_penalty,
            progress=bar.update,
        )
        return self.model.vocabulary.decode(h.pieces for h in found), sum(len(h.pieces) + 1 for h in found)

    def judge(self, what: str, ways: Ways) -> tuple[dict[str, float], dict[str, float], float]:
        """`(bleu, chrf, tokens a CPU second)` on every domain, and part of one, that there is a way for."""
        bleu, chrf, pieces, seconds = {}, {}, 0, 0.0
        tests = [t for t in self.tests if t.domain in ways]
        with progress.bar(total=sum(len(t.sources) for t in tests), what=what, unit="sentence") as bar:
            for test in tests:
                start = time.process_time()
                hypotheses, count = self.translate(*ways[test.domain], test, bar)
                seconds += time.process_time() - start
                pieces += count
                everything = {test.domain: list(range(len(hypotheses)))}
                everything |= {f"{test.domain}/{name}": rows for name, rows in test.parts.items()}
                for name, rows in everything.items():
                    scores = scoring.score([hypotheses[i] for i in rows], [test.references[i] for i in rows])
                    bleu[name], chrf[name] = scores.bleu, scores.chrf
        return bleu, chrf, pieces / max(seconds, 1e-9)


def trial_seed(seed: int, trial: int, epoch: int) -> int:
    """A seed of its own for every trial and epoch."""
    return int(np.random.SeedSequence([seed, trial, epoch]).generate_state(1)[0])


def join(parts: Sequence[retrieval.Entries]) -> retrieval.Entries:
    """All records of these parts, in order."""
    return retrieval.Entries(*(np.concatenate(column) for column in zip(*parts)))


def share_entries(bench: Bench, share: dealing.Share) -> retrieval.Entries:
    """The records of a client's pairs, taken from those of its domains."""
    out = []
    for domain in bench.domains:
        chosen = np.array([i for d, i in share.members if d == domain], np.int64)
        entries = bench.memory(domain)
        rows = np.isin(entries.sentences, chosen)
        out.append(retrieval.Entries(*(column[rows] for column in entries)))
    return join(out)


def record_bytes(bench: Bench) -> int:
    """Bytes of one sealed record."""
    return layout.record_bytes(facts.facts_of(bench.model, bench.codebook)) + crypto.OVERHEAD


def run_setting(bench: Bench, setting: str, trial: int, method: str) -> Outcome:
    """One method in one setting and trial."""
    c = bench.config
    sizes = {d: len(e) for d, e in bench.examples.items()}
    shares = dealing.deal(setting, sizes, seed=trial_seed(c.seed, trial, 0))
    clients = [
        federated.Client(s.name, [bench.examples[d][i] for d, i in s.members], len(s.members)) for s in shares
    ]
    plain = decode.plain(bench.graphdef)
    size = models.num_parameters(bench.params)
    model_bytes = 4 * size
    private = sum(len(e.target) + 1 for client in clients for e in client.examples)
    sampled = (
        c.server_sample * sum(len(e.target) + 1 for e in bench.server_examples) / len(bench.server_examples)
    )
    start = time.process_time()
    up = down = 0
    work = 0.0
    everywhere = [corpora.GENERAL, *bench.domains]
    if method == "p_nmt":
        ways: Ways = dict.fromkeys(everywhere, (plain, bench.params))
    elif method == "c_nmt":
        ways = dict.fromkeys(everywhere, (plain, bench.central(clients, trial)))
        work = 6.0 * size * (private + sampled) * c.epochs
    elif method.startswith("fedavg"):
        often, server = "_1" in method, method.endswith("server")
        ways = dict.fromkeys(everywhere, (plain, bench.averaged(clients, trial, often=often, server=server)))
        rounds = c.epochs if often else 1
        up = down = rounds * len(clients) * model_bytes
        work = 6.0 * size * (private + sampled * server) * c.epochs
    elif method in ("ft", "ft_ensemble"):
        own = [bench.fine_tune(client, trial) for client in clients]
        work = 6.0 * size * private * c.epochs
        if method == "ft_ensemble":
            up, down = len(clients) * model_bytes, len(clients) ** 2 * model_bytes
            ways = dict.fromkeys(everywhere, (decode.ensemble(bench.graphdef), federated.stack(own)))
        else:  # personalised: a domain is translated by its first client
            ways = {s.domain: (plain, params) for s, params in reversed(list(zip(shares, own)))}
    else:
        bench.prepare()
        mine = [share_entries(bench, s) for s in shares]
        work = 2.0 * size * private
        stepper = retrieval.stepper(bench.graphdef, bench.retrieval())
        if method == "ak_mt":
            ways = {
                share.domain: (stepper, bench.weights(bench.store([own])))
                for share, own in reversed(list(zip(shares, mine)))
            }
        else:
            store, traffic = bench.exchange(clients, mine)
            up, down = sum(traffic.up.values()), len(clients) * traffic.down
            if method == "fednn":
                ways = dict.fromkeys(everywhere, (stepper, bench.weights(store)))
            else:
                stepper = retrieval.stepper(bench.graphdef, bench.retrieval("fixed"))
                ways = dict.fromkeys(everywhere, (stepper, bench.fixed(store)))
    seconds = time.process_time() - start
    bleu, chrf, speed = bench.judge(f"{setting} {method}", ways)
    return Outcome(bleu, chrf, speed, seconds, work, up, down)
