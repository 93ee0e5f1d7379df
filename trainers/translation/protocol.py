"""One round of sharing memories: members seal, the server shuffles, members open.

A member makes the round: a fresh data key, wrapped for every member, in a signed round file that holds no
secret. Each member seals its coded records with that key and signs the upload. The server, which holds no
key at all, checks signatures and quotas, joins the uploads and shuffles them with the operating system's
generator. Each member opens the result. What is refused is counted under its reason. `layout.py` says what
the bytes are.

Encryption and shuffling keep the server from reading and the members from knowing whose a record is. They
are no differential privacy (epsilon: none): every member reads every record, the server sees how many each one
sent, of two members each knows the other's, and a server and a member together know whose every record is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxpriv import pq
from trainers.common import files
from trainers.common.errors import InputError
from trainers.translation import crypto, datastore, layout
from trainers.translation.crypto import Member, Secret
from trainers.translation.datastore import Datastore, Facts

_ROUND = "jaxpriv round 1"
_MAX_SAID = 1_000  # characters about a release
_PART = 1_000_000  # records decrypted before they are written
NO_GUARANTEE = (
    "product quantization is compression: anyone with the public model and codebook can encode a guess and compare",
    "content encryption keeps out the server, not the other members",
    "shuffling hides whose a record is, not the record, and not between two members, nor from a server that one member "
    "helps; two shuffles of a round, or two rounds, show what a member that is in one of them only has sent",
)


@dataclass(frozen=True, kw_only=True)
class Round:
    """What the round file says; all of it public.

    wrapped: the data key for each member, by name. quota: records a member may send at most.
    """

    id: str
    facts: Facts
    members: tuple[Member, ...]
    wrapped: Mapping[str, bytes]
    maker: str
    quota: int
    signature: bytes = b""

    def member(self, name: str) -> Member | None:
        return next((m for m in self.members if m.name == name), None)

    def context(self) -> bytes:
        """Associated data of every record: round, model, codebook and record layout."""
        facts = json.dumps(dataclasses.asdict(self.facts), sort_keys=True)
        return bytes.fromhex(files.digest_of("jaxpriv record", self.id, facts))

    def body(self) -> bytes:
        """What the maker signs."""
        return json.dumps(
            {
                "format": _ROUND,
                "round": self.id,
                "maker": self.maker,
                "quota": self.quota,
                "facts": dataclasses.asdict(self.facts),
                "members": [m.as_json() for m in self.members],
                "wrapped": {name: key.hex() for name, key in sorted(self.wrapped.items())},
            },
            sort_keys=True,
        ).encode()


class Report(NamedTuple):
    """What came through and what did not.

    accepted: records. refused: count by reason (uploads in `shuffle`, records in `open_shuffled`). details:
    one line each, naming the file or the reason. bytes_read, bytes_written: of the files, headers and all.
    releases: how each accepted upload's histogram was made, as its sender says (None where it does not).
    missing: members of the round of whom no upload was accepted (in `open_shuffled`, as the server says).
    """

    accepted: int
    refused: dict[str, int]
    details: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    releases: tuple[Any, ...] = ()
    missing: tuple[str, ...] = ()


def make_round(
    path: files.PathLike, secret: Secret, members: Sequence[Member], facts: Facts, *, quota: int
) -> Round:
    """Makes a round and writes its file: a fresh data key, wrapped for every member, signed by its maker.

    Args:
      secret: the maker's; the maker must be among `members`. A server must not make a round: it would hold
      the key.
      facts: model, codebook and coding that all records must have.
      quota: records a member may send at most.
    """
    names = [m.name for m in members]
    if len(set(names)) != len(names) or len({m.sign_key for m in members}) != len(names):
        raise InputError(f"two members share a name or a key ({', '.join(names)}); each needs its own")
    if secret.public() not in members:
        raise InputError(
            f"the round's maker {secret.name!r} is not among its members "
            f"({', '.join(names)}); add its public file"
        )
    if quota < 1:
        raise InputError(f"quota must be at least 1 record, got {quota}")
    if pathlib.Path(path).exists():
        raise InputError(f"{path} exists; choose another name: a round's key is never made twice")
    data_key, id = crypto.new_data_key(), os.urandom(16).hex()
    wrapped = {m.name: crypto.wrap(data_key, m, context=_wrap_context(id, m.name)) for m in members}
    made = Round(id=id, facts=facts, members=tuple(members), wrapped=wrapped, maker=secret.name, quota=quota)
    made = dataclasses.replace(made, signature=crypto.sign(secret, made.body()))
    with files.atomic_write(path, "wb") as file:
        file.write(
            json.dumps({**json.loads(made.body()), "signature": made.signature.hex()}, indent=1).encode()
        )
    return made


def read_round(path: files.PathLike) -> Round:
    """Reads a round file and checks its signature against the maker's key in it; `join` checks whose key that is."""
    data = crypto.read_json(path, "round file", _ROUND)
    try:
        found = Round(
            id=str(data["round"]),
            facts=Facts(**data["facts"]),
            members=tuple(crypto.member_from_json(m, path) for m in data["members"]),
            wrapped={str(name): bytes.fromhex(key) for name, key in data["wrapped"].items()},
            maker=str(data["maker"]),
            quota=int(data["quota"]),
            signature=bytes.fromhex(data["signature"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(f"round file {path} is damaged ({error}); ask its maker for it again") from error
    maker = found.member(found.maker)
    if maker is None or not crypto.verifies(maker, found.signature, found.body()):
        raise InputError(
            f"round file {path} does not carry its maker's signature; ask {found.maker!r} for it again"
        )
    return found


def join(round: Round, secret: Secret, trusted: Sequence[Member]) -> bytes:
    """Returns the round's data key, if the round is among exactly the members one trusts.

    Args:
      trusted: public files that came from the members themselves (compare fingerprints). Otherwise whoever
      passed on the round file could have put its own key in a member's place and read everything.
    """
    known = {m.name: m for m in trusted}
    own = secret.public()
    for member in round.members:
        if member == own:
            continue
        if member.name not in known:
            raise InputError(
                f"the round has a member {member.name!r} whose public file you did not give; ask for it"
            )
        if member != known[member.name]:
            raise InputError(
                f"the round's keys of {member.name!r} are not those of the public file you gave; compare fingerprints "
                f"({member.fingerprint()} and {known[member.name].fingerprint()}) with {member.name!r} itself"
            )
    if own not in round.members or secret.name not in round.wrapped:
        raise InputError(
            f"{secret.name!r} is not a member of this round, or with other keys; ask {round.maker!r}"
        )
    return crypto.unwrap(round.wrapped[secret.name], secret, context=_wrap_context(round.id, secret.name))


def share(
    path: files.PathLike,
    round: Round,
    data_key: bytes,
    secret: Secret,
    store: Datastore,
    *,
    keep: np.ndarray | None = None,
    release: Mapping[str, Any] | None = None,
) -> Report:
    """Client: seals a memory's records, signs them and writes the upload.

    Args:
      release: how a noisy histogram was made (`release.as_json`); it travels in the header, which everyone can read.
      keep: bool, one a record: what the release filter lets go. All by default.
    """
    if wrong := store.facts.differences(round.facts):
        raise InputError(
            f"memory {store.folder} and the round differ in {', '.join(wrong)}; "
            "build it with the round's model and codebook"
        )
    if keep is not None and np.shape(keep) != (store.count,):
        raise ValueError(f"keep must be one bool a record, {store.count} of them, got shape {np.shape(keep)}")
    rows = np.arange(store.count) if keep is None else np.flatnonzero(keep)
    if len(rows) > round.quota:
        raise InputError(
            f"{len(rows)} records are more than the round's quota of {round.quota}; filter them, or ask for more"
        )
    weights = None if store.weights is None else store.weights[rows]
    records = layout.pack(round.facts, store.keys[rows], store.values[rows], weights)
    sealed = crypto.seal(data_key, records, context=round.context())
    header: dict[str, Any] = {"round": round.id, "client": secret.name, "upload": os.urandom(16).hex()}
    header |= {} if release is None else {"release": dict(release)}
    size = layout.write(path, layout.UPLOAD, header, sealed, sign=lambda m: crypto.sign(secret, m))
    refused = {"filtered": store.count - len(rows)} if len(rows) < store.count else {}
    return Report(len(rows), refused, (), 0, size, (release,))


def shuffle(
    path: files.PathLike, round: Round, uploads: Sequence[files.PathLike], *, require_all: bool = False
) -> Report:
    """Server: checks the uploads, joins the accepted ones and writes their records in random order.

    Needs no key and reads no record: the permutation comes from the operating system and is kept nowhere.
    Refused are, by name: what is no upload, truncated, changed, of another round or of no member, a
    member's second upload, more than the quota, and records whose nonce was seen already (replayed).
    With `require_all` nothing is written unless every member's upload is accepted.
    """
    refused: Counter[str] = Counter()
    details, parts, read = [], [], 0
    seen: set[str] = set()
    releases: list[Any] = []
    for source in uploads:
        read += pathlib.Path(source).stat().st_size if pathlib.Path(source).is_file() else 0
        try:
            header, sealed = layout.read(source, layout.UPLOAD)
            member = _check_upload(header, sealed, round, seen)
        except layout.Refused as reason:
            refused[reason.kind] += 1
            details.append(f"{source}: {reason.kind} ({reason})")
            continue
        seen.add(member.name)
        parts.append(sealed)
        releases.append(header.get("release"))
    if not parts:
        why = "; ".join(details) or "no upload was given"
        raise InputError(f"no upload was accepted: {why}")
    missing = tuple(m.name for m in round.members if m.name not in seen)
    if missing and require_all:
        why = f" ({'; '.join(details)})" if details else ""
        raise InputError(
            f"no upload of {', '.join(missing)} was accepted{why}; get it, or shuffle without --require-all"
        )
    total = sum(len(p) for p in parts)
    nonces = np.concatenate([_nonces(p) for p in parts])
    fresh = _first_seen(nonces)
    if replays := total - int(fresh.sum()):
        refused["replayed record"] += replays
        details.append(f"{replays} records: replayed (their nonce occurs twice)")
    rows = np.flatnonzero(fresh)
    rows = rows[crypto.permutation(len(rows))]
    starts = np.cumsum([0, *(len(p) for p in parts)])

    def gather() -> Iterator[np.ndarray]:
        for begin in range(0, len(rows), _PART):
            some = rows[begin : begin + _PART]
            out = np.empty((len(some), parts[0].shape[1]), np.uint8)
            for start, part in zip(starts, parts):
                mine = (some >= start) & (some < start + len(part))
                out[mine] = part[some[mine] - start]
            yield out

    releases.sort(key=lambda said: json.dumps(said, sort_keys=True))  # not in the order of the uploads
    header = {"round": round.id, "uploads": len(parts), "missing": missing}
    header["releases"] = releases if round.facts.weighted else []
    size = layout.write(path, layout.SHUFFLED, header, gather(), record_bytes=parts[0].shape[1])
    return Report(len(rows), dict(refused), tuple(details), read, size, tuple(releases), missing)


def open_shuffled(
    folder: files.PathLike,
    round: Round,
    data_key: bytes,
    path: files.PathLike,
    codebook: pq.Codebook | pq.Projection | None,
    *,
    own_upload: files.PathLike | None = None,
) -> Report:
    """Client: opens what the server sent and saves it as a memory; nothing is left behind if it fails.

    Records that fail are counted: tampered or foreign (another key, round or codebook: the cipher cannot
    tell which), replayed, malformed, truncated. That a file was changed on its way (its digest is another) is said;
    one with more bytes than its header speaks of, or without a record, is refused. With `own_upload` it also counts
    one's own records that the server left out.
    """
    target = pathlib.Path(folder)
    try:
        header, sealed = layout.read(path, layout.SHUFFLED, whole=False)
        _check_round(header, round)
        if sealed.shape[1] != layout.record_bytes(round.facts) + crypto.OVERHEAD:
            raise layout.Refused("another layout", f"its records have {sealed.shape[1]} bytes")
    except layout.Refused as reason:
        raise InputError(
            f"shuffled file {path}: {reason.kind} ({reason}); ask the server for it again"
        ) from reason
    refused: Counter[str] = Counter()
    refused["truncated"] = header["count"] - len(sealed)
    fresh = _first_seen(_nonces(sealed))
    refused["replayed"] = len(sealed) - int(fresh.sum())
    centroids = codebook.centroids.shape[1] if isinstance(codebook, pq.Codebook) else 256
    changed = ("the file is not the one that its header speaks of: changed on its way",)
    with files.new_folder(target) as aside:
        datastore.create(aside, round.facts, codebook)
        accepted = 0
        for begin in range(0, len(sealed), _PART):
            some = sealed[begin : begin + _PART][fresh[begin : begin + _PART]]
            records, authentic = crypto.unseal(data_key, some, context=round.context())
            refused["tampered or foreign"] += int((~authentic).sum())
            keys, values, weights, sound = layout.unpack(round.facts, records, centroids=centroids)
            refused["malformed"] += int((~sound).sum())
            accepted = datastore.append(aside, round.facts, keys=keys, values=values, weights=weights)
        details = tuple(f"{n} records: {reason}" for reason, n in refused.items() if n)
        if not header["digest_holds"] and not refused["truncated"]:
            details += changed
        if not accepted:
            why = "; ".join(details) or "it holds none"
            raise InputError(f"no record of {path} could be opened: {why}; ask the server for it again")
        said = header.get("releases")
        releases = tuple(one if _is_short(one) else None for one in said) if isinstance(said, list) else ()
        told_all = len(releases) <= len(round.members) and len(releases) == header.get("uploads")
        if round.facts.weighted and not told_all:
            releases = (None,)  # somebody's settings are not there, or nobody's are: nothing can be stated
        if own_upload is not None:
            missing, own = _own(own_upload, sealed)
            details += (f"{missing} of your own records: left out by the server",) if missing else ()
            if round.facts.weighted and own not in releases:
                details += ("your own histogram's settings: not among those that the server passed on",)
                releases += (None,)
    read = pathlib.Path(path).stat().st_size
    written = sum(f.stat().st_size for f in target.iterdir())
    absent = header.get("missing")
    missing = tuple(m.name for m in round.members if isinstance(absent, list) and m.name in absent)
    return Report(
        accepted, {k: n for k, n in refused.items() if n}, details, read, written, releases, missing
    )


class Traffic(NamedTuple):
    """Bytes of a round. up: sent by each member. down: received by each."""

    up: dict[str, int]
    down: int


def simulate(
    folder: files.PathLike, stores: Mapping[str, Datastore], codebook, *, quota: int
) -> tuple[Datastore, Traffic]:
    """Runs all roles of one round in one process, through the same files, and returns the joint memory."""
    root = pathlib.Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    secrets = {name: crypto.generate(name) for name in stores}
    members = [s.public() for s in secrets.values()]
    facts = next(iter(stores.values())).facts
    first = next(iter(secrets.values()))
    made = make_round(root / "round.json", first, members, facts, quota=quota)
    up = {}
    for name, store in stores.items():
        key = join(made, secrets[name], members)
        up[name] = share(root / f"upload-{len(up)}.bin", made, key, secrets[name], store).bytes_written
    uploads = [root / f"upload-{i}.bin" for i in range(len(up))]
    down = shuffle(root / "shuffled.bin", made, uploads).bytes_written
    open_shuffled(root / "joint", made, join(made, first, members), root / "shuffled.bin", codebook)
    return datastore.open_store(root / "joint", facts=facts), Traffic(up, down)


def _wrap_context(id: str, name: str) -> bytes:
    return bytes.fromhex(files.digest_of("jaxpriv data key", id, name))


def _check_upload(header: dict, sealed: np.ndarray, round: Round, seen: set[str]) -> Member:
    """Returns the member who sent this. Only a text names one: the number 7 is not the member "7"."""
    name = header.get("client")
    member = round.member(name) if isinstance(name, str) else None
    _check_round(header, round)
    if member is None:
        raise layout.Refused("unknown member", f"{_shown(name)} is not in the round")
    if not crypto.verifies(member, header["signature"], header["signed"]):
        raise layout.Refused("bad signature", f"not signed by {member.name!r}, or changed")
    if member.name in seen:
        raise layout.Refused("replayed upload", f"{member.name!r} has sent one already")
    if sealed.shape[1] != layout.record_bytes(round.facts) + crypto.OVERHEAD:
        raise layout.Refused("another layout", f"its records have {sealed.shape[1]} bytes")
    if len(sealed) > round.quota:
        raise layout.Refused("over quota", f"{len(sealed)} records of at most {round.quota}")
    if not _is_short(header.get("release")):
        raise layout.Refused("damaged", "what it says of its release is no short list of names and values")
    return member


def _check_round(header: dict, round: Round) -> None:
    if header.get("round") != round.id:
        raise layout.Refused("another round", f"it is of round {_shown(header.get('round'))}, not {round.id}")


def _shown(value: Any) -> str:
    """What anybody may have written in a header, as it can be printed."""
    return (
        repr(value[:100])
        if isinstance(value, str)
        else f"{'no' if value is None else 'something that is no'} text"
    )


def _is_short(said: Any) -> bool:
    """Whether this is what `share` says of a release, or nothing: it goes to every member, in a header with others."""
    if not isinstance(said, dict):
        return said is None
    values = all(v is None or isinstance(v, str | int | float) for v in said.values())
    return values and len(json.dumps(said)) <= _MAX_SAID


def _nonces(sealed: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(sealed[:, : crypto.NONCE_BYTES]).view(f"V{crypto.NONCE_BYTES}")[:, 0]


def _first_seen(nonces: np.ndarray) -> np.ndarray:
    """True at the first occurrence of every nonce."""
    heads = np.ascontiguousarray(nonces.view(np.uint8).reshape(-1, crypto.NONCE_BYTES)[:, :8]).view(
        np.uint64
    )[:, 0]
    fresh = np.ones(len(nonces), bool)
    order = np.argsort(heads, kind="stable")
    # Only where the first 8 bytes agree (hardly ever) are all 12 compared.
    suspects = np.flatnonzero(np.isin(heads, heads[order][1:][heads[order][1:] == heads[order][:-1]]))
    seen = set()
    for row in suspects:
        nonce = nonces[row].tobytes()
        fresh[row] = nonce not in seen
        seen.add(nonce)
    return fresh


def _own(own_upload: files.PathLike, sealed: np.ndarray) -> tuple[int, Any]:
    """How many of one's own records are not there, and how one's histogram was made."""
    try:
        header, own = layout.read(own_upload, layout.UPLOAD)
    except layout.Refused as reason:
        raise InputError(
            f"own upload {own_upload}: {reason.kind} ({reason}); give the file that share wrote"
        ) from reason
    return len(own) - int(np.isin(_nonces(own), _nonces(sealed)).sum()), header.get("release")
