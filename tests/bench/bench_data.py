"""Seconds to read, encode and model text, beside plain Python loops on the same corpus (installed docstrings)."""

import collections
import json
import pathlib
import tempfile

from tests.bench.timing import cpu_seconds, table
from trainers.common import convert, docstrings, readers, tables
from trainers.common.vocabulary import Vocabulary
from trainers.keyboard import ngram

SEQ_LEN = 20


def main():
    corpus = docstrings.load_default()
    data, vocabulary = corpus.clients.train, Vocabulary.from_public_texts(corpus.public.tokens, 2000)
    with tempfile.TemporaryDirectory() as folder:
        parquet, jsonl = (pathlib.Path(folder, name) for name in ("d.parquet", "d.jsonl"))
        for path in (parquet, jsonl):
            convert.convert("docstrings", path, {"all": data})

        def loop_parquet():
            clients = collections.defaultdict(list)
            for record in tables.parquet_table(parquet).to_pylist():
                clients[record["client_id"]].append(record["tokens"].split())
            return clients

        def loop_jsonl():
            with jsonl.open(encoding="utf-8") as file:
                records = map(json.loads, file)
                return {r["client_id"]: [t.split() for t in r["tokens"]] for r in records}

        lists = [data.tokens[i] for i in range(data.num_examples)]
        number = {word: i for i, word in enumerate(vocabulary.words, 1)}

        def loop_encode():
            rows = []
            for tokens in lists:
                row = [vocabulary.bos, *(number.get(t, vocabulary.oov) for t in tokens[:SEQ_LEN])]
                row += [vocabulary.eos] * (len(tokens) < SEQ_LEN)
                rows.append(row + [0] * (SEQ_LEN + 1 - len(row)))
            return rows

        rows = vocabulary.encode(data.tokens, SEQ_LEN)
        model = ngram.fit(rows, vocabulary=vocabulary)
        held_out = vocabulary.encode(corpus.clients.test.tokens, SEQ_LEN)
        timed = {
            "read parquet": (lambda: readers.read_clients(parquet), loop_parquet),
            "read JSON lines": (lambda: readers.read_clients(jsonl), loop_jsonl),
            "encode": (lambda: vocabulary.encode(data.tokens, SEQ_LEN), loop_encode),
            "5-gram: fit": (lambda: ngram.fit(rows, vocabulary=vocabulary), None),
            "5-gram: evaluate": (lambda: ngram.evaluate(model, held_out), None),
        }
        lines = []
        for name, (ours, loop) in timed.items():
            seconds, _ = cpu_seconds(ours, repeats=5)
            plain = cpu_seconds(loop, repeats=3)[0] if loop else None
            lines.append(
                [
                    name,
                    f"{1e3 * seconds:.0f}",
                    f"{1e3 * plain:.0f}" if plain else "",
                    f"{seconds / plain:.2f}" if plain else "",
                ]
            )
    size = f"{data.num_clients:,} clients, {data.num_examples:,} examples, {len(data.tokens.ids):,} tokens"
    table([size, "CPU ms", "plain loop", "ratio"], lines)
