"""A privacy statement's JSON in words (privacy.md)."""

from collections.abc import Mapping, Sequence
from typing import Any


def render(data: Mapping[str, Any]) -> str:
    """Returns Markdown that says everything `data` says."""
    from accounting.statement import round_up

    def number(value: Any) -> str:
        if value is None:
            return "none"
        return value if isinstance(value, str) else round_up(float(value))

    lines = ["# Privacy statement", ""]
    if data["simulation"]:
        lines += [
            "**Simulation, no guarantee.** The noise came from a public seed: who knows it can subtract it.",
            "",
        ]
    lines += [f"> {data['sentence']}", ""]
    if data["epsilon"] is None:
        lines += ["Epsilon: none.", ""]
    else:
        pairs = [
            ("Protected unit", data["unit"]),
            ("Adjacency", f"{data['adjacency']}: {data['adjacency_in_words']}"),
            ("zCDP rho", number(data["rho"])),
            ("Epsilon", f"{data['epsilon_printed']} at delta = {data['delta']:g}"),
            ("Part of delta for draws near their exact laws", _general(data.get("approximation"))),
            ("Conversion", data["conversion"]),
            ("Clip norm C", None if data["clip_norm"] is None else f"{data['clip_norm']:g}"),
            ("Report goal (devices a round)", data["report_goal"]),
            ("Prefix estimator (post-processing)", data["estimator"]),
        ]
        lines += ["| | |", "| --- | --- |"]
        lines += [f"| {name} | {value} |" for name, value in pairs if value is not None] + [""]
    for mechanism in data["mechanisms"]:
        lines += _mechanism(mechanism, number)
    for position, others in enumerate(data.get("alternatives", ()), 1):
        lines += [
            f"What other {data['unit']}s took part in instead ({position} of {len(data['alternatives'])}); epsilon and "
            "rho above are the largest of any:",
            "",
        ]
        for mechanism in others:
            lines += _mechanism(mechanism, number)
    if data["observed"]:
        seen = data["observed"]
        separation = seen["min_separation"]
        lines += [
            "## What the participation log shows",
            "",
            f"{seen['num_rounds']} released rounds, {seen['num_devices']} devices took part; at most "
            f"{seen['max_participations']} participations of one device, "
            + (
                "no device twice."
                if separation is None
                else f"least separation b = {separation} ({separation - 1} rounds strictly between)."
            ),
            f"The costliest device's actual schedule has squared sensitivity "
            f"{seen['squared_sensitivity']:.12g}: "
            f"rho {number(seen['rho'])}, epsilon {number(seen['epsilon'])} at delta = {data['delta']:g}. "
            "The guarantee above is the worst case over every schedule that was allowed.",
            "",
        ]
    if data["deployment"]:
        lines += [
            "## The same noise per client at deployment scale",
            "",
            f"Not a guarantee of this run. {data['deployment']['sentence']}",
            "",
        ]
    for title, name in (
        ("What is covered", "covered"),
        ("What is not covered", "not_covered"),
        ("Assumptions", "assumptions"),
        ("Notes", "notes"),
    ):
        if data[name]:
            lines += [f"## {title}", "", *(f"- {text}" for text in data[name]), ""]
    versions = ", ".join(f"{name} {version}" for name, version in data["software"].items())
    lines += [f"Computed by {versions}; schema {data['schema']} {data['version']}.", ""]
    return "\n".join(lines)


_WHOSE = {
    "updates": " of the updates",
    "bits": " of the clip bits (each +-1/2)",
}
_WHOLE = "z of the whole release (updates and bits together, 1/z^2 is the sum of theirs)"


def _general(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _mechanism(mechanism: Mapping[str, Any], number: Any) -> Sequence[str]:
    part = f" ({mechanism['part']})" if "part" in mechanism else ""
    title = [f"## Mechanism{part}: {mechanism['kind']}", ""]
    if mechanism["kind"] == "PureDP":
        law = "epsilon^2 / 8 (exponential mechanism)" if mechanism["bounded_range"] else "epsilon^2 / 2"
        return [
            *title,
            f"{mechanism['releases']} release{'' if mechanism['releases'] == 1 else 's'} of pure epsilon "
            f"{mechanism['epsilon_of_one_release']} each; "
            f"zCDP of one release {law}, together {number(mechanism['rho'])}.",
            "",
        ]
    whose = _WHOSE.get(mechanism.get("noise_on", ""), "")
    rows = [
        ("Structure", mechanism["structure"]),
        (f"Noise multiplier z{whose}", mechanism["noise_multiplier"]),
        ("Rounds", mechanism["num_rounds"]),
        (
            "Enforced separation",
            f"b = {mechanism['min_separation']} ({mechanism['rounds_between']} "
            f"round{'' if mechanism['rounds_between'] == 1 else 's'} strictly between)",
        ),
        ("Enforced participations", f"at most {mechanism['max_participations']}"),
        ("Restarts after rounds", ", ".join(map(str, mechanism["restarts"])) or "none"),
        (
            "Squared sensitivity (clip norm squared)",
            f"{mechanism['squared_sensitivity']:.12g}, {mechanism['sensitivity_how']}",
        ),
        ("zCDP rho", number(mechanism["rho"])),
    ]
    if "whole_noise_multiplier" in mechanism:
        rows.insert(2, (_WHOLE, f"{mechanism['whole_noise_multiplier']:.6g}"))
    if "clip_norm" in mechanism:
        start = " (at the start: it adapts)" if mechanism.get("clip_adapts") else ""
        rows.append((f"Clip norm C{start}", f"{mechanism['clip_norm']:g}"))
    if "report_goal" in mechanism:
        rows.append(("Report goal (devices a round)", mechanism["report_goal"]))
    names = {
        "completion": "Completion with virtual leaves",
        "count_stddev": "Standard deviation of the noised count of clip bits",
        "scale": "Secure aggregation scale",
        "dimension": "Secure aggregation dimension",
        "beta": "Secure aggregation rounding bias beta",
        "inflation": "Inflated L2 bound over C",
        "tau": "Correction tau for sums of discrete Gaussians",
        "bands": "Bands",
        "theta": "BLT decay",
        "omega": "BLT output scale",
    }
    rows += [(text, mechanism[key]) for key, text in names.items() if key in mechanism]
    return [*title, "| | |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows), ""]
