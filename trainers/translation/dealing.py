"""Who holds what: domains dealt to clients as in the paper's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainers.common.errors import InputError


class Share(NamedTuple):
    """A client's pairs, as `(domain, index)` into the domains' train pairs, and the domain it is judged
    by.
    """

    name: str
    domain: str
    members: list[tuple[str, int]]


def parse(setting: str) -> tuple[str, float]:
    """`non_iid`, `iid`, `non_iid:6`, `iid:12` or `alpha:0.4` as a kind and its number (clients, or the
    ratio).
    """
    match = re.fullmatch(r"(non_iid|iid)(?::([1-9]\d{0,5}))?|(alpha):([01](?:\.0*)?|0?\.\d+)", setting)
    if match is None:
        raise InputError(
            f"unknown setting {setting!r}: use non_iid, iid, non_iid:N, iid:N (N clients, at least one) or "
            "alpha:X (0 to 1)"
        )
    if match[3]:
        return "alpha", float(match[4])
    return match[1], float(match[2] or 0)


def by_domain(setting: str, domains: int) -> bool:
    """Whether every client holds all pairs of one domain, so that who holds a pair depends on that pair alone."""
    kind, number = parse(setting)
    return kind == "non_iid" and int(number) in (0, domains)


def deal(setting: str, sizes: Mapping[str, int], *, seed: int) -> list[Share]:
    """Deals the domains' pairs to clients.

    non_iid: a domain a client; with N clients each domain is cut in N / domains parts. iid: all pairs mixed
    and cut in N equal parts (N defaults to the number of domains). alpha: a ratio of each domain is mixed and
    dealt out equally, the rest stays with its domain's client (Section 4.4 of the paper).

    Raises:
      InputError: an unknown setting; N is not a multiple of the number of domains; a client would have no
      pair.
    """
    kind, number = parse(setting)
    domains = list(sizes)
    rng = np.random.default_rng([seed, 7])
    order = {d: rng.permutation(sizes[d]).tolist() for d in domains}
    if kind == "alpha":
        mixed = [(d, i) for d in domains for i in order[d][: round(number * sizes[d])]]
        mixed = [mixed[i] for i in rng.permutation(len(mixed))]
        shares = []
        for n, d in enumerate(domains):
            own = [(d, i) for i in order[d][round(number * sizes[d]) :]]
            shares.append(Share(d, d, own + mixed[n :: len(domains)]))
        return _checked(setting, shares)
    clients = int(number) or len(domains)
    if clients % len(domains):
        raise InputError(f"setting {setting}: clients must be a multiple of the {len(domains)} domains")
    parts = clients // len(domains)
    if kind == "non_iid":
        shares = [
            Share(d if parts == 1 else f"{d}-{n + 1}", d, [(d, i) for i in order[d][n::parts]])
            for d in domains
            for n in range(parts)
        ]
    else:
        everything = [(d, i) for d in domains for i in order[d]]
        everything = [everything[i] for i in rng.permutation(len(everything))]
        shares = [
            Share(f"mixed-{n + 1}", domains[n % len(domains)], everything[n::clients]) for n in range(clients)
        ]
    return _checked(setting, shares)


def _checked(setting: str, shares: Sequence[Share]) -> list[Share]:
    empty = [s.name for s in shares if not s.members]
    if empty:
        shown = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        raise InputError(f"setting {setting}: {shown} would have no pair; use fewer clients")
    return list(shares)
