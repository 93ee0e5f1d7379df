"""Whether documents to be released are the texts that a fit calls public: told by their sentences, not by file names.

Candidates that are private sentences void the guarantee. What is found depends on private text: it is for whoever
releases, and for nobody else.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from trainers.common.errors import InputError
from trainers.common.wording import counted
from trainers.documents import sentences
from trainers.documents.data import Documents

# Shorter sentences ("Dear Sir or Madam", "Thank you very much") are anybody's: that two texts share them tells nothing.
LEAST_BYTES = 24
_MOST_SHARED = 0.5


class Shared(NamedTuple):
    """Different sentences in common, of how many, and the ids of documents that mostly consist of such."""

    sentences: int
    of: int
    documents: list[str]


def digests(texts: Iterable[str], *, splitter: str) -> np.ndarray:
    """64 bits of each different sentence by letters and digits, sorted; short ones are left out."""
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *(_of(text, splitter) for text in texts)]))


def _of(text: str, splitter: str) -> np.ndarray:
    said = ("".join(c for c in s.lower() if c.isalnum()) for s in sentences.split(text, splitter=splitter))
    keys = {s.encode("utf-8", "surrogatepass") for s in said}
    found = b"".join(hashlib.blake2b(k, digest_size=8).digest() for k in keys if len(k) >= LEAST_BYTES)
    return np.frombuffer(found, "<u8").astype(np.uint64)


def require_private(documents: Documents, public: np.ndarray, *, splitter: str, what: str) -> Shared:
    """What `documents` have in common with a fit's texts, of which `public` are the digests.

    Raises:
      InputError: most sentences of the one are sentences of the other.
    """
    each = [_of(text, splitter) for text in documents.texts]
    own = np.unique(np.concatenate([np.zeros(0, np.uint64), *each]))
    shared = len(np.intersect1d(own, public, assume_unique=True))
    if shared > _MOST_SHARED * min(len(own), len(public)):
        raise InputError(
            f"{shared:,} of {counted(len(own), 'different sentence')} here are among the {len(public):,} that {what} "
            "was fitted with as public: what is private cannot be public too; fit with other texts, or leave out "
            "documents that are public"
        )
    mostly = [len(one) and np.isin(one, public).mean() > _MOST_SHARED for one in each]
    return Shared(shared, len(own), [name for name, is_public in zip(documents.ids, mostly) if is_public])
