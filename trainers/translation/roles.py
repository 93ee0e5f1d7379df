"""The roles of the protocol as commands with files between them: keygen, share, shuffle, open."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from accounting import PrivacyStatement
from trainers.common import files
from trainers.common.errors import InputError
from trainers.translation import crypto, data, datastore, facts, protocol, release, report
from trainers.translation.config import Required, RequiredMany
from trainers.translation.store_command import RELEASE

Result = tuple[dict[str, Any], str]


@dataclass(frozen=True, kw_only=True)
class KeygenConfig:
    """Make a member's keys; or, with --round, a round: a fresh data key, wrapped for every member.

    A round is made by a member, never by the server, which would hold its key.
    """

    name: Annotated[str, tyro.conf.arg(help_behavior_hint="(required without --round)")] = ""
    """The member's name."""
    out: str = "."
    """Folder for NAME.secret.json (keep it) and NAME.public.json (give it to the other members)."""
    round: str | None = None
    """Round file to write. Needs --secret, --members, --model, --codebook."""
    secret: Annotated[str, tyro.conf.arg(help_behavior_hint="(required with --round)")] = ""
    """The maker's private key file."""
    members: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(required with --round)")] = ()
    """Public key files of all members, the maker's own among them."""
    model: str = "runs/translation/public"
    """Folder of the public model that all members use."""
    codebook: str | None = None
    """The server's codebook (public/codebook.npz of a run); none sends keys as they are."""
    weighted: bool = False
    """Records are buckets with noisy counts (`store --epsilon`)."""
    quota: int = 2_000_000
    """Records a member may send at most."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_keygen(config: KeygenConfig) -> Result:
    if config.round is None:
        if not config.name:
            raise InputError("--name is needed: the member's name")
        folder = pathlib.Path(config.out)
        stem = folder / config.name
        secret = crypto.generate(config.name)
        for path in (f"{stem}.secret.json", f"{stem}.public.json"):
            if pathlib.Path(path).exists():
                raise InputError(f"{path} exists; choose another --name or --out: keys are not overwritten")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {folder} cannot be made: {error.strerror}") from error
        crypto.save_secret(f"{stem}.secret.json", secret)
        crypto.save_public(f"{stem}.public.json", secret.public())
        print_id = secret.public().fingerprint()
        text = f"{stem}.secret.json (private) and {stem}.public.json; fingerprint {print_id}"
        return {"public": f"{stem}.public.json", "fingerprint": print_id}, text
    if config.quota < 1:
        raise InputError(f"--quota must be at least 1, got {config.quota}")
    files.require_writable(config.round, "--round")
    model = data.load(config.model)
    codebook = None if config.codebook is None else datastore.load_codebook(config.codebook, model.digest)
    members = [crypto.load_public(path) for path in config.members]
    form = facts.facts_of(model, codebook, weighted=config.weighted)
    secret = crypto.load_secret(config.secret)
    made = protocol.make_round(config.round, secret, members, form, quota=config.quota)
    result = {"round": made.id, "members": [m.name for m in members], "file": config.round}
    return result, f"round {made.id} for {', '.join(m.name for m in members)}: {config.round}"


@dataclass(frozen=True, kw_only=True)
class _Member:
    """What a member takes part in a round with."""

    round: Required = ""
    """Round file, from its maker."""
    secret: Required = ""
    """One's own private key file."""
    members: RequiredMany = ()
    """Public key files of the other members, from themselves (compare fingerprints)."""


@dataclass(frozen=True, kw_only=True)
class ShareConfig(_Member):
    """Client: seal a memory, record by record, and sign the upload."""

    store: Required = ""
    """Folder of the memory."""
    out: Required = ""
    """Upload to write; a new file."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_share(config: ShareConfig) -> Result:
    made, secret, key = _joined(config)
    if not config.out:
        raise InputError("--out FILE is needed: the upload to write")
    files.require_new(config.out, "--out")
    store = datastore.open_store(config.store, facts=made.facts)
    place = store.folder / RELEASE
    how = None
    if made.facts.weighted and place.is_file():
        try:
            how = json.loads(place.read_text(encoding="utf-8"))
            release.joint_statement([how])
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"{place} does not say how the histogram was made ({error}); store it anew"
            ) from error
    said = protocol.share(config.out, made, key, secret, store, release=how)
    return _told(said, made, config.out, "records sealed", "up")[:2]


def _joined(config: _Member) -> tuple[protocol.Round, crypto.Secret, bytes]:
    for name in ("round", "secret"):
        if not getattr(config, name):
            raise InputError(f"--{name} FILE is needed")
    made, secret = protocol.read_round(config.round), crypto.load_secret(config.secret)
    return made, secret, protocol.join(made, secret, [crypto.load_public(p) for p in config.members])


def _told(
    said: protocol.Report, made: protocol.Round, place: str, what: str, way: str
) -> tuple[dict[str, Any], str, PrivacyStatement | None]:
    """The outcome, as an object and in words, and the statement of a round of noisy histograms."""
    guarantee, statement = report.GUARANTEE["fednn"], None
    if made.facts.weighted:
        try:
            statement = release.joint_statement(said.releases)
            guarantee = statement.sentence
        except ValueError as error:
            guarantee = f"epsilon: none that can be stated for these noisy histograms: {error}"
    result = {
        "records": said.accepted,
        "refused": said.refused,
        "details": list(said.details),
        "missing": list(said.missing),
        f"bytes_{way}": said.bytes_written if way == "up" else said.bytes_read,
        "file": place,
        "guarantee": guarantee,
    }
    lines = [f"{said.accepted} {what}: {place}", *(f"refused or missing: {line}" for line in said.details)]
    if said.missing:
        source = "" if way == "up" else ", as the server says"
        lines.append(f"without {', '.join(said.missing)}: no upload of theirs was accepted{source}")
    return result, "\n".join([*lines, guarantee]), statement


@dataclass(frozen=True, kw_only=True)
class ShuffleConfig:
    """Server: check the uploads, join them, and write their records in random order, without reading them."""

    round: Required = ""
    """Round file."""
    uploads: RequiredMany = ()
    """The members' uploads."""
    out: Required = ""
    """File to write, for every member; a new one."""
    require_all: bool = False
    """Write nothing unless every member's upload is accepted."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_shuffle(config: ShuffleConfig) -> Result:
    if not config.round or not config.uploads or not config.out:
        raise InputError("--round FILE, --uploads FILE ... and --out FILE are needed")
    files.require_new(config.out, "--out")
    made = protocol.read_round(config.round)
    said = protocol.shuffle(config.out, made, config.uploads, require_all=config.require_all)
    result, text, _ = _told(said, made, config.out, "records shuffled", "up")
    if len(said.releases) > 1:
        return result, text
    alone = "only one upload was accepted, and there are no others to hide among: all members know whose these are"
    return {**result, "warning": alone}, f"warning: {alone}\n{text}"


@dataclass(frozen=True, kw_only=True)
class OpenConfig(_Member):
    """Client: open what the server sent and save the joint memory."""

    shuffled: Required = ""
    """File from the server."""
    codebook: str | None = None
    """The server's codebook; needed if the round has one."""
    own_upload: str | None = None
    """One's own upload, to count records that the server left out."""
    out: Required = ""
    """Folder for the joint memory."""
    json: bool = False
    """Print one JSON object as the last line."""


def run_open(config: OpenConfig) -> Result:
    made, _, key = _joined(config)
    if not config.shuffled or not config.out:
        raise InputError("--shuffled FILE and --out FOLDER are needed")
    codebook = None if config.codebook is None else datastore.load_codebook(config.codebook)
    if datastore.codebook_digest(codebook) != made.facts.codebook:
        if codebook is None:
            raise InputError(
                "--codebook FILE is needed: this round has one (the server's public/codebook.npz)"
            )
        has = "another one" if made.facts.codebook else "none"
        raise InputError(f"--codebook {config.codebook} is not the round's, which has {has}")
    with files.new_folder(config.out) as folder:  # with its statement, or not at all
        said = protocol.open_shuffled(
            folder, made, key, config.shuffled, codebook, own_upload=config.own_upload
        )
        result, text, statement = _told(said, made, config.out, "records opened", "down")
        if statement is not None:
            with files.atomic_write(folder / "privacy.json") as file:
                file.write(statement.json())
    return result, text
