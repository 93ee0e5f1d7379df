"""What each document has spent: a private file that counts releases, so that epsilons add up."""

import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import json
import math
import os
import pathlib
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from trainers.common import files
from trainers.common.errors import InputError
from trainers.documents import sentences


class Entry(NamedTuple):
    """One release of one document.

    sampler: how a candidate was drawn, "" where noise was added or nobody knows. insecure: its seed was public.
    token: tells releases apart, so that a document's names can be united.
    """

    epsilon: float
    method: str
    sampler: str = ""
    insecure: bool = False
    token: str = ""


@dataclasses.dataclass
class _Document:
    """Names that are one document's, and its releases by token."""

    names: set[str]
    releases: dict[str, Entry]


def folded(text: str) -> str:
    """A text but for what no sentence shows: Unicode NFC, any run of white space one space, no byte order mark."""
    return " ".join(unicodedata.normalize("NFC", text.replace("\ufeff", "")).split())


class Ledger:
    """Releases by document: a document is known by its id, and by keyed digests of its text and of its sentences.

    The same text under another id, and another text under the same id, both count as that document again, and so
    does whatever shares a name with either: who is one document with a second that is one with a third is all three.
    """

    def __init__(self, path: pathlib.Path, splitter: str = "sentencex"):
        self.path, self._splitter = path, splitter
        self._salt = os.urandom(_SALT)
        self._documents: dict[str, _Document] = {}
        if path.is_dir():
            raise InputError(f"ledger {path} is a folder; give a file")
        if path.exists():
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                self._salt = bytes.fromhex(record["salt"])
                if len(self._salt) != _SALT:
                    raise ValueError(f"its salt has {len(self._salt)} bytes, not {_SALT}")
                self._read(record)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
                raise InputError(
                    f"ledger {path} is damaged ({error}): restore it, since without it nobody knows what was spent"
                ) from error

    def _read(self, record: dict[str, Any]) -> None:
        """Unites names that share a release, whoever wrote them."""
        known: dict[str, tuple[str, Entry]] = {}
        for names, rows in _documents(record):
            one = self._unite(names)
            for i, row in enumerate(rows):
                entry = _entry(row)
                if not entry.token:  # nobody knows which releases two names share: all of them count
                    entry = entry._replace(token=f"{names[0]} {i}")
                other, same = known.setdefault(entry.token, (names[0], entry))
                if same != entry:
                    raise ValueError(f"two releases have the token {entry.token}")
                if other != names[0]:
                    one = self._unite((other, names[0]))
                one.releases[entry.token] = entry

    def _unite(self, names: Iterable[str]) -> _Document:
        """The one document of these names from now on."""
        names = set(names)
        found = {id(d): d for n in names if (d := self._documents.get(n))}.values()
        one, *others = sorted(found, key=lambda d: len(d.names) + len(d.releases), reverse=True) or [
            _Document(set(), {})
        ]
        for other in others:
            one.releases |= other.releases
            names |= other.names
        one.names |= names
        self._documents.update(dict.fromkeys(names, one))
        return one

    def names(self, document_id: str, text: str) -> tuple[str, ...]:
        """What the document is known by: first its id, then its text, as it is and by what can be told from it."""

        def name(kind: str, value: str) -> str:
            data = f"{kind}\0{value}".encode("utf-8", "surrogatepass")
            return hmac.new(self._salt, data, hashlib.sha256).hexdigest()[:32]

        seen = folded(" ".join(sentences.split(text, splitter=self._splitter)))
        return name("id", document_id), name("text", text), name("folded", folded(text)), name("folded", seen)

    def spent(self, document_id: str, text: str) -> list[Entry]:
        """Earlier releases of this document, under any name that is its own; each counts once."""
        found = [d.releases for n in self.names(document_id, text) if (d := self._documents.get(n))]
        return list({token: entry for releases in found for token, entry in releases.items()}.values())

    def add(self, document_id: str, text: str, entry: Entry) -> None:
        """Counts one more release."""
        token = os.urandom(8).hex()
        self._unite(self.names(document_id, text)).releases[token] = entry._replace(token=token)

    def write(self) -> None:
        """Writes the whole ledger, readable by its owner only."""
        documents = [
            {"names": sorted(one.names), "releases": list(one.releases.values())}
            for one in {id(d): d for d in self._documents.values()}.values()
        ]
        record = {"salt": self._salt.hex(), "documents": documents}
        with files.atomic_write(self.path, permissions=0o600) as file:
            json.dump(record, file)
            file.write("\n")


_SALT = 32  # bytes


def _documents(record: dict[str, Any]) -> Iterator[tuple[list[str], list[Any]]]:
    """Names and rows of each document; ledgers of earlier versions have rows under each name apart.

    Raises:
      ValueError: they are of another form.
    """
    if "documents" in record:
        found = [(one["names"], one["releases"]) for one in record["documents"]]
    else:
        found = [([name], rows) for name, rows in record["spent"].items()]
    for names, rows in found:
        if not names or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{names!r} are no names")
        if not isinstance(rows, list):
            raise ValueError(f"{rows!r} are no releases")
        yield names, rows


def _entry(row: Any) -> Entry:
    """A release as it was written.

    Raises:
      ValueError: it is none.
    """
    if not isinstance(row, list) or not 2 <= len(row) <= len(Entry._fields):
        raise ValueError(f"{row!r} is no release")
    found = Entry(*row)
    number = isinstance(found.epsilon, (int, float)) and not isinstance(found.epsilon, bool)
    if not number or not 0 < found.epsilon < math.inf:
        raise ValueError(f"epsilon {found.epsilon!r} of a release is no positive number")
    words = (found.method, found.sampler, found.token)
    if not all(isinstance(word, str) for word in words) or not isinstance(found.insecure, bool):
        raise ValueError(f"{row!r} is no release")
    return found


def lock_of(path: pathlib.Path) -> pathlib.Path:
    """The file whose lock holds a ledger."""
    return path.with_name(path.name + ".lock")


@contextlib.contextmanager
def opened(path: pathlib.Path, splitter: str = "sentencex") -> Iterator[Ledger]:
    """The ledger, held alone: a second release at the same time waits, so neither overlooks the other."""
    path = path.resolve()  # a link is followed: one ledger has one lock, and is itself replaced
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(lock_of(path), "a"))
        except OSError as error:
            raise InputError(
                f"ledger {path} cannot be written ({error.strerror}); give another --ledger"
            ) from error
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Ledger(path, splitter)
