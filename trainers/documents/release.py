"""Release: private embeddings of documents to parquet, the guarantee in words and JSON, the budget counted."""

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
from trainers.documents import data, methods, preparation, store
from trainers.documents import ledger as ledgers
from trainers.documents.config import ReleaseConfig
from trainers.documents.public import unit


def release(config: ReleaseConfig) -> dict[str, Any]:
    """Releases every document once and returns `output`, `guarantee`, `method` and counts.

    The ledger is written before the embeddings: a release that is interrupted in between has been paid for.

    Raises:
      InputError: a document was released before and --allow-repeats is not given; the method was not fitted.
    """
    started = time.monotonic()
    preparation.check_epsilon(config.epsilon, "--epsilon")
    output = pathlib.Path(config.output)
    if output.is_dir() or not output.parent.is_dir():
        raise InputError(f"--output {output} cannot be written: give a file in a folder that exists")
    folder = pathlib.Path(config.run_dir)
    place = pathlib.Path(config.ledger or folder / "ledger.json")
    if output.resolve() == place.resolve():
        raise InputError(f"--output {output} is the ledger of what was spent; give another file")
    fitted = store.load(folder)
    changed = {"devices": config.devices} | ({"selection": config.selection} if config.selection else {})
    fitted = fitted._replace(config=dataclasses.replace(fitted.config, **changed))
    name, variant = choice(fitted, config)
    documents = data.read_private(config.data)
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
    with ledgers.opened(place) as ledger:
        before = [ledger.spent(i, t) for i, t in zip(documents.ids, documents.texts)]
        first: dict[str, str] = {}
        for i, t, count in zip(documents.ids, documents.texts, encoded.counts):
            if count:
                first.setdefault(ledgers.folded(t), i)
        again = [
            i
            for i, t, count, entries in zip(documents.ids, documents.texts, encoded.counts, before)
            # A document without sentences releases nothing of itself. The second: the same text twice in this call.
            if count and (entries or first.get(ledgers.folded(t), i) != i)
        ]
        if again and not config.allow_repeats:
            raise InputError(
                f"{len(again)} of {len(documents.ids)} documents were released before, or have the text of another "
                f"one here (first: {again[0]!r}); a second release adds its "
                "epsilon to theirs: give --allow-repeats to spend it, or leave them out"
            )
        key_rows = document_keys(config, documents.ids, [len(entries) for entries in before])
        released = release_all(method, encoded, key_rows, config.epsilon, variant)
        for i, t in zip(documents.ids, documents.texts):
            sampler = fitted.config.selection if method.draws else ""
            ledger.add(
                i, t, ledgers.Entry(config.epsilon, name, sampler, config.insecure_noise_seed is not None)
            )
        after = [ledger.spent(i, t) for i, t in zip(documents.ids, documents.texts)]
        ledger.write()
        statement = state(config, fitted, method, encoded, after)
        # The statement first: if a kill comes between, the one beside older embeddings says too much, not too little.
        statements.write(statement, output.with_name(output.name + ".privacy"))
        write(output, encoded, released, fitted, method)
    return {
        "output": str(output),
        "method": name,
        "variant": variant,
        "epsilon": config.epsilon,
        "documents": len(documents.ids),
        "without_sentences": int(np.sum(encoded.counts == 0)),
        "one_sentence": int(np.sum(encoded.counts == 1)),
        "repeated": len(again),
        "guarantee": statement.data,
        "seconds": time.monotonic() - started,
    }


def release_all(
    method: methods.Method,
    documents: data.Encoded,
    key_rows: jax.Array,
    epsilon: float,
    variant: str,
    *,
    chunk: int = 2048,
) -> methods.Released:
    """One release of every document, a part at a time: memory does not grow with their number times candidates."""
    parts = []
    for start in range(0, len(documents.ids), chunk):
        part = documents.take(np.arange(start, min(start + chunk, len(documents.ids))))
        prepared = method.prepare(part, (variant,))
        parts.append(method.release(prepared, part, key_rows[start : start + chunk], epsilon, variant))
    return methods.Released(*(np.concatenate(column) for column in zip(*parts)))


def choice(fitted: store.Fitted, config: ReleaseConfig) -> tuple[str, str]:
    """Method and variant: those chosen at the fitted epsilon nearest to the one asked for (ratio)."""
    choices = fitted.choices
    if not choices:
        raise InputError(
            f"{config.run_dir} was fitted with no method that releases; fit again with another --methods"
        )
    if config.method != "best" and config.method not in choices:
        raise InputError(f"method {config.method!r} was not fitted; fitted are: {', '.join(choices)}")
    fitted_epsilons = next(iter(choices.values()))
    nearest = min(fitted_epsilons, key=lambda e: abs(np.log(float(e) / config.epsilon)))
    name = config.method
    if name == "best":
        name = max(choices, key=lambda m: fitted.scores[m][nearest])
    return name, choices[name][nearest]


def document_keys(config: ReleaseConfig, ids: Sequence[str], counters: Sequence[int]) -> jax.Array:
    """One key a document: this call's system entropy, folded with the document's id and its release counter."""
    if config.insecure_noise_seed is not None:
        root = keys.root(config.insecure_noise_seed)
    else:
        root = entropy.key_from_words(entropy.secret_words())
    root = keys.stream(root, "selection")
    digests = np.array(
        [int.from_bytes(hashlib.sha256(i.encode("utf-8", "surrogatepass")).digest()[:7], "big") for i in ids],
        np.int64,
    )
    by_id = keys.for_clients(root, digests)
    return jax.vmap(jax.random.fold_in)(by_id, np.array(counters, np.uint32))


def state(
    config: ReleaseConfig,
    fitted: store.Fitted,
    method: methods.Method,
    encoded: data.Encoded,
    after: Sequence[Sequence[ledgers.Entry]],
) -> accounting.PrivacyStatement:
    """The guarantee of the document that has spent most, in words and JSON."""
    total, most = max((sum(e.epsilon for e in entries), entries) for entries in after)
    if len({e.epsilon for e in most}) == 1:
        groups = {most[0].epsilon: len(most)}
    else:
        groups = {}
        for entry in most:
            groups[entry.epsilon] = groups.get(entry.epsilon, 0) + 1
    # Of every release that this one adds to, not of this one alone.
    exponential = all(e.sampler == "exponential" for e in most)
    drawn = sum(bool(e.sampler) for e in most)
    mechanisms = [
        accounting.PureDP(
            epsilon=epsilon,
            releases=releases,
            bounded_range=exponential,
            adjacency="replace-one",
            unit="sentence",
        )
        for epsilon, releases in groups.items()
    ]
    longest = int(encoded.counts.max(initial=0))
    everywhere = accounting.document_epsilon(config.epsilon, num_sentences=longest, utility=method.utility)
    notes = [
        f"{len(encoded.ids)} documents released by {method.name}; the epsilon is that of the document that has spent "
        f"most ({len(most)} release(s), {total:g} in all)",
        f"two documents of {longest} sentences (the longest here) that differ in every one: epsilon {everywhere:g} "
        "for this release",
        f"a sentence is what the splitter {fitted.config.splitter!r} returns; their number k is public",
        "a document of no sentence says nothing about its text",
    ]
    if method.utility == "strict_depth":
        notes.append(
            "a document of one sentence has the same depth everywhere and is drawn uniformly from the candidates"
        )
    delta = 0.0
    if drawn:
        steps = fitted.config.num_steps if method.utility == "bounded_sum" else 1
        distance = drawn * selection.residual(len(fitted.public.rows), max_score=max(1, steps * longest))
        # Both neighbours' laws are off by the distance, the second one's multiplied by e^epsilon; twice, since
        # composing may spend a delta of this size as well.
        delta = 2 * distance * (1 + math.exp(min(total, 700.0)))
        if delta >= 1:
            delta = 0.0
            notes.append(
                f"the guarantee is of the exact law; what is drawn is within {distance:.3g} of it in total variation"
            )
        else:
            notes.append(
                "delta is what 128 random bits a choice leave between the drawn law and the exact one"
            )
    assumptions = (
        ()
        if drawn == len(most)
        else ("assumes real arithmetic: float32 noise leaves gaps between its values",)
    )
    return accounting.statement(
        mechanisms,
        delta=delta,
        simulation=any(e.insecure for entries in after for e in entries),
        assumptions=assumptions,
        notes=tuple(notes),
    )


def write(
    output: pathlib.Path,
    encoded: data.Encoded,
    released: methods.Released,
    fitted: store.Fitted,
    method: methods.Method,
) -> None:
    """One row a document, in order: id, k, embedding, and the public candidate that shows it to a person."""
    rows = released.candidates
    if not method.draws:  # the nearest public candidate by cosine: post-processing
        vectors = released.vectors
        if vectors.shape[1] == fitted.public.means.shape[1]:
            centred = (
                unit(vectors - fitted.public.centre) @ unit(fitted.public.means - fitted.public.centre).T
            )
            rows = centred.argmax(1)
    texts = [fitted.train.texts[fitted.public.rows[r]] if r >= 0 else None for r in rows]
    table = pa.table(
        {
            "id": pa.array(encoded.ids, pa.string()),
            "num_sentences": pa.array(encoded.counts, pa.int32()),
            "embedding": pa.FixedSizeListArray.from_arrays(
                pa.array(released.vectors.astype(np.float32).ravel()), released.vectors.shape[1]
            ),
            "nearest_candidate": pa.array(texts, pa.string()),
        }
    )
    with files.atomic_write(output, "wb") as file:
        pq.write_table(table, file)
