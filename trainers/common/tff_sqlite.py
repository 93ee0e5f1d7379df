"""Reads and writes the SQLite client data of TensorFlow Federated, without TensorFlow.

Two tables: `examples(split_name, client_id, serialized_example_proto)` and `client_metadata(client_id,
split_name, num_examples)`. An example is a `tf.train.Example`, whose wire format is decoded here: a map from
feature names to a list of bytes, float32 or int64.
"""

import contextlib
import os
import sqlite3
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainers.common.errors import InputError
from trainers.common.files import PathLike, existing_file
from trainers.common.tables import Row

# A feature: its kind ("bytes_list", "float_list", "int64_list"; None where none is set) and its values.
Feature = tuple[str | None, list[Any]]

_KINDS = {1: "bytes_list", 2: "float_list", 3: "int64_list"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SCHEMA = """
CREATE TABLE examples (
  split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);
CREATE INDEX idx_examples_client_id ON examples (client_id);
CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id);
CREATE TABLE client_metadata (
  client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);
CREATE INDEX idx_metadata_client_id ON client_metadata (client_id);
"""


def rows(path: PathLike) -> Iterator[Row]:
    """Yields one record an example, in row order: client_id, split and features, bytes as text.

    A feature of one value is that value, of none None, of several a list. A client of `client_metadata` that
    has no examples comes last, with every feature an empty list.
    """
    file = existing_file(path, "data file")
    names: dict[str, list] = {}
    with _opened(file) as database:
        try:
            cursor = database.execute(
                "SELECT rowid, client_id, split_name, serialized_example_proto FROM examples ORDER BY rowid"
            )
            for rowid, client, split, message in cursor:
                where = f"example {rowid}"
                try:
                    features = decode_example(message)
                    record = {name: _value(*feature) for name, feature in features.items()}
                except ValueError as error:
                    yield Row(where, None, f"not a tf.train.Example ({error})")
                    continue
                names.update({name: [] for name in record})
                yield Row(where, record | {"client_id": client, "split": split})
            cursor = database.execute(
                "SELECT client_id, split_name FROM client_metadata WHERE num_examples = 0 ORDER BY rowid"
            )
            for client, split in cursor:
                yield Row(f"client {client!r}", names | {"client_id": client, "split": split})
        except sqlite3.Error as error:
            raise InputError(
                f"{file}: not TensorFlow Federated client data ({error}); it needs the tables examples and "
                "client_metadata"
            ) from error


def num_examples(path: PathLike) -> dict[tuple[str, str], int]:
    """What `client_metadata` says: examples by (split, client)."""
    file = existing_file(path, "data file")
    with _opened(file) as database:
        try:
            cursor = database.execute("SELECT split_name, client_id, num_examples FROM client_metadata")
            return {(split, client): count for split, client, count in cursor}
        except sqlite3.Error as error:
            raise InputError(f"{file}: no client_metadata that can be read ({error})") from error


def write(path: PathLike, clients: Iterable[tuple[str, str, Iterable[Mapping[str, Any]]]]) -> None:
    """Writes client data that TensorFlow Federated's `SqlClientData` reads; the file is whole or absent.

    Args:
      clients: `(split, client_id, examples)`; an example maps feature names to a string, bytes, int, float
        or a list of one kind. A client without examples is kept, with a count of 0.
    """
    target = Path(path)
    descriptor, aside = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(descriptor)
    try:
        database = sqlite3.connect(aside)
        try:
            database.executescript("PRAGMA journal_mode = OFF;" + _SCHEMA)
            for split, client, examples in clients:
                messages = [(split, client, encode_example(example)) for example in examples]
                database.executemany("INSERT INTO examples VALUES (?, ?, ?)", messages)
                database.execute(
                    "INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split, len(messages))
                )
            database.commit()
        finally:
            database.close()
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, target)
    except BaseException:
        if os.path.exists(aside):
            os.unlink(aside)
        raise


def decode_example(message: bytes) -> dict[str, Feature]:
    """Decodes a `tf.train.Example`: packed and unpacked numbers; the last entry of a name wins.

    >>> decode_example(bytes.fromhex("0a0f0a0d0a0573636f726512041a020802"))
    {'score': ('int64_list', [2])}

    Raises:
      ValueError: cut off, or no such message.
    """
    features: dict[str, Feature] = {}
    for number, wire, value in _fields(message):
        if number == 1 and wire == _BYTES:  # Example.features
            for inner, inner_wire, entry in _fields(value):
                if inner == 1 and inner_wire == _BYTES:  # Features.feature, a map entry
                    name, feature = _map_entry(entry)
                    features[name] = feature
    return features


def encode_example(features: Mapping[str, Any]) -> bytes:
    """Encodes a `tf.train.Example` as TensorFlow does: numbers packed, features in the order given.

    A value may be a string, bytes, bool, int, float, a list of one of them (empty: no values of unknown
    kind), or a pair `(kind, values)` as `decode_example` gives it.
    """
    entries = b"".join(
        _delimited(1, _delimited(1, name.encode("utf-8")) + _delimited(2, _encode_feature(name, value)))
        for name, value in features.items()
    )
    return _delimited(1, entries)


def _opened(path: Path) -> Any:
    """A read-only connection; closed at the end of the block, unlike sqlite3's own context manager."""
    uri = path.resolve().as_uri() + "?mode=ro&immutable=1"
    return contextlib.closing(sqlite3.connect(uri, uri=True))


def _value(kind: str | None, values: list[Any]) -> Any:
    if kind == "bytes_list":
        try:
            values = [v.decode("utf-8") for v in values]
        except UnicodeDecodeError:
            raise ValueError("a bytes feature is not UTF-8 text") from None
    if len(values) == 1:
        return values[0]
    return values or None


def _map_entry(message: bytes) -> tuple[str, Feature]:
    name, feature = "", (None, [])
    for number, wire, value in _fields(message):
        if number == 1 and wire == _BYTES:
            name = value.decode("utf-8")
        elif number == 2 and wire == _BYTES:
            feature = _feature(value)
    return name, feature


def _feature(message: bytes) -> Feature:
    kind, values = None, []
    for number, wire, value in _fields(message):
        if wire == _BYTES and number in _KINDS:
            found = _KINDS[number]
            if found != kind:  # a oneof: the last kind set wins, the same kind again appends
                kind, values = found, []
            values.extend(_list(found, value))
    return kind, values


def _list(kind: str, message: bytes) -> list[Any]:
    values: list[Any] = []
    for number, wire, value in _fields(message):
        if number != 1:
            continue
        if kind == "bytes_list" and wire == _BYTES:
            values.append(value)
        elif kind == "float_list" and wire in (_BYTES, _FIXED32):
            if len(value) % 4:
                raise ValueError("packed floats of a length that is no multiple of 4")
            values.extend(np.frombuffer(value, "<f4").tolist())
        elif kind == "int64_list" and wire == _VARINT:
            values.append(_signed(value))
        elif kind == "int64_list" and wire == _BYTES:
            at = 0
            while at < len(value):
                number_, at = _varint(value, at)
                values.append(_signed(number_))
    return values


def _fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yields `(field number, wire type, value)`: an int for varints, else bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise ValueError("field number 0")
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, wire, value
            continue
        if wire == _BYTES:
            length, at = _varint(message, at)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > len(message):
            raise ValueError("cut off")
        yield number, wire, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message):
            raise ValueError("cut off")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than 10 bytes")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _encode_varint(value: int) -> bytes:
    value &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _delimited(number: int, payload: bytes) -> bytes:
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(payload)) + payload


def _encode_feature(name: str, value: Any) -> bytes:
    if isinstance(value, tuple) and len(value) == 2 and (value[0] is None or value[0] in _KINDS.values()):
        kind, values = value
    else:
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        kind = _kind_of(name, values)
    if kind is None:
        return b""
    if kind == "bytes_list":
        encoded = [v.encode("utf-8") if isinstance(v, str) else bytes(v) for v in values]
        return _delimited(1, b"".join(_delimited(1, v) for v in encoded))
    if kind == "float_list":
        packed = struct.pack(f"<{len(values)}f", *values)
        return _delimited(2, _delimited(1, packed) if values else b"")
    if not all(-(2**63) <= v < 2**63 for v in values):
        raise ValueError(f"feature {name!r} holds a number beyond 64 bits")
    packed = b"".join(_encode_varint(int(v)) for v in values)
    return _delimited(3, _delimited(1, packed) if values else b"")


def _kind_of(name: str, values: list[Any]) -> str | None:
    if not values:
        return None
    if all(isinstance(v, (str, bytes)) for v in values):
        return "bytes_list"
    if all(isinstance(v, (bool, int, np.integer)) for v in values):
        return "int64_list"
    if all(isinstance(v, (bool, int, float, np.integer, np.floating)) for v in values):
        return "float_list"
    raise ValueError(f"feature {name!r} mixes kinds or holds none of str, bytes, int, float: {values[:3]!r}")
