"""What a comparison says: a table, the statement of its guarantee, and pictures."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainers.common import plots
from trainers.translation.corpora import Seen

NAMES = {
    "p_nmt": "P-NMT (public)",
    "c_nmt": "C-NMT (all text together)",
    "fedavg_1": "FedAvg_1",
    "fedavg_inf": "FedAvg_inf",
    "fedavg_1_server": "FedAvg_1 + server data",
    "fedavg_inf_server": "FedAvg_inf + server data",
    "ft_ensemble": "FT-Ensemble",
    "ft": "FT (own domain)",
    "ak_mt": "AK-MT (own memory)",
    "fednn": "FedNN",
    "fednn_fixed": "FedNN, fixed weight",
}

GUARANTEE = {
    "p_nmt": "epsilon: none (trained on what is given as public alone, which the operator answers for)",
    "fednn": "epsilon: none (PQ codes are compression; the shuffle hides whose a record is, not between two members "
    "nor from a server with a member's help; encryption keeps the server out, but for how many records each sends; "
    "none of them is differential privacy)",
}
NO_GUARANTEE = "epsilon: none (models trained on private text are exchanged as they are)"
LOCAL = "epsilon: none (nothing leaves the client, so nothing is claimed about it)"


GUARANTEE["fednn_fixed"] = (
    GUARANTEE["fednn"] + "; its weight is tuned on the clients' validation pairs, which is counted nowhere"
)


LEAST_BLEU = 2.0
"""A table without a score of so much compares nothing: what is left is chance."""


def guarantees(methods: Sequence[str]) -> dict[str, str]:
    """The guarantee of each method, in words."""
    return {m: GUARANTEE.get(m, LOCAL if m in ("ft", "ak_mt") else NO_GUARANTEE) for m in methods}


def statement(
    methods: Sequence[str], key_encryption: str, shared: Mapping[str, int], seen: Seen | None = None
) -> str:
    """The privacy statement of a run, as text: what is protected from whom, and what is not.

    Args:
      shared: train pairs of each client that are among the public ones. seen: of what a public model made elsewhere was
        trained on; None if the run made its own.
    """
    also = ", ".join(f"{name} {count:,}" for name, count in shared.items() if count)
    lines = [
        "# What this run guarantees",
        "",
        "Differential privacy: none. epsilon: none for every method below.",
        "",
        *(f"- {NAMES[m]}: {text}" for m, text in guarantees(methods).items()),
        "",
        f"K-encryption ({key_encryption}) is deterministic and known to every member: whoever holds the public model "
        "and the codebook can encode a guessed sentence and look for its codes, and finds every one that is there.",
        "Content encryption keeps records from the server as long as no member gives it the round's key.",
        "Shuffling hides which client a record came from, except where its content tells, and only among three members "
        "or more: each knows its own records, so that of two the rest is the other's. A server and a member that work "
        "together know whose every record is. The server sees how many records each client sends.",
        "The Meta-k network is trained on the pairs given as public only. "
        + (
            f"Clients have train pairs in common with these (letters and digits agree): {also}."
            if also
            else "No train pair of a client is among these."
        ),
        *([] if seen is None else [_made_elsewhere(seen)]),
        "Scores were computed on test sets that were used for nothing else"
        + (" here." if seen is not None and (seen.test or not seen.known) else "."),
    ]
    return "\n".join(lines) + "\n"


def _made_elsewhere(seen: Seen) -> str:
    if not seen.known:
        return (
            "The public model was made elsewhere (--public-model), and its folder does not say of what: that it has "
            "seen no pair of anyone here is the operator's word."
        )
    also = ", ".join(f"{name} {count:,}" for name, count in seen.train.items() if count)
    return (
        "The public model was made elsewhere (--public-model). Of what it was trained on, "
        + (f"clients have train pairs in common: {also}" if also else "no train pair of a client is a part")
        + f"; {f'{seen.test:,}' if seen.test else 'no'} test pairs have a side in it."
    )


def mean_scores(records: Sequence[Mapping[str, Any]], setting: str, score: str = "bleu") -> dict[str, dict]:
    """Means over trials: `{method: {domain: score}}` of one setting."""
    out: dict[str, dict[str, list[float]]] = {}
    for r in records:
        if r["setting"] == setting:
            for domain, value in r[score].items():
                out.setdefault(r["method"], {}).setdefault(domain, []).append(value)
    return {m: {d: float(np.mean(v)) for d, v in row.items()} for m, row in out.items()}


def _spread(records: Sequence[Mapping[str, Any]], method: str, domain: str) -> str:
    """Standard deviation of a method's BLEU over trials, as it stands behind the mean."""
    values = [r["bleu"][domain] for r in records if r["method"] == method and domain in r["bleu"]]
    return f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""


def break_even(records: Sequence[Mapping[str, Any]], setting: str) -> float | None:
    """Rounds of FedAvg (one: FedAvg_inf) that take as many bytes, up and down, as FedNN's exchange."""
    spent = {
        r["method"]: r["bytes_up"] + r["bytes_down"]
        for r in records
        if r["setting"] == setting and r["bytes_up"]
    }
    once = spent.get("fedavg_inf", spent.get("fedavg_inf_server"))
    return spent["fednn"] / once if once and "fednn" in spent else None


def _mean_of_clients(row: Mapping[str, float]) -> float | None:
    own = [v for d, v in row.items() if d != "general" and "/" not in d]
    return float(np.mean(own)) if own else None


def table(records: Sequence[Mapping[str, Any]], setting: str, signature: str) -> str:
    """A Markdown table of BLEU (chrF) by method and domain, with the cost of each."""
    bleu, chrf = mean_scores(records, setting), mean_scores(records, setting, "chrf")
    if not bleu:
        return ""
    domains = list(dict.fromkeys(d for row in bleu.values() for d in row))
    records = [r for r in records if r["setting"] == setting]
    head = [
        "method",
        "trials",
        *domains,
        "mean of clients",
        "up, MB",
        "down, MB",
        "train, CPU s",
        "PFLOP",
        "tokens/s",
    ]
    lines = [
        f"Setting {setting}, BLEU ± standard deviation over trials (chrF)",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    for method, row in bleu.items():
        mine = [r for r in records if r["method"] == method]
        cells = [NAMES[method], str(len(mine))]
        cells += [
            f"{row[d]:.2f}{_spread(mine, method, d)} ({chrf[method][d]:.1f})" if d in row else ""
            for d in domains
        ]
        mean = _mean_of_clients(row)
        cells.append("" if mean is None else f"{mean:.2f}")
        cells.append(f"{np.mean([r['bytes_up'] for r in mine]) / 1e6:.1f}")
        cells.append(f"{np.mean([r['bytes_down'] for r in mine]) / 1e6:.1f}")
        cells.append(f"{np.mean([r['seconds'] for r in mine]):.0f}")
        cells.append(f"{np.mean([r['flops'] for r in mine]) / 1e15:.3f}")
        cells.append(f"{np.mean([r['tokens_per_second'] for r in mine]):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    if max(score for row in bleu.values() for score in row.values()) < LEAST_BLEU:
        lines += [
            "",
            f"No BLEU here reaches {LEAST_BLEU:g}: the models are hardly trained, the scores mean nothing.",
        ]
    lines += [
        "",
        f"BLEU: {signature}",
        "up and down: bytes of one exchange, all clients together; training seconds",
    ]
    lines[-1] += (
        " are those of this call (0 where a cached model was used); tokens a CPU second with compilation."
    )
    rounds = break_even(records, setting)
    if rounds is not None:
        lines.append(f"FedNN's one exchange takes the bytes of {rounds:.1f} rounds of FedAvg.")
    return "\n".join(lines) + "\n"


def pictures(records: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> list[pathlib.Path]:
    """Bars of the first setting, and curves over clients and over the mixing ratio where they were run."""
    made = []
    settings = list(dict.fromkeys(r["setting"] for r in records))
    first = mean_scores(records, settings[0])
    figure, (axis,) = plots.figure(1, width=8.0)
    domains = [d for d in dict.fromkeys(d for row in first.values() for d in row) if "/" not in d]
    width = 0.8 / max(len(first), 1)
    for i, (method, row) in enumerate(first.items()):
        places = [n + i * width for n, d in enumerate(domains) if d in row]
        axis.bar(places, [row[d] for d in domains if d in row], width, label=NAMES[method])
    axis.set_xticks([n + 0.4 for n in range(len(domains))], domains)
    axis.set_ylabel("BLEU")
    axis.set_title(settings[0], fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    plots.save(figure, folder / "bleu.png")
    made.append(folder / "bleu.png")

    def curve(prefix: str, first_name: str, number, name: str, xlabel: str) -> None:
        chosen = [s for s in settings if s == first_name or s.startswith(prefix)]
        if len(chosen) < 2:
            return
        figure, axes = plots.figure(2)
        for axis, what in zip(axes, ("clients", "general")):
            series: dict[str, tuple[list[float], list[float]]] = {}
            for setting in sorted(chosen, key=number):
                for method, row in mean_scores(records, setting).items():
                    value = _mean_of_clients(row) if what == "clients" else row.get("general")
                    if value is not None:
                        x, y = series.setdefault(NAMES[method], ([], []))
                        x.append(number(setting))
                        y.append(value)
            plots.curves(axis, series, xlabel=xlabel, ylabel=f"BLEU, {what}")
        plots.save(figure, folder / name)
        made.append(folder / name)

    def clients(setting: str) -> float:
        return float(setting.partition(":")[2] or len([d for d in domains if d != "general"]))

    curve("non_iid:", "non_iid", clients, "clients_non_iid.png", "clients (parts of one domain each)")
    curve("iid:", "iid", clients, "clients_iid.png", "clients (parts of the mix)")
    curve("alpha:", "", lambda s: float(s.partition(":")[2]), "alpha.png", "mixing ratio alpha")
    return made
