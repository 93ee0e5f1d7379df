"""The bytes of records and of the files that carry sealed ones.

A record is the stored key (PQ codes, or little-endian floats), the value (2 bytes for vocabularies up to
65,536, else 4) and, in weighted memories, a float32 weight: all records of a round are equally long. A file
is 8 bytes of kind, the header's length (uint32), a JSON header, a signature (64 bytes, zeros if there is
none), then sealed records to the end. The signature covers kind and header, and the header the digest of
the records.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterable

import numpy as np

from trainers.common import files
from trainers.translation import crypto
from trainers.translation.datastore import Facts
from trainers.translation.model import PAD, UNK

UPLOAD, SHUFFLED = b"JPUPLD1\n", b"JPSHUF1\n"
_MAX_HEADER = {UPLOAD: 2**16, SHUFFLED: 2**24}  # the server's holds what all members say
_MAX_WIDTH = 2**20
_LARGEST_KEY = 60_000  # in each number; a normalized layer gives some tens


class Refused(Exception):
    """A file or record that is not accepted. kind: the reason, in the words under which it is counted."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def record_type(facts: Facts) -> np.dtype:
    """The packed row type of a record."""
    value = "<u2" if facts.vocabulary_size <= 65_536 else "<u4"
    key = np.dtype(facts.dtype).newbyteorder("<")
    fields = [("key", key, (facts.width,)), ("value", value)]
    return np.dtype([*fields, ("weight", "<f4")] if facts.weighted else fields)


def record_bytes(facts: Facts) -> int:
    """Bytes of a record before it is sealed; sealing adds 28."""
    return record_type(facts).itemsize


def pack(facts: Facts, keys: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Returns records as uint8 `[n, record_bytes]`."""
    rows = np.empty(len(values), record_type(facts))
    rows["key"], rows["value"] = keys, values
    if facts.weighted:
        rows["weight"] = weights
    return rows.view(np.uint8).reshape(len(rows), record_bytes(facts))


def unpack(
    facts: Facts, records: np.ndarray, *, centroids: int = 256
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """Returns `(keys, values, weights, sound)`: the sound records' columns, and one bool a record.

    Unsound are values that no text has (outside the vocabulary, padding, the unknown piece), keys that no model gives
    (not finite, or beyond 60,000, which would drown all others), codes of no centroid, and weights that are not finite
    and positive: authentic, but no honest member writes them.

    Args:
      centroids: how many each part of a code is one of.
    """
    rows = np.ascontiguousarray(records).view(record_type(facts)).reshape(len(records))
    sound = (rows["value"] < facts.vocabulary_size) & (rows["value"] > max(PAD, UNK))
    usable = rows["key"] < centroids if facts.dtype == "uint8" else np.abs(rows["key"]) <= _LARGEST_KEY
    sound &= usable.all(-1)
    if facts.weighted:
        sound &= np.isfinite(rows["weight"]) & (rows["weight"] > 0)
    rows = rows[sound]
    weights = rows["weight"].astype("<f4") if facts.weighted else None
    return rows["key"].astype(facts.dtype), rows["value"].astype(np.int32), weights, sound


def write(
    path: files.PathLike,
    kind: bytes,
    header: dict,
    sealed: np.ndarray | Iterable[np.ndarray],
    *,
    record_bytes: int | None = None,
    sign: Callable[[bytes], bytes] | None = None,
) -> int:
    """Writes a file of sealed records, given whole or in parts, and returns its size."""
    parts = [sealed] if isinstance(sealed, np.ndarray) else sealed
    width = sealed.shape[1] if isinstance(sealed, np.ndarray) else record_bytes
    count, digest = 0, hashlib.sha256()
    with files.atomic_write(path, "wb") as file:
        # Count and digest are known at the end only; fixed widths keep their place.
        blank = _header(header, width, 0, "0" * 64)
        file.write(kind + len(blank).to_bytes(4, "little") + blank + bytes(crypto.SIGNATURE_BYTES))
        for part in parts:
            data = np.ascontiguousarray(part).tobytes()
            digest.update(data)
            count += len(part)
            file.write(data)
        size = file.tell()
        final = _header(header, width, count, digest.hexdigest())
        signature = sign(kind + final) if sign else bytes(crypto.SIGNATURE_BYTES)
        file.seek(len(kind) + 4)
        file.write(final + signature)
    return size


def _header(header: dict, width: int | None, count: int, digest: str) -> bytes:
    return json.dumps({**header, "record_bytes": width, "count": f"{count:012d}", "digest": digest}).encode()


def _whole(number: object) -> int:
    """A number of a header, which anybody may have written: an integer or its digits; nothing is rounded to one."""
    if type(number) is int and 0 <= number < 10**18:
        return number
    if isinstance(number, str) and re.fullmatch("[0-9]{1,18}", number):
        return int(number)
    raise ValueError("record_bytes and count must be integers from 0 to 10^18")


def read(path: files.PathLike, kind: bytes, *, whole: bool = True) -> tuple[dict, np.ndarray]:
    """Returns `(header, sealed)`; `sealed` is a read-only map of uint8 `[n, record_bytes]`.

    The header gains `signed` and `signature`, for the caller to verify, and `count` as a number; `digest_holds` says
    whether the records are those it was written with. With `whole`, a file that is cut short or changed is refused;
    without, the complete records of a cut file are returned. More bytes than the header speaks of are always refused.
    """
    target = pathlib.Path(path)
    if not target.is_file():
        raise Refused("missing", "there is no such file")
    size = target.stat().st_size
    with open(target, "rb") as file:
        start = file.read(len(kind) + 4)
        if not start.startswith(kind):
            raise Refused("not an upload" if kind == UPLOAD else "not a shuffled file", "it begins otherwise")
        length = int.from_bytes(start[len(kind) :], "little")
        text = file.read(length) if length <= _MAX_HEADER[kind] else b""
        signature = file.read(crypto.SIGNATURE_BYTES)
    offset = len(kind) + 4 + length + crypto.SIGNATURE_BYTES
    if length > _MAX_HEADER[kind] or size < offset:
        raise Refused("truncated", "its header is incomplete")
    try:
        header = json.loads(text)
        width, count = _whole(header["record_bytes"]), _whole(header["count"])
        digest = str(header["digest"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused("damaged", f"its header cannot be read: {error}") from error
    if width <= crypto.OVERHEAD or width > _MAX_WIDTH:
        raise Refused("damaged", f"its header speaks of {count} records of {width} bytes")
    if size > offset + count * width:
        raise Refused(
            "damaged", f"it has {size - offset} bytes of records, its header says {count} of {width} bytes"
        )
    rows = (size - offset) // width
    sealed = (
        np.memmap(target, np.uint8, "r", offset, (rows, width)) if rows else np.zeros((0, width), np.uint8)
    )
    found = hashlib.sha256()
    for begin in range(0, rows, 65_536):
        found.update(sealed[begin : begin + 65_536].tobytes())
    holds = found.hexdigest() == digest
    if whole and size != offset + count * width:
        raise Refused(
            "truncated", f"it has {size - offset} bytes of records, its header says {count * width}"
        )
    if whole and not holds:
        raise Refused("changed", "its records do not have the digest in its header")
    facts = {"count": count, "digest_holds": holds, "signed": kind + text, "signature": signature}
    return {**header, **facts}, sealed
