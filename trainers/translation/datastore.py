"""A memory of (key, value) records in a folder of memory-mapped arrays.

`manifest.json` says which model made the keys, how they are coded and how many records count; one `.bin`
file a column holds rows one after another. An append writes rows behind the last that counts and then
replaces the manifest, so that a killed append leaves the store as it was. Opened read-only, a store costs
no memory; `search` streams one that is larger than memory past the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import io
import json
import os
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import knn, pq
from trainers.common import files
from trainers.common.errors import InputError

MANIFEST, CODEBOOK, LOCK = "manifest.json", "codebook.npz", ".lock"
FORMAT = "jaxpriv datastore 1"
Coding = Literal["none", "pq", "pca"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What two memories must agree on before their records may be mixed or searched together."""

    model: str
    """Digest of the model whose representations the keys are."""
    dim: int
    """Length of a model representation (a query)."""
    width: int
    """Numbers a stored key: the dimension, bytes of a PQ code, or principal components."""
    dtype: str
    """Of a stored key: float32, float16, or uint8 for PQ codes."""
    coding: Coding
    """K-encryption: none, pq or pca."""
    codebook: str
    """Digest of the codebook; empty without one."""
    key: str
    """Which representation the key is: "output" or "ffn_input"."""
    vocabulary_size: int
    """Values lie in [0, vocabulary_size)."""
    weighted: bool = False
    """Whether each record carries a weight (a noisy count) beside key and value."""

    def __post_init__(self):
        numbers = {"dim": self.dim, "width": self.width, "vocabulary_size": self.vocabulary_size}
        for name, value in numbers.items():
            if type(value) is not int or not 1 <= value < 2**31:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        texts = {"model": self.model, "codebook": self.codebook, "key": self.key, "dtype": self.dtype}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise ValueError(f"{name} must be text, got {text!r}")
        if not isinstance(self.weighted, bool):
            raise ValueError(f"weighted must be true or false, got {self.weighted!r}")
        if self.coding not in ("none", "pq", "pca"):
            raise ValueError(f"coding must be none, pq or pca, got {self.coding!r}")
        if self.dtype not in ("float32", "float16", "uint8") or (self.coding == "pq") != (
            self.dtype == "uint8"
        ):
            raise ValueError(f"a store of coding {self.coding!r} cannot hold {self.dtype!r} keys")
        if bool(self.codebook) != (self.coding != "none"):
            raise ValueError("codebook must be given for pq and pca, and only for them")

    def columns(self) -> dict[str, np.dtype]:
        """Row type of every column file."""
        found = {"keys": np.dtype((self.dtype, (self.width,))), "values": np.dtype("<i4")}
        return {**found, "weights": np.dtype("<f4")} if self.weighted else found

    def differences(self, other: Facts) -> list[str]:
        """Names of fields that differ."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(other, f.name)]


@dataclass(frozen=True)
class Datastore:
    """An opened memory: read-only views of its columns.

    keys: `[count, width]`. values: int32 `[count]`. weights: float32 `[count]`, or None.
    codebook: `pq.Codebook`, `pq.Projection` or None.
    """

    folder: pathlib.Path
    facts: Facts
    keys: np.ndarray
    values: np.ndarray
    weights: np.ndarray | None
    codebook: pq.Codebook | pq.Projection | None

    @property
    def count(self) -> int:
        return len(self.values)


def codebook_digest(codebook: pq.Codebook | pq.Projection | None) -> str:
    """SHA-256 of a codebook's kind, shapes and numbers; empty for None."""
    if codebook is None:
        return ""
    parts: list[bytes | str] = [type(codebook).__name__]
    for leaf in codebook:
        array = np.ascontiguousarray(np.asarray(leaf, "<f4"))
        parts += [str(array.shape), array.tobytes()]
    return files.digest_of(*parts)


def save_codebook(path: files.PathLike, codebook: pq.Codebook | pq.Projection, model: str = "") -> str:
    """Writes a K-encryption model (public: fitted on public keys only) and returns its digest.

    Args:
      model: digest of the translation model whose keys it is of.
    """
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name: np.asarray(leaf, "<f4") for name, leaf in codebook._asdict().items()}
    arrays |= {"model": np.array(model)} if model else {}
    np.savez(buffer, **arrays)
    with files.atomic_write(path, "wb") as file:
        file.write(buffer.getvalue())
    return codebook_digest(codebook)


def load_codebook(path: files.PathLike, model: str = "") -> pq.Codebook | pq.Projection:
    """Reads what `save_codebook` wrote; refuses one that says it is of another translation model than `model`."""
    target = files.existing_file(path, "codebook")
    try:
        with np.load(target, allow_pickle=False) as data:
            arrays = {name: np.asarray(data[name], np.float32) for name in data.files if name != "model"}
            made_for = str(data["model"]) if "model" in data.files else ""
    except Exception as error:  # a damaged archive fails in a dozen ways
        raise InputError(f"codebook {target} cannot be read ({error}); write it anew") from error
    if not all(np.isfinite(a).all() for a in arrays.values()):
        raise InputError(f"codebook {target} holds numbers that are not finite; write it anew")
    if model and made_for and made_for != model:
        raise InputError(
            f"codebook {target} is of another model ({made_for:.12}) than the one given ({model[:12]}); take both from "
            "one folder"
        )
    shapes = {name: a.ndim for name, a in arrays.items()}
    if shapes == {"centroids": 3}:
        return pq.Codebook(jnp.asarray(arrays["centroids"]))
    if shapes == {"mean": 1, "components": 2} and arrays["components"].shape[1:] == arrays["mean"].shape:
        return pq.Projection(jnp.asarray(arrays["mean"]), jnp.asarray(arrays["components"]))
    raise InputError(f"codebook {target} is neither a product quantizer nor a projection; write it anew")


def create(
    folder: files.PathLike, facts: Facts, codebook: pq.Codebook | pq.Projection | None = None
) -> pathlib.Path:
    """Makes an empty memory, readable by its owner alone; a folder that holds anything already is refused."""
    target = pathlib.Path(folder)
    if codebook_digest(codebook) != facts.codebook:
        raise InputError(f"{target}: the codebook is not the one its facts name; use the round's codebook")
    if (target / MANIFEST).exists():
        raise InputError(f"{target} holds a memory already; choose another folder, or append to it")
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise InputError(f"{target} exists and is not empty; choose another folder for the memory")
    except OSError as error:
        raise InputError(f"cannot make the folder {target}: {error.strerror}; choose another") from error
    if codebook is not None:
        save_codebook(target / CODEBOOK, codebook)
    for name in facts.columns():
        (target / f"{name}.bin").touch(mode=0o600)
    _write_manifest(target, facts, 0)
    return target


def append(
    folder: files.PathLike,
    facts: Facts,
    *,
    keys: np.ndarray,
    values: np.ndarray,
    weights: np.ndarray | None = None,
) -> int:
    """Appends records, all of them or none, and returns the new count.

    Another model's, codebook's or coding's keys are refused, and so are values outside the vocabulary and
    numbers that are not finite. Writers in several processes take turns.
    """
    target = pathlib.Path(folder)
    given = {"keys": keys, "values": values, "weights": weights}
    _check_rows(target, facts, given)
    with _locked(target):
        have, count = _read_manifest(target)
        _agree(target, have, facts)
        for name, dtype in facts.columns().items():
            rows = np.ascontiguousarray(given[name], dtype.base)
            with open(target / f"{name}.bin", "r+b") as file:
                file.truncate(count * dtype.itemsize)  # what a killed append may have left
                file.seek(count * dtype.itemsize)
                file.write(rows.data if rows.size else b"")
                file.flush()
                os.fsync(file.fileno())
        _write_manifest(target, facts, count + len(values))
    return count + len(values)


def open_store(folder: files.PathLike, *, model: str | None = None, facts: Facts | None = None) -> Datastore:
    """Opens a memory read-only.

    Args:
      model: digest of the model that will search it; keys of another are refused.
      facts: everything that must agree, in place of `model`.
    """
    target = pathlib.Path(folder)
    if not target.is_dir():
        raise InputError(f"datastore {target} is not a folder; give the folder that `store` or `open` wrote")
    have, count = _read_manifest(target)
    if facts is not None:
        _agree(target, have, facts)
    if model is not None and have.model != model:
        raise InputError(
            f"datastore {target} holds keys of the model {have.model[:12]}, not of {model[:12]}; "
            "build it anew with this model"
        )
    columns = {}
    for name, dtype in have.columns().items():
        path = target / f"{name}.bin"
        size = path.stat().st_size if path.exists() else 0
        if size < count * dtype.itemsize:
            raise InputError(
                f"datastore {target} is cut short: {path.name} has {size} bytes for {count} records of "
                f"{dtype.itemsize}; copy or build it anew"
            )
        shape = (count, *dtype.shape)
        columns[name] = (
            np.memmap(path, dtype.base, "r", shape=shape) if count else np.zeros(shape, dtype.base)
        )
    codebook = None
    if have.coding != "none":
        codebook = load_codebook(target / CODEBOOK)
        if codebook_digest(codebook) != have.codebook:
            raise InputError(
                f"datastore {target}: its codebook is not the one its manifest names; copy it anew"
            )
    return Datastore(target, have, columns["keys"], columns["values"], columns.get("weights"), codebook)


def encode(facts: Facts, codebook: pq.Codebook | pq.Projection | None, keys: np.ndarray) -> np.ndarray:
    """K-encrypts float keys `[n, dim]` as `facts` says: what may leave a client."""
    if keys.ndim != 2 or keys.shape[1] != facts.dim:
        raise ValueError(f"keys must be [n, {facts.dim}], got {keys.shape}")
    parts = [_encode(codebook, part, facts.width) for part in _chunks(keys, 16_384)]
    joined = np.concatenate(parts) if parts else np.zeros((0, facts.width))
    return joined.astype(facts.dtype)


def _encode(codebook, keys: np.ndarray, width: int) -> np.ndarray:
    if codebook is None:
        return keys
    # One shape, so that one program serves every part.
    padded = np.zeros((16_384, keys.shape[1]), np.float32)
    padded[: len(keys)] = keys
    code = _encode_pq if isinstance(codebook, pq.Codebook) else _project
    return np.asarray(code(codebook, padded))[: len(keys)]


_encode_pq = jax.jit(pq.encode)
_project = jax.jit(pq.project)


def decode(facts: Facts, codebook: pq.Codebook | pq.Projection | None, keys: np.ndarray) -> jax.Array:
    """Stored keys as the representations `[n, dim]` that they still tell."""
    if isinstance(codebook, pq.Codebook):
        return pq.decode(codebook, jnp.asarray(keys))
    floats = jnp.asarray(keys, jnp.float32)
    return floats if codebook is None else pq.unproject(codebook, floats)


def on_device(store: Datastore, start: int = 0, stop: int | None = None) -> knn.Store | knn.CodedStore:
    """The records from `start` to `stop`, ready for `knn.search`; distances are to decoded keys."""
    keys, values = store.keys[start:stop], jnp.asarray(store.values[start:stop])
    if isinstance(store.codebook, pq.Codebook):
        return knn.build_coded(store.codebook, jnp.asarray(keys), values)
    centre = None if store.codebook is None else store.codebook.mean
    return knn.build(decode(store.facts, store.codebook, keys), values, centre=centre)


def search(store: Datastore, queries: jax.Array, *, k: int, block_rows: int = 262_144) -> knn.Neighbors:
    """Searches a memory of any size, reading `block_rows` records at a time.

    Same neighbours as `knn.search` over all of it; memory for one block and its decoded chunk, whatever the
    size.
    """
    if block_rows < 1:
        raise ValueError(f"block_rows must be at least 1, got {block_rows=}")
    block_rows = min(block_rows, max(store.count, 1))
    best = None
    centre = _centre(store)
    for start in range(0, store.count, block_rows):
        # The last block begins early, to keep one shape; rows that were seen are masked.
        first = max(min(start, store.count - block_rows), 0)
        mask = np.arange(first, first + block_rows) >= start
        rows = slice(first, first + block_rows)
        found = _search_block(
            store.codebook,
            np.asarray(store.keys[rows]),
            np.asarray(store.values[rows]),
            mask,
            centre,
            queries,
            k,
        )
        found = knn.shift(found, first)
        best = found if best is None else _merge(best, found, k)
    return _empty(queries.shape[0], k) if best is None else best


def _centre(store: Datastore) -> jax.Array:
    if isinstance(store.codebook, pq.Projection):
        return store.codebook.mean
    if store.codebook is None and store.count:
        sample = store.keys[:: max(1, store.count // 4096)]
        return jnp.asarray(np.asarray(sample, np.float64).mean(0), jnp.float32)
    return jnp.zeros(store.facts.dim)


@functools.partial(jax.jit, static_argnums=6)
def _search_block(codebook, keys, values, mask, centre, queries, k):
    if isinstance(codebook, pq.Codebook):
        return knn.search(knn.build_coded(codebook, keys, values, mask=mask), queries, k=k)
    floats = jnp.asarray(keys, jnp.float32)
    if codebook is not None:
        floats = pq.unproject(codebook, floats)
    return knn.search(knn.build(floats, values, mask=mask, centre=centre), queries, k=k)


_merge = jax.jit(lambda a, b, k: knn.merge(a, b, k=k), static_argnums=2)


def _empty(batch: int, k: int) -> knn.Neighbors:
    nothing = jnp.zeros((0, 1))
    return knn.search(knn.build(nothing, jnp.zeros(0, jnp.int32)), jnp.zeros((batch, 1)), k=k)


def _chunks(array: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (np.asarray(array[i : i + size]) for i in range(0, len(array), size))


def _check_rows(target: pathlib.Path, facts: Facts, given: dict[str, np.ndarray | None]) -> None:
    keys, values, weights = given["keys"], given["values"], given["weights"]
    assert keys is not None
    assert values is not None
    if keys.ndim != 2 or keys.shape[1] != facts.width:
        raise ValueError(f"keys must be [n, {facts.width}] for this memory, got {keys.shape}")
    if keys.dtype != np.dtype(facts.dtype):
        raise ValueError(f"keys must be {facts.dtype} for this memory, got {keys.dtype}")
    if values.shape != keys.shape[:1] or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"values must be integers, one a key ({len(keys)}), got {values.dtype} {values.shape}"
        )
    if (weights is not None) != facts.weighted:
        raise ValueError("weights must be given for a weighted memory, and only for one")
    if weights is not None and (weights.shape != values.shape or not (weights > 0).all()):
        raise ValueError("weights must be positive, one a record")
    if not np.isfinite(keys).all():
        raise InputError(f"{target}: a key is not finite; the model's weights may be damaged")
    wrong = values[(values < 0) | (values >= facts.vocabulary_size)]
    if len(wrong):
        raise InputError(
            f"{target}: {len(wrong)} values (first: {wrong[0]}) lie outside the vocabulary of "
            f"{facts.vocabulary_size}; use the public model's vocabulary"
        )


def _agree(target: pathlib.Path, have: Facts, want: Facts) -> None:
    wrong = have.differences(want)
    if wrong:
        name = wrong[0]
        raise InputError(
            f"datastore {target} and these records differ in {', '.join(wrong)} ({name}: "
            f"{str(getattr(have, name))[:12]} and {str(getattr(want, name))[:12]}); keep them in separate memories"
        )


def _read_manifest(target: pathlib.Path) -> tuple[Facts, int]:
    path = target / MANIFEST
    if not path.exists():
        raise InputError(f"{target} holds no memory ({MANIFEST} is absent); give a folder that `store` wrote")
    try:
        data = json.loads(path.read_text("utf-8"))
        if data.pop("format") != FORMAT:
            raise InputError(f"{path} is of another format than {FORMAT!r}; build the memory anew")
        count = data.pop("count")
        facts = Facts(**data)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}); copy or build the memory anew") from error
    if type(count) is not int or count < 0:
        raise InputError(f"{path} is damaged (count {count!r}); copy or build the memory anew")
    return facts, count


def _write_manifest(target: pathlib.Path, facts: Facts, count: int) -> None:
    with files.atomic_write(target / MANIFEST, permissions=0o600) as file:
        json.dump({"format": FORMAT, "count": count, **dataclasses.asdict(facts)}, file, indent=1)


@contextlib.contextmanager
def _locked(target: pathlib.Path) -> Iterator[None]:
    if not (target / MANIFEST).exists():
        raise InputError(f"{target} holds no memory ({MANIFEST} is absent); create it first")
    with open(target / LOCK, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
