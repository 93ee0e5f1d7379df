"""Keys of members, a data key a round, and records sealed one by one.

Everything is the `cryptography` package's: HPKE (RFC 9180: X25519, HKDF-SHA256, ChaCha20-Poly1305) wraps
the data key, ChaCha20-Poly1305 seals records, Ed25519 signs. A sealed record is nonce, ciphertext and tag,
and all are equally long, so that a server can shuffle them and learn nothing from them but their number.
Encryption keeps the server out; towards the other members, who hold the data key, it does nothing, and its
epsilon is none.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from trainers.common import files
from trainers.common.errors import InputError

NONCE_BYTES, TAG_BYTES, KEY_BYTES, SIGNATURE_BYTES = 12, 16, 32, 64
OVERHEAD = NONCE_BYTES + TAG_BYTES
_BATCH = 65_536  # records handled at a time, so that their python objects never fill the memory
_SUITE = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.CHACHA20_POLY1305)
_SECRET, _PUBLIC = "jaxpriv member secret 1", "jaxpriv member public 1"


@dataclass(frozen=True, kw_only=True)
class Member:
    """What everyone may know of a member: its name and two raw public keys."""

    name: str
    wrap_key: bytes
    """X25519: data keys are wrapped for it."""
    sign_key: bytes
    """Ed25519: its uploads verify under it."""

    def fingerprint(self) -> str:
        """What members compare by another channel: a server that hands out keys could hand out its own."""
        return files.digest_of(self.name, self.wrap_key, self.sign_key)[:32]

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "wrap_key": self.wrap_key.hex(), "sign_key": self.sign_key.hex()}


@dataclass(frozen=True, kw_only=True, repr=False)
class Secret:
    """A member's private keys. Never printed, never in a log: it has no repr of its contents."""

    name: str
    wrap_key: bytes
    sign_key: bytes

    def __repr__(self) -> str:
        return f"Secret(name={self.name!r})"

    def public(self) -> Member:
        return Member(
            name=self.name,
            wrap_key=X25519PrivateKey.from_private_bytes(self.wrap_key).public_key().public_bytes_raw(),
            sign_key=Ed25519PrivateKey.from_private_bytes(self.sign_key).public_key().public_bytes_raw(),
        )


def generate(name: str) -> Secret:
    """Makes a member's keys from the operating system's randomness."""
    if not re.fullmatch(r"\w[\w .-]{0,98}[\w.-]|\w", name):
        raise InputError(
            "a member's name must be 1 to 100 letters, digits, spaces, - _ or . and begin with a letter, "
            f"got {name!r}"
        )
    return Secret(
        name=name,
        wrap_key=X25519PrivateKey.generate().private_bytes_raw(),
        sign_key=Ed25519PrivateKey.generate().private_bytes_raw(),
    )


def save_secret(path: files.PathLike, secret: Secret) -> None:
    """Writes the private keys, readable by their owner alone. An existing file is never overwritten."""
    target = pathlib.Path(path)
    if target.exists():
        raise InputError(f"{target} exists; move it away first: private keys are not overwritten")
    fields = {"wrap_key": secret.wrap_key.hex(), "sign_key": secret.sign_key.hex()}
    with files.atomic_write(target, permissions=0o600) as file:
        json.dump({"format": _SECRET, "name": secret.name, **fields}, file, indent=1)


def save_public(path: files.PathLike, member: Member) -> None:
    """Writes what others need of a member. Another's file is never overwritten."""
    target = pathlib.Path(path)
    if target.exists():
        raise InputError(f"{target} exists; move it away first: it may be another member's")
    with files.atomic_write(path) as file:
        json.dump({"format": _PUBLIC, **member.as_json()}, file, indent=1)


def load_secret(path: files.PathLike) -> Secret:
    """Reads a member's private keys; refuses a file that others may read."""
    data = read_json(path, "private key file", _SECRET)
    if os.name == "posix" and pathlib.Path(path).stat().st_mode & 0o077:
        raise InputError(f"private key file {path} can be read by others; run chmod 600 on it")
    return Secret(**_keys(data, path))


def load_public(path: files.PathLike) -> Member:
    """Reads a member's public keys."""
    return Member(**_keys(read_json(path, "public key file", _PUBLIC), path))


def member_from_json(data: dict, where: files.PathLike) -> Member:
    """Reads a member from a part of a larger file."""
    return Member(**_keys(data, where))


def read_json(path: files.PathLike, what: str, format: str) -> dict:
    """Reads one of this module's JSON files; one line of complaint if it is something else."""
    target = files.existing_file(path, what)
    try:
        data = json.loads(target.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} {target} is not JSON; give the file that keygen wrote") from error
    if not isinstance(data, dict) or data.get("format") != format:
        raise InputError(f"{what} {target} is not of the format {format!r}; give the file that keygen wrote")
    return data


def _keys(data: dict, where: files.PathLike) -> dict:
    try:
        fields = {name: bytes.fromhex(data[name]) for name in ("wrap_key", "sign_key")}
        name = data["name"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{where}: a key is missing or not hexadecimal; write it anew with keygen"
        ) from error
    if not isinstance(name, str) or any(len(key) != KEY_BYTES for key in fields.values()):
        raise InputError(f"{where}: a key is not {KEY_BYTES} bytes long; write it anew with keygen")
    return {"name": name, **fields}


def new_data_key() -> bytes:
    """A fresh data key. A member makes it, for one round; the server never holds it."""
    return ChaCha20Poly1305.generate_key()


def wrap(data_key: bytes, member: Member, *, context: bytes) -> bytes:
    """Wraps a data key so that only `member` can unwrap it, and only in this `context`.

    Raises:
      InputError: the member's key is one that no private key has (of low order).
    """
    try:
        return _SUITE.encrypt(data_key, X25519PublicKey.from_public_bytes(member.wrap_key), info=context)
    except Exception as error:  # what the library raises here is not documented
        raise InputError(
            f"the public key of {member.name!r} cannot be used ({error or type(error).__name__}); ask for a new one"
        ) from error


def unwrap(wrapped: bytes, secret: Secret, *, context: bytes) -> bytes:
    """Returns the data key; raises InputError for another member's wrapping, another context or a changed byte."""
    private = X25519PrivateKey.from_private_bytes(secret.wrap_key)
    try:
        return _SUITE.decrypt(wrapped, private, info=context)
    except (InvalidTag, ValueError) as error:
        raise InputError(
            f"the data key does not unwrap with the keys of {secret.name!r}: it was wrapped for other keys, for "
            "another round, or has been changed; ask the round's maker for the round file"
        ) from error


def sign(secret: Secret, message: bytes) -> bytes:
    """Returns the member's Ed25519 signature of `message`."""
    return Ed25519PrivateKey.from_private_bytes(secret.sign_key).sign(message)


def verifies(member: Member, signature: bytes, message: bytes) -> bool:
    """Returns whether `signature` is this member's signature of `message`."""
    try:
        Ed25519PublicKey.from_public_bytes(member.sign_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def seal(data_key: bytes, records: np.ndarray, *, context: bytes) -> np.ndarray:
    """Encrypts every record by itself, with a random nonce and `context` as associated data.

    Args:
      records: uint8 [n, length].

    Returns:
      uint8 [n, length + 28]. Random 96-bit nonces: among 2^32 records of one data key two are equal with
      probability 2^-33; more records than that are refused.
    """
    _check_records(records)
    if len(records) > 2**32:
        raise InputError(f"{len(records)} records under one data key; use a new round after 2^32")
    length = records.shape[1]
    sealed = np.empty((len(records), length + OVERHEAD), np.uint8)
    encrypt = ChaCha20Poly1305(data_key).encrypt
    for start in range(0, len(records), _BATCH):
        plain = np.ascontiguousarray(records[start : start + _BATCH])
        nonces = os.urandom(NONCE_BYTES * len(plain))
        done = map(encrypt, _cut(nonces, NONCE_BYTES), _cut(plain.tobytes(), length), repeat(context))
        part = sealed[start : start + _BATCH]
        part[:, :NONCE_BYTES] = np.frombuffer(nonces, np.uint8).reshape(-1, NONCE_BYTES)
        part[:, NONCE_BYTES:] = np.frombuffer(b"".join(done), np.uint8).reshape(len(plain), -1)
    return sealed


def unseal(data_key: bytes, sealed: np.ndarray, *, context: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Decrypts records and returns `(records, authentic)`.

    `records` holds the authentic ones only, in order; `authentic` is one bool a sealed record, False where
    it was changed, or sealed with another key or in another context.
    """
    _check_records(sealed)
    length = sealed.shape[1] - OVERHEAD
    if length < 0:
        raise InputError(f"sealed records must have at least {OVERHEAD} bytes, got {sealed.shape[1]}")
    records = np.empty((len(sealed), length), np.uint8)
    authentic = np.ones(len(sealed), bool)
    decrypt = ChaCha20Poly1305(data_key).decrypt
    for start in range(0, len(sealed), _BATCH):
        part = np.asarray(sealed[start : start + _BATCH])
        nonces = list(_cut(part[:, :NONCE_BYTES].tobytes(), NONCE_BYTES))
        bodies = list(_cut(part[:, NONCE_BYTES:].tobytes(), length + TAG_BYTES))
        try:
            done = list(map(decrypt, nonces, bodies, repeat(context)))
        except InvalidTag:
            # Rare: go through this batch again, one record at a time.
            done = [_try_decrypt(decrypt, *pair, context) for pair in zip(nonces, bodies)]
            authentic[start : start + _BATCH] = [record is not None for record in done]
            done = [record or bytes(length) for record in done]
        records[start : start + _BATCH] = np.frombuffer(b"".join(done), np.uint8).reshape(len(part), length)
    return (records if authentic.all() else records[authentic]), authentic


def _try_decrypt(decrypt, nonce: bytes, body: bytes, context: bytes) -> bytes | None:
    try:
        return decrypt(nonce, body, context)
    except InvalidTag:
        return None


def _cut(data: bytes, size: int) -> Iterable[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size)) if size else repeat(b"")


def _check_records(records: np.ndarray) -> None:
    if records.ndim != 2 or records.dtype != np.uint8:
        raise ValueError(f"records must be uint8 [n, length], got {records.dtype} {records.shape}")


def permutation(n: int) -> np.ndarray:
    """A uniform permutation of n from the operating system's generator; no seed exists that could undo it."""
    while True:
        order = np.frombuffer(os.urandom(8 * n), np.uint64)
        ranks = np.argsort(order, kind="stable")
        ordered = order[ranks]
        if not np.any(
            ordered[1:] == ordered[:-1]
        ):  # given that no two draws are equal, all orders are as likely
            return ranks
