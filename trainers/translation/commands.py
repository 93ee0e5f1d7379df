"""The roles of the protocol as commands with files between them, and translation with a memory."""

from __future__ import annotations

import pathlib
import shutil
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro

from accounting import PrivacyStatement
from jaxpriv import pq
from trainers.common import entropy, files, parallel_text, progress
from trainers.common.errors import InputError
from trainers.translation import (
    corpora,
    crypto,
    data,
    datastore,
    decode,
    facts,
    memory,
    meta_k,
    protocol,
    release,
    report,
    retrieval,
    session,
)
from trainers.translation import model as models
from trainers.translation.config import Required, RequiredMany
from trainers.translation.leakage import AttackConfig, run_attack
from trainers.translation.private_memory import PrivateConfig, run_release, weighted_store
from trainers.translation.transfer import TransferConfig, run_transfer

__all__ = ["run_attack", "run_release", "run_transfer"]
Result = tuple[dict[str, Any], str]
NOTHING = report.GUARANTEE["fednn"]


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Complete and print the comparison of a run folder."""

    run_dir: str = "runs/translation"
    """Folder that `train` wrote."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_evaluate(config: EvaluateConfig) -> Result:
    return session.evaluate(config.run_dir)


@dataclass(frozen=True, kw_only=True)
class TranslateConfig:
    """Translate lines of text: line n of the output answers line n, blank lines stay blank."""

    model: str = "runs/translation/public"
    """Folder of the public model."""
    input: Required = ""
    """File of lines to translate (UTF-8)."""
    output: str | None = None
    """File for the translations; without it they are printed."""
    store: str | None = None
    """A memory to ask (folder of `store` or `open`)."""
    meta: str = "runs/translation/public/meta_k.npz"
    """The Meta-k network, with --store and --mixing adaptive."""
    mixing: Literal["adaptive", "fixed"] = "adaptive"
    """Let the network weigh the memory, or use --weight."""
    weight: float = 0.5
    """Weight of the memory with --mixing fixed (0 to 1)."""
    temperature: float = 10.0
    """Of the neighbours' kernel with --mixing fixed; squared distance that costs a factor e."""
    k: int = 8
    """Neighbours a step with --mixing fixed (adaptive: as the network was trained)."""
    gate: float = 1.0
    """The memory is asked only where the model's best piece has a probability below this."""
    search: Literal["exact", "inverted", "shadow", "faiss"] = "shadow"
    """How the memory is searched: every record; the blocks of records nearest to the query; every record in few
    components, the nearest ones exactly; or the nearest cells of FAISS's inverted file (needs faiss-cpu)."""
    shadow: int = 32
    """Components of the first pass with --search shadow."""
    beams: int = 1
    """Beam width; 1 is greedy."""
    length_penalty: float = 1.0
    """Exponent of the length in a hypothesis' score (beam search)."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_translate(config: TranslateConfig) -> Result:
    """Translates a file; returns counts and speed."""
    if not config.input:
        raise InputError("--input FILE is needed: the lines to translate")
    if config.beams < 1:
        raise InputError(f"--beams must be at least 1, got {config.beams}")
    if not 0 <= config.weight <= 1:
        raise InputError(f"--weight must be in [0, 1], got {config.weight}")
    if not config.temperature > 0:
        raise InputError(f"--temperature must be positive, got {config.temperature}")
    lines = parallel_text.read_lines(config.input)
    model = data.load(config.model)
    stepper, weights = _way(config, model)
    sources = model.vocabulary.encode(lines)
    start = time.process_time()
    with progress.bar(total=sum(len(s) > 0 for s in sources), what="translating", unit="line") as bar:
        found = decode.search(
            stepper,
            weights,
            sources,
            beams=config.beams,
            length_penalty=config.length_penalty,
            progress=bar.update,
        )
    seconds = time.process_time() - start
    texts = model.vocabulary.decode(h.pieces for h in found)
    pieces = sum(len(h.pieces) + 1 for h in found)
    result = {"lines": len(lines), "pieces": pieces, "pieces_per_cpu_second": pieces / max(seconds, 1e-9)}
    if config.output is not None:
        with files.atomic_write(config.output) as file:
            file.writelines(text + "\n" for text in texts)
        return {**result, "output": config.output}, f"{len(lines)} lines translated to {config.output}"
    return {**result, "translations": texts}, "\n".join(texts)


def _way(config: TranslateConfig, model: data.Model) -> tuple[decode.Stepper, Any]:
    if config.store is None:
        return decode.plain(model.graphdef), model.params
    opened = datastore.open_store(config.store, model=model.digest)
    k, heat, meta, weight = config.k, config.temperature, None, None
    if config.mixing == "adaptive":
        meta, heat = meta_k.load(config.meta)
        k = meta.hidden_weights.shape[0] // 2
    else:
        weight = jnp.float32(config.weight)
    if opened.weights is not None:
        if not isinstance(opened.codebook, pq.Codebook):
            raise InputError(f"{config.store} has weights but no cells; write it with store --epsilon")
        shown = release.Histogram(opened.keys, opened.values, opened.weights)
        store: Any = weighted_store(opened.codebook, [shown], heat)
    else:
        store = memory.searchable(opened, config.search, components=config.shadow)
    how = retrieval.Retrieval(k=k, mixing=config.mixing, gate=config.gate, candidates=max(64, k))
    weights = retrieval.Weights(model.params, store, jnp.float32(heat), meta=meta, weight=weight)
    return retrieval.stepper(model.graphdef, how), weights


@dataclass(frozen=True, kw_only=True)
class KeygenConfig:
    """Make a member's keys; or, with --round, a round: a fresh data key, wrapped for every member.

    A round is made by a member, never by the server, which would hold its key.
    """

    name: Annotated[str, tyro.conf.arg(help_behavior_hint="(required without --round)")] = ""
    """The member's name."""
    out: str = "."
    """Folder for NAME.secret.json (keep it) and NAME.public.json (give it to the other members)."""
    round: str | None = None
    """Round file to write. Needs --secret, --members, --model, --codebook."""
    secret: Annotated[str, tyro.conf.arg(help_behavior_hint="(required with --round)")] = ""
    """The maker's private key file."""
    members: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(required with --round)")] = ()
    """Public key files of all members, the maker's own among them."""
    model: str = "runs/translation/public"
    """Folder of the public model that all members use."""
    codebook: str | None = None
    """The server's codebook (public/codebook.npz of a run); none sends keys as they are."""
    weighted: bool = False
    """Records are buckets with noisy counts (`store --epsilon`)."""
    quota: int = 2_000_000
    """Records a member may send at most."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_keygen(config: KeygenConfig) -> Result:
    if config.round is None:
        if not config.name:
            raise InputError("--name is needed: the member's name")
        folder = pathlib.Path(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        secret = crypto.generate(config.name)
        stem = folder / config.name
        crypto.save_secret(f"{stem}.secret.json", secret)
        crypto.save_public(f"{stem}.public.json", secret.public())
        print_id = secret.public().fingerprint()
        text = f"{stem}.secret.json (private) and {stem}.public.json; fingerprint {print_id}"
        return {"public": f"{stem}.public.json", "fingerprint": print_id}, text
    if config.quota < 1:
        raise InputError(f"--quota must be at least 1, got {config.quota}")
    model = data.load(config.model)
    codebook = None if config.codebook is None else datastore.load_codebook(config.codebook)
    members = [crypto.load_public(path) for path in config.members]
    form = facts.facts_of(model, codebook, weighted=config.weighted)
    secret = crypto.load_secret(config.secret)
    made = protocol.make_round(config.round, secret, members, form, quota=config.quota)
    result = {"round": made.id, "members": [m.name for m in members], "file": config.round}
    return result, f"round {made.id} for {', '.join(m.name for m in members)}: {config.round}"


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Client: turn private pairs into a memory of coded keys and true next pieces."""

    model: str = "runs/translation/public"
    """Folder of the public model."""
    codebook: str | None = None
    """The server's codebook; none keeps keys as they are."""
    data: Required = ""
    """Private pairs: FILE or FILE:sub=a,b; its train part."""
    source_field: str = "en"
    """Field (or language) of the source side."""
    target_field: str = "de"
    """Field (or language) of the target side."""
    out: Required = ""
    """Folder for the memory."""
    min_sentences: int = 1
    """Keep only records whose value occurs in so many of these sentences; a habit, no guarantee."""
    opt_out: str | None = None
    """File of source sentences, one a line, whose pairs stay out of the memory and of that count."""
    epsilon: float | None = None
    """Instead of records: a noisy histogram with this epsilon for every sentence pair. Needs --delta, --adjacency
    and a --codebook of cells (public/cells.npz, which `release` writes)."""
    delta: float | None = None
    """With --epsilon: well below one in the number of pairs."""
    adjacency: Annotated[
        Literal["", "add-remove", "replace-one"],
        tyro.conf.arg(help_behavior_hint="(required with --epsilon)"),
    ] = ""
    """With --epsilon: a pair more or less, or one exchanged."""
    max_buckets: int = 16
    """With --epsilon: (cell, value) buckets that a pair fills at most."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_store(config: StoreConfig) -> Result:
    if not config.data or not config.out:
        raise InputError("--data FILE and --out FOLDER are needed")
    if config.min_sentences < 1:
        raise InputError(f"--min-sentences must be at least 1, got {config.min_sentences}")
    model = data.load(config.model)
    codebook = None if config.codebook is None else datastore.load_codebook(config.codebook)
    path, subs = corpora.parse_source(config.data)
    splits, notes = parallel_text.read_pair_splits(
        path, source_field=config.source_field, target_field=config.target_field, sub=subs
    )
    out = set() if config.opt_out is None else {x.strip() for x in parallel_text.read_lines(config.opt_out)}
    pairs = [p for p in splits.train if p.source.strip() not in out]
    examples = model.vocabulary.examples(pairs)
    if config.epsilon is None:
        said = NOTHING
        count = write_store(config.out, model, codebook, examples, min_sentences=config.min_sentences)
    else:
        count, statement = write_histogram(config, config.epsilon, model, codebook, examples)
        said = statement.sentence
    result = {"pairs": len(pairs), "records": count, "folder": config.out, "guarantee": said}
    result["left_out"] = len(splits.train) - len(pairs)
    noted = "".join(f"note: {line}\n" for line in notes)
    left = f", {result['left_out']} pairs left out" if out else ""
    return result, f"{noted}{count} records of {len(pairs)} pairs in {config.out}{left}. {said}"


def write_histogram(
    config: StoreConfig, epsilon: float, model, codebook, examples
) -> tuple[int, PrivacyStatement]:
    """Writes the noisy histogram of these pairs as a weighted memory; returns its buckets and its guarantee."""
    if config.delta is None or not 0 < config.delta < 1:
        raise InputError(
            "--delta is needed with --epsilon, between 0 and 1: well below one in the number of pairs"
        )
    if not config.adjacency:
        raise InputError("--adjacency is needed with --epsilon: add-remove or replace-one")
    if not 0 < epsilon < float("inf"):
        raise InputError(f"--epsilon must be positive, got {epsilon}")
    if config.max_buckets < 1:
        raise InputError(f"--max-buckets must be at least 1, got {config.max_buckets}")
    if not isinstance(codebook, pq.Codebook):
        raise InputError("--epsilon needs a --codebook of cells: public/cells.npz, which `release` writes")
    settings = release.calibrate(
        epsilon=epsilon,
        delta=config.delta,
        max_buckets=config.max_buckets,
        unit="sentence",
        adjacency=config.adjacency,
    )
    form = facts.facts_of(model, codebook, weighted=True)
    found = retrieval.all_entries(model.graphdef, model.params, examples)
    cells = datastore.encode(form, codebook, found.keys)
    counted = release.histogram(
        cells, found.values, found.sentences, max_buckets=config.max_buckets, unit="sentence"
    )
    shown = release.release(entropy.key_from_words(entropy.secret_words()), counted, settings)
    statement = release.statement(settings, delta=config.delta)
    target = datastore.create(config.out, form, codebook)
    datastore.append(target, form, keys=shown.cells, values=shown.values, weights=shown.counts)
    with files.atomic_write(target / "privacy.json") as file:
        file.write(statement.json())
    return len(shown.counts), statement


def write_store(
    folder: files.PathLike, model: data.Model, codebook, examples, *, min_sentences: int = 1
) -> int:
    """Writes the memory of these pairs and returns its number of records; values in fewer than `min_sentences` of
    them stay out.
    """
    target = pathlib.Path(folder)
    form = facts.facts_of(model, codebook)
    values = [np.unique([*e.target, models.END]) for e in examples]
    counts = np.bincount(np.concatenate([*values, np.zeros(0, int)]), minlength=form.vocabulary_size)
    datastore.create(target, form, codebook)
    count = 0
    try:
        with progress.bar(total=len(examples), what="memory", unit="pair") as bar:
            for part in retrieval.entries(model.graphdef, model.params, examples):
                keep = counts[part.values] >= min_sentences
                coded = datastore.encode(form, codebook, part.keys[keep])
                count = datastore.append(target, form, keys=coded, values=part.values[keep])
                bar.update(len(np.unique(part.sentences)))
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)  # a part of a memory would look like a whole one
        raise
    return count


@dataclass(frozen=True, kw_only=True)
class ShareConfig:
    """Client: seal a memory, record by record, and sign the upload."""

    round: Required = ""
    """Round file, from its maker."""
    secret: Required = ""
    """One's own private key file."""
    members: RequiredMany = ()
    """Public key files of the other members, from themselves (compare fingerprints)."""
    store: Required = ""
    """Folder of the memory."""
    out: Required = ""
    """Upload to write."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_share(config: ShareConfig) -> Result:
    made, secret, key = _joined(config)
    if not config.out:
        raise InputError("--out FILE is needed: the upload to write")
    store = datastore.open_store(config.store, facts=made.facts)
    said = protocol.share(config.out, made, key, secret, store)
    return _told(said, config.out, "records sealed", "up")


def _joined(config) -> tuple[protocol.Round, crypto.Secret, bytes]:
    for name in ("round", "secret"):
        if not getattr(config, name):
            raise InputError(f"--{name} FILE is needed")
    made, secret = protocol.read_round(config.round), crypto.load_secret(config.secret)
    return made, secret, protocol.join(made, secret, [crypto.load_public(p) for p in config.members])


def _told(said: protocol.Report, place: str, what: str, way: str) -> Result:
    result = {
        "records": said.accepted,
        "refused": said.refused,
        "details": list(said.details),
        f"bytes_{way}": said.bytes_written if way == "up" else said.bytes_read,
        "file": place,
        "guarantee": NOTHING,
    }
    lines = [f"{said.accepted} {what}: {place}", *(f"refused or missing: {line}" for line in said.details)]
    return result, "\n".join([*lines, NOTHING])


@dataclass(frozen=True, kw_only=True)
class ShuffleConfig:
    """Server: check the uploads, join them, and write their records in random order, without reading them."""

    round: Required = ""
    """Round file."""
    uploads: RequiredMany = ()
    """The members' uploads."""
    out: Required = ""
    """File to write, for every member."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_shuffle(config: ShuffleConfig) -> Result:
    if not config.round or not config.uploads or not config.out:
        raise InputError("--round FILE, --uploads FILE ... and --out FILE are needed")
    said = protocol.shuffle(config.out, protocol.read_round(config.round), config.uploads)
    return _told(said, config.out, "records shuffled", "up")


@dataclass(frozen=True, kw_only=True)
class OpenConfig:
    """Client: open what the server sent and save the joint memory."""

    round: Required = ""
    """Round file, from its maker."""
    secret: Required = ""
    """One's own private key file."""
    members: RequiredMany = ()
    """Public key files of the other members."""
    shuffled: Required = ""
    """File from the server."""
    codebook: str | None = None
    """The server's codebook."""
    own_upload: str | None = None
    """One's own upload, to count records that the server left out."""
    out: Required = ""
    """Folder for the joint memory."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_open(config: OpenConfig) -> Result:
    made, _, key = _joined(config)
    if not config.shuffled or not config.out:
        raise InputError("--shuffled FILE and --out FOLDER are needed")
    codebook = None if config.codebook is None else datastore.load_codebook(config.codebook)
    said = protocol.open_shuffled(
        config.out, made, key, config.shuffled, codebook, own_upload=config.own_upload
    )
    return _told(said, config.out, "records opened", "down")


CONFIGS = {
    "evaluate": EvaluateConfig,
    "translate": TranslateConfig,
    "keygen": KeygenConfig,
    "store": StoreConfig,
    "share": ShareConfig,
    "shuffle": ShuffleConfig,
    "open": OpenConfig,
    "attack": AttackConfig,
    "release": PrivateConfig,
    "transfer": TransferConfig,
}
