"""Vectors on disk by content: append-only shards, safe to kill at any moment.

A shard is one `.npz` written aside and renamed, holding digests of texts and their vectors; the index in
memory is rebuilt by reading the digests. The folder's name carries the model, so a changed model starts anew.
Vectors tell much of a text, which may be private: only the owner reads them.
"""

import hashlib
import os
import pathlib
import sys
import uuid
from collections.abc import Sequence

import numpy as np

from trainers.common import files

_KEY = 16  # bytes of a text's digest


class VectorCache:
    """Maps texts to float32 vectors of one length, in shards under `folder`."""

    def __init__(self, folder: pathlib.Path, dim: int):
        self._folder, self._dim = folder, dim
        self._index: dict[bytes, tuple[str, int]] = {}
        self._seen: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def _refresh(self) -> None:
        """Indexes shards that this or another process has added."""
        for path in sorted(self._folder.glob("*.keys.npy")):
            name = path.name.removesuffix(".keys.npy")
            if name in self._seen:
                continue
            try:
                keys = np.load(path)
                vectors = np.load(self._vectors(name), mmap_mode="r")
                if keys.shape != (len(vectors), _KEY) or keys.dtype != np.uint8:
                    raise ValueError(f"{len(vectors)} vectors have keys {keys.dtype} {keys.shape}")
                if vectors.shape[1:] != (self._dim,) or vectors.dtype != np.float32:
                    raise ValueError(f"vectors are {vectors.dtype} {vectors.shape}")
            except (ValueError, OSError, EOFError) as error:
                self._drop(name, error)
                continue
            self._index.update({key.tobytes(): (name, row) for row, key in enumerate(keys)})
            self._seen.add(name)

    def _vectors(self, name: str) -> pathlib.Path:
        return self._folder / f"{name}.vectors.npy"

    def _drop(self, name: str, error: Exception) -> None:
        """Removes a damaged shard: what it held is encoded again."""
        shown = str(error) or type(error).__name__
        print(f"cache {self._folder}: shard {name} is damaged and was removed ({shown})", file=sys.stderr)
        for path in (self._folder / f"{name}.keys.npy", self._vectors(name)):
            path.unlink(missing_ok=True)

    def get(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Vectors of the texts that are stored."""
        self._refresh()
        places: dict[str, list[tuple[int, str]]] = {}
        for text in texts:
            place = self._index.get(_digest(text))
            if place is not None:
                places.setdefault(place[0], []).append((place[1], text))
        found: dict[str, np.ndarray] = {}
        for name, rows in places.items():
            vectors = np.load(self._vectors(name), mmap_mode="r")
            values = vectors[[row for row, _ in rows]]
            found.update({text: values[i] for i, (_, text) in enumerate(rows)})
        return found

    def put(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        """Stores vectors; the digests appear last, so a shard is whole or unseen."""
        if not texts:
            return
        name = f"{os.getpid():x}-{uuid.uuid4().hex[:12]}"
        keys = np.frombuffer(b"".join(_digest(t) for t in texts), np.uint8).reshape(len(texts), _KEY)
        with files.atomic_write(self._vectors(name), "wb", permissions=0o600) as file:
            np.save(file, vectors.astype(np.float32, copy=False))
        with files.atomic_write(self._folder / f"{name}.keys.npy", "wb", permissions=0o600) as file:
            np.save(file, keys)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:_KEY]
