"""Small run folders for the tests of `accounting.report`, and what a valid statement is."""

import json

import jsonschema

import accounting
from accounting.statement_schema import SCHEMA


def facts(**more):
    """A record of 12 rounds with two devices each, b = 3, k = 4."""
    return accounting.RunRecord(
        **{
            "mechanism": "tree_reduced",
            "noise_multiplier": 2.0,
            "num_rounds": 12,
            "min_separation": 3,
            "max_participations": 4,
            "adjacency": "zero-out",
            "delta": 1e-6,
            "report_goal": 2,
            "clip": {"kind": "fixed", "norm": 0.5},
            **more,
        }
    )


def schedule(t):
    """Eight devices in turn, so that everyone returns after four rounds."""
    return [f"d{(2 * t) % 8}", f"d{(2 * t + 1) % 8}"]


def write(folder, run, rounds=12, devices=schedule):
    """Writes a run folder, whatever it held before, and returns it."""
    (folder / "participation.jsonl").unlink(missing_ok=True)
    accounting.write_mechanism(folder, run)
    log = accounting.ParticipationLog(folder)
    for t in range(rounds):
        log.append(t, devices(t))
    log.close()
    return folder


def valid(statement):
    """A statement's data as its JSON gives them; fails where the schema does not hold."""
    data = json.loads(statement.json())
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(data, SCHEMA)
    return data
