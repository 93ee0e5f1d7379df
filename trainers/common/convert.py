"""Writes client data in another format: parquet, JSON lines, or TensorFlow Federated's SQLite."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainers.common import tff_sqlite
from trainers.common.errors import InputError
from trainers.common.files import PathLike, atomic_write
from trainers.common.packed import ClientData

FORMATS = (".parquet", ".jsonl", ".sqlite")


def convert(source: PathLike, output: PathLike, parts: Mapping[str, ClientData]) -> dict[str, Any]:
    """Writes the clients of every split, in order; reading the file again gives the same data.

    Args:
      source: for the message. output: must not exist; its ending is one of FORMATS.
      parts: split name -> data; one part named "all" gives a file without splits.

    Returns:
      output, clients, examples.
    """
    target = Path(output)
    if target.suffix not in FORMATS:
        raise InputError(f"cannot write {target}: its name must end in one of {', '.join(FORMATS)}")
    if target.exists():
        raise InputError(f"{target} exists; give another name, or remove it first")
    if not target.parent.is_dir():
        raise InputError(f"folder {target.parent} does not exist; make it first")
    empty = sum(int((data.counts == 0).sum()) for data in parts.values())
    if target.suffix == ".parquet" and empty:
        raise InputError(
            f"{source} has {empty} clients without examples, which rows of a parquet file cannot hold; "
            "write .jsonl or .sqlite"
        )
    {".parquet": _parquet, ".jsonl": _jsonl, ".sqlite": _sqlite}[target.suffix](target, parts)
    return {
        "output": str(target),
        "clients": sum(data.num_clients for data in parts.values()),
        "examples": sum(data.num_examples for data in parts.values()),
    }


def _parquet(target: Path, parts: Mapping[str, ClientData]) -> None:
    tables = []
    for split, data in parts.items():
        spaced = [" ".join(data.tokens[i]) for i in range(data.num_examples)]
        columns: dict[str, Any] = {
            "client_id": pa.array(data.ids).take(pa.array(data.owners)),
            "text": data.texts.cast(pa.string()),
            "tokens": pa.array(spaced, pa.string()),
        }
        if data.hours is not None:
            columns["hour"] = pa.array(data.hours)
        if split != "all":
            columns["split"] = pa.array([split] * data.num_examples, pa.string())
        tables.append(pa.table(columns))
    with atomic_write(target, "wb") as file:
        pq.write_table(pa.concat_tables(tables, promote_options="default"), file, compression="zstd")


def _jsonl(target: Path, parts: Mapping[str, ClientData]) -> None:
    with atomic_write(target) as file:
        for split, data in parts.items():
            for i, client in enumerate(data.ids):
                record: dict[str, Any] = {"client_id": client, "text": data.client_texts(i)}
                record["tokens"] = [" ".join(tokens) for tokens in data.client_tokens(i)]
                if data.hours is not None:
                    record["hour"] = data.hours[data.starts[i] : data.starts[i + 1]].tolist()
                if split != "all":
                    record["split"] = split
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _sqlite(target: Path, parts: Mapping[str, ClientData]) -> None:
    def clients() -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
        for split, data in parts.items():
            for i, client in enumerate(data.ids):
                examples = []
                for example in range(data.starts[i], data.starts[i + 1]):
                    features: dict[str, Any] = {"tokens": " ".join(data.tokens[example])}
                    features["text"] = data.texts[example].as_py()
                    if data.hours is not None:
                        features["hour"] = np.int64(data.hours[example])
                    examples.append(features)
                yield ("default_split" if split == "all" else split), str(client), examples

    tff_sqlite.write(target, clients())
