"""Release: private embeddings of documents to parquet, the guarantee in words and JSON, the budget counted."""

import collections
import dataclasses
import hashlib
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import accounting
from jaxpriv import keys, selection
from trainers.common import entropy, files, statements
from trainers.common.errors import InputError
from trainers.common.wording import counted
from trainers.documents import choices, data, methods, overlap, preparation, store
from trainers.documents import ledger as ledgers
from trainers.documents.config import ReleaseConfig
from trainers.documents.public import unit


def release(config: ReleaseConfig) -> dict[str, Any]:
    """Releases every document once and returns `output`, `guarantee`, `method` and counts.

    The ledger is written before the embeddings: a release that is interrupted in between has been paid for.

    Raises:
      InputError: a document was released before and --allow-repeats is not given; the method was not fitted; the
        documents are those of the fit.
    """
    started = time.monotonic()
    preparation.check_epsilon(config.epsilon, "--epsilon")
    entropy.check_insecure_seed(config.insecure_noise_seed)
    output, folder = pathlib.Path(config.output), pathlib.Path(config.run_dir)
    place = pathlib.Path(config.ledger or folder / "ledger.json")
    check_places(output, place, folder, config.data)
    fitted = store.load(folder)
    changed = {"devices": config.devices} | ({"selection": config.selection} if config.selection else {})
    fitted = fitted._replace(config=dataclasses.replace(fitted.config, **changed))
    name, chosen, chosen_at = choice(fitted, config)
    documents = data.read_private(config.data)
    shared = overlap.require_private(
        documents, fitted.sentences, splitter=fitted.config.splitter, what=str(folder)
    )
    encoder = preparation.open_encoder(fitted.config.encoder)
    if encoder.digest != fitted.encoder:
        raise InputError(
            f"encoder {encoder.name} is not the one that {folder} was fitted with; use the same or fit again"
        )
    encoded = data.encode(
        documents,
        encoder,
        splitter=fitted.config.splitter,
        classes=fitted.train.classes,
        keep=False,  # embeddings of private sentences tell of them: they stay in memory
    )
    method = methods.build(
        dataclasses.replace(fitted.config, methods=(name,)), fitted.public, fitted.train, fitted.validation
    )[name]
    if unknown := {chosen.overall, *chosen.by_length} - {*method.variants}:
        raise InputError(
            f"fitted folder {folder} is damaged ({name} has no variant {min(unknown)!r}); fit again"
        )
    method.check(config.epsilon, encoded, "--epsilon")
    with ledgers.opened(place, fitted.config.splitter) as ledger:
        whose = list(zip(documents.ids, documents.texts))
        before = [ledger.spent(*one) for one in whose]
        # A document without sentences releases nothing of itself: it neither spends nor tells what was spent.
        speaking = np.flatnonzero(encoded.counts).tolist()
        seen: set[str] = set()  # texts of this call
        again = []
        for i in speaking:
            texts = ledger.names(*whose[i])[1:]
            if before[i] or not seen.isdisjoint(texts):
                again.append(documents.ids[i])
            seen.update(texts)
        if again and not config.allow_repeats:
            raise InputError(
                f"{len(again)} of {counted(len(documents.ids), 'document')}: released before, or with the "
                f"text of another one here (first: {again[0]!r}); a second release adds its "
                "epsilon to theirs: give --allow-repeats to spend it, or leave them out"
            )
        key_rows = document_keys(config, documents.ids, [len(entries) for entries in before])
        released = release_all(method, encoded, key_rows, config.epsilon, chosen)
        sampler = fitted.config.selection if method.draws else ""
        entry = ledgers.Entry(config.epsilon, name, sampler, config.insecure_noise_seed is not None)
        for i in speaking:
            ledger.add(*whose[i], entry)
        after = [ledger.spent(*whose[i]) for i in speaking] or [[entry]]
        ledger.write()
        statement = state(config, fitted, method, encoded, after)
        # The statement first: if a kill comes between, the one beside older embeddings says too much, not too little.
        statements.write(statement, output)
        write(output, encoded, released, fitted, method, chosen)
    return {
        "output": str(output),
        "method": name,
        "variant": chosen.overall,
        "variants": {v: len(rows) for v, rows in chosen.parts(encoded.counts)},
        "chosen_at": chosen_at,
        "epsilon": config.epsilon,
        "documents": len(documents.ids),
        "without_sentences": int(np.sum(encoded.counts == 0)),
        "ids_without_sentences": [documents.ids[i] for i in np.flatnonzero(encoded.counts == 0)],
        "one_sentence": int(np.sum(encoded.counts == 1)),
        "repeated": len(again),
        "shared": shared._asdict(),
        "ledger": str(place),
        "guarantee": statement.data,
        "seconds": time.monotonic() - started,
    }


def check_places(output: pathlib.Path, place: pathlib.Path, folder: pathlib.Path, source: str) -> None:
    """Refuses, before anything is spent, a place that cannot be written or holds what must not be overwritten."""
    written = [output, *statements.places(output)]
    for path in written:
        files.require_writable(path, "--output" if path is output else "--output's statement")
    if place.is_dir():
        raise InputError(f"--ledger {place} is a folder; give a file")
    kept = [(path, "the documents") for path in data.private_files(source)]
    for ledger in (place.resolve(), folder / "ledger.json"):
        kept += [(ledger, "a ledger of what was spent"), (ledgers.lock_of(ledger), "the lock of a ledger")]
    kept += [(folder / name, f"part of the fitted folder {folder}") for name in store.FILES]
    known = {path.resolve(): what for path, what in kept}
    for path in written:
        if what := known.get(path.resolve()):
            raise InputError(f"--output {output} would overwrite {path}, {what}; give another file")


def release_all(
    method: methods.Method,
    documents: data.Encoded,
    key_rows: jax.Array,
    epsilon: float,
    chosen: choices.Choice,
    *,
    chunk: int = 2048,
) -> methods.Released:
    """One release of every document, a part at a time: memory does not grow with their number times candidates."""
    order, parts = [], []
    for variant, those in chosen.parts(documents.counts):
        for start in range(0, len(those), chunk):
            rows = those[start : start + chunk]
            part = documents.take(rows)
            prepared = method.prepare(part, (variant,))
            order.append(rows)
            parts.append(method.release(prepared, part.counts, key_rows[rows], epsilon, variant))
    back = np.argsort(np.concatenate(order))
    return methods.Released(*(np.concatenate(column)[back] for column in zip(*parts)))


def choice(fitted: store.Fitted, config: ReleaseConfig) -> tuple[str, choices.Choice, float]:
    """Method and variants, and the fitted epsilon that they were chosen at: that nearest to the one asked for."""
    if not fitted.choices:
        raise InputError(
            f"{config.run_dir} was fitted with no method that releases; fit again with another --methods"
        )
    if config.method != "best" and config.method not in fitted.choices:
        raise InputError(f"method {config.method!r} was not fitted; fitted are: {', '.join(fitted.choices)}")
    fitted_epsilons = next(iter(fitted.choices.values()))
    nearest = min(fitted_epsilons, key=lambda e: abs(math.log(float(e) / config.epsilon)))
    name = config.method
    if name == "best":
        name = max(fitted.choices, key=lambda m: fitted.scores[m][nearest])
    return name, fitted.choices[name][nearest], float(nearest)


def document_keys(config: ReleaseConfig, ids: Sequence[str], counters: Sequence[int]) -> jax.Array:
    """One key a document: this call's system entropy, folded with the document's id and its release counter.

    All 256 bits of the id's digest go in, so that nobody can make up two ids that share their draws.
    """
    if config.insecure_noise_seed is not None:
        root = keys.root(config.insecure_noise_seed)
    else:
        root = entropy.key_from_words(entropy.secret_words())
    digests = b"".join(hashlib.sha256(i.encode("utf-8", "surrogatepass")).digest() for i in ids)
    words = np.frombuffer(digests, ">u4").reshape(len(ids), -1).astype(np.uint32)
    words = np.concatenate([words, np.array(counters, np.uint32)[:, None]], 1)

    def fold(key, word):
        return jax.random.fold_in(key, word), None

    start = keys.stream(root, "selection")
    return jax.vmap(lambda row: jax.lax.scan(fold, start, row)[0])(words)


def state(
    config: ReleaseConfig,
    fitted: store.Fitted,
    method: methods.Method,
    encoded: data.Encoded,
    after: Sequence[Sequence[ledgers.Entry]],
) -> accounting.PrivacyStatement:
    """The guarantee of every document, in words and JSON: the largest epsilon, rho and delta that any has spent.

    Which document spent most differs from number to number: many small releases may have the larger rho.
    """
    histories = _largest([_history(entries) for entries in after])
    approximation = max(map(_approximation, histories))
    distance = max(map(_draws, histories)) * _RESIDUAL
    exact_only = approximation > _MOST_DELTA
    if exact_only:
        approximation = 0.0
    # Pure: a delta that only 128 bits make is no reason to state a smaller epsilon.
    found = [accounting.compose(_mechanisms(history), delta=0.0) for history in histories]
    first = max(range(len(found)), key=lambda i: found[i].epsilon)
    other = max(range(len(found)), key=lambda i: found[i].rho)
    longest = int(encoded.counts.max(initial=0))
    everywhere = accounting.document_epsilon(config.epsilon, num_sentences=longest, utility=method.utility)
    notes = [
        f"{counted(len(encoded.ids), 'document')} released by {method.name}; epsilon is the largest of any of them, "
        f"that of {counted(_releases(histories[first]), 'release')}, {_total(histories[first]):g} in all",
    ]
    if found[other].rho > found[first].rho:
        notes.append(f"rho is the largest of any, that of {counted(_releases(histories[other]), 'release')}")
    notes += [
        f"two documents of {counted(longest, 'sentence')} (the longest here) that differ in every one: epsilon "
        f"{everywhere:g} for this release",
        f"a sentence is what the splitter {fitted.config.splitter!r} returns; their number k is public",
        "a document of no sentence says nothing about its text",
        "releases that one ledger counts; those of the same documents in another one add their epsilons to this",
        "documents that are among the texts that the fit calls public have no guarantee; a release of documents that "
        "mostly are is refused",
    ]
    if method.utility == "strict_depth":
        notes.append(
            "a document of one sentence has the same depth everywhere and is drawn uniformly from the candidates"
        )
    assumptions = []
    samplers = {sampler for history in histories for _, sampler in history}
    if "" in samplers:
        assumptions.append("assumes real arithmetic: float32 noise leaves gaps between its values")
    if exact_only:
        assumptions.append(
            "the guarantee is of the exact law: what 128 random bits a choice draw is within "
            f"{accounting.round_up(distance)} of it in total variation, for which a delta of {_MOST_DELTA:g} does not "
            "make up at this epsilon"
        )
    elif approximation:
        notes.append(
            "delta is what 128 random bits a choice leave between the drawn law and the exact one, which rho is of"
        )
    return accounting.statement(
        _mechanisms(histories[first]),
        alternatives=[_mechanisms(histories[other])] if found[other].rho > found[first].rho else [],
        delta=approximation,
        approximation=approximation,
        simulation=any(e.insecure for entries in after for e in entries),
        assumptions=tuple(assumptions),
        notes=tuple(notes),
    )


_History = dict[tuple[float, str], int]  # releases by epsilon and sampler


def _history(entries: Sequence[ledgers.Entry]) -> _History:
    return dict(collections.Counter((e.epsilon, e.sampler) for e in entries))


def _largest(histories: Sequence[_History]) -> list[_History]:
    """Each once, without those that another one holds whole: more releases never cost less."""
    kept: list[_History] = []
    distinct = {frozenset(h.items()): h for h in histories}
    for one in sorted(distinct.values(), key=_releases, reverse=True):
        if not any(all(other.get(k, 0) >= n for k, n in one.items()) for other in kept):
            kept.append(one)
    return kept


def _releases(history: _History) -> int:
    return sum(history.values())


def _total(history: _History) -> float:
    return math.fsum(epsilon * n for (epsilon, _), n in history.items())


def _mechanisms(history: _History) -> list[accounting.PureDP]:
    groups: dict[tuple[float, bool], int] = {}
    for (epsilon, sampler), releases in sorted(history.items()):
        kind = epsilon, sampler == "exponential"
        groups[kind] = groups.get(kind, 0) + releases
    return [
        accounting.PureDP(
            epsilon=epsilon,
            releases=releases,
            bounded_range=bounded_range,
            adjacency="replace-one",
            unit="sentence",
        )
        for (epsilon, bounded_range), releases in groups.items()
    ]


# Of any fit: earlier releases may have come from another one, with more candidates or steps.
_RESIDUAL = selection.residual(2**16 - 1, max_score=2**16)


_MOST_DELTA = 1e-6  # beyond, it says less than how near the drawn law is to the exact one


def _draws(history: _History) -> int:
    return sum(n for (_, sampler), n in history.items() if sampler)


def _approximation(history: _History) -> float:
    """The delta that 128-bit draws cost: both neighbours' laws are off by the distance, one times e^epsilon."""
    return _draws(history) * _RESIDUAL * (1 + math.exp(min(_total(history), 700.0)))


def write(
    output: pathlib.Path,
    encoded: data.Encoded,
    released: methods.Released,
    fitted: store.Fitted,
    method: methods.Method,
    chosen: choices.Choice,
) -> None:
    """One row a document, in order: id, k, embedding, variant, and the public candidate that shows it to a person.

    A document of no sentence has neither: a candidate drawn for it would look like something that it says.
    """
    rows = released.candidates
    if not method.draws:  # the nearest public candidate by cosine: post-processing
        vectors = released.vectors
        if vectors.shape[1] == fitted.public.means.shape[1]:
            centred = (
                unit(vectors - fitted.public.centre) @ unit(fitted.public.means - fitted.public.centre).T
            )
            rows = centred.argmax(1)
    speaks = encoded.counts > 0
    texts = [
        fitted.train.texts[fitted.public.rows[r]] if r >= 0 and said else None
        for r, said in zip(rows, speaks)
    ]
    vectors = np.where(speaks[:, None], released.vectors, 0).astype(np.float32)
    variants = np.empty(len(encoded.ids), object)
    for variant, those in chosen.parts(encoded.counts):
        variants[those] = variant
    table = pa.table(
        {
            "id": pa.array(encoded.ids, pa.string()),
            "num_sentences": pa.array(encoded.counts, pa.int32()),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1]),
            "variant": pa.array(variants, pa.string()),
            "nearest_candidate": pa.array(texts, pa.string()),
        }
    )
    with files.atomic_write(output, "wb") as file:
        pq.write_table(table, file)
