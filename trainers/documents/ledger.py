"""What each document has spent: a private file that counts releases, so that epsilons add up."""

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import pathlib
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

from trainers.common import files
from trainers.common.errors import InputError


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


def folded(text: str) -> str:
    """A text as far as its sentences can tell: Unicode NFC, any run of white space one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


class Ledger:
    """Releases by document: a document is known by its id, and by a keyed digest of its text.

    The same text under another id, and another text under the same id, both count as that document again.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        if path.is_dir():
            raise InputError(f"ledger {path} is a folder; give a file")
        if path.is_file():
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                self._salt = bytes.fromhex(record["salt"])
                self._spent = {
                    # Without a token nobody knows which releases two names share: all of them count.
                    k: [
                        e if e.token else e._replace(token=f"{k} {i}")
                        for i, e in enumerate(Entry(*e) for e in v)
                    ]
                    for k, v in record["spent"].items()
                }
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(
                    f"ledger {path} is damaged ({error}): restore it, since without it nobody knows what was spent"
                ) from error
        else:
            self._salt, self._spent = os.urandom(32), {}

    def _names(self, document_id: str, text: str) -> tuple[str, ...]:
        def name(kind: str, value: str) -> str:
            data = f"{kind}\0{value}".encode("utf-8", "surrogatepass")
            return hmac.new(self._salt, data, hashlib.sha256).hexdigest()[:32]

        return name("id", document_id), name("text", text), name("folded", folded(text))

    def spent(self, document_id: str, text: str) -> list[Entry]:
        """Earlier releases of this document, under its id, its text or both; each counts once."""
        return list(
            {e.token: e for n in self._names(document_id, text) for e in self._spent.get(n, [])}.values()
        )

    def add(self, document_id: str, text: str, entry: Entry) -> None:
        """Counts one more release."""
        before, entry = self.spent(document_id, text), entry._replace(token=os.urandom(8).hex())
        for name in self._names(document_id, text):
            self._spent[name] = [*before, entry]

    def write(self) -> None:
        """Writes the whole ledger, readable by its owner only."""
        record = {"salt": self._salt.hex(), "spent": self._spent}
        with files.atomic_write(self.path, permissions=0o600) as file:
            json.dump(record, file)
            file.write("\n")


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[Ledger]:
    """The ledger, held alone: a second release at the same time waits, so neither overlooks the other."""
    path = path.resolve()  # a link is followed: one ledger has one lock, and is itself replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Ledger(path)
