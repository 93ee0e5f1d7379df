"""The JSON schema of a privacy statement (privacy.json). A change of meaning changes the version."""

from typing import Any

SCHEMA_NAME = "jaxpriv-privacy-statement"
SCHEMA_VERSION = 1

_NUMBER = {"anyOf": [{"type": "number", "minimum": 0}, {"const": "inf"}]}
_NUMBER_OR_NONE = {"anyOf": [*_NUMBER["anyOf"], {"type": "null"}]}
_TEXT_OR_NONE = {"type": ["string", "null"]}
_TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1}}
_COUNT_OR_NONE = {"type": ["integer", "null"], "minimum": 0}

_CORRELATED = {
    "type": "object",
    "required": [
        "kind",
        "structure",
        "noise_multiplier",
        "num_rounds",
        "min_separation",
        "rounds_between",
        "max_participations",
        "restarts",
        "squared_sensitivity",
        "sensitivity_is_exact",
        "sensitivity_how",
        "rho",
    ],
    "properties": {
        "kind": {
            "enum": [
                "TreeAggregation",
                "MatrixMechanism",
                "QuantileEstimation",
                "SecureAggregation",
                "DistributedDiscreteGaussian",
            ],
        },
        "structure": {"type": "string"},
        "noise_multiplier": _NUMBER,
        "num_rounds": {"type": "integer", "minimum": 0},
        "min_separation": {"type": "integer", "minimum": 1},
        "rounds_between": {"type": "integer", "minimum": 0},
        "max_participations": {"type": "integer", "minimum": 0},
        "restarts": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "squared_sensitivity": {"type": "number", "minimum": 0},
        "sensitivity_is_exact": {"type": "boolean"},
        "sensitivity_how": {"type": "string"},
        "rho": _NUMBER,
        # Of a statement over several runs or stages: which one, and its settings. Absent where there is one.
        "part": {"type": "string", "minLength": 1},
        "clip_norm": _NUMBER,
        "clip_adapts": {"type": "boolean"},
        "report_goal": {"type": "integer", "minimum": 1},
        # With adaptive clipping: whose noise, and the multiplier that updates and bits come to together.
        "noise_on": {"enum": ["updates", "bits"]},
        "whole_noise_multiplier": _NUMBER,
    },
}
_PURE = {
    "type": "object",
    "required": ["kind", "epsilon_of_one_release", "releases", "bounded_range", "rho"],
    "properties": {
        "kind": {"const": "PureDP"},
        "epsilon_of_one_release": _NUMBER,
        "releases": {"type": "integer", "minimum": 0},
        "bounded_range": {"type": "boolean"},
        "rho": _NUMBER,
    },
}
_MECHANISMS = {"type": "array", "items": {"anyOf": [_CORRELATED, _PURE]}}
_OBSERVED = {
    "type": ["object", "null"],
    "required": [
        "num_rounds",
        "num_devices",
        "min_separation",
        "max_participations",
        "squared_sensitivity",
        "rho",
        "epsilon",
    ],
    "properties": {
        "num_rounds": {"type": "integer", "minimum": 0},
        "num_devices": {"type": "integer", "minimum": 0},
        "min_separation": _COUNT_OR_NONE,
        "max_participations": {"type": "integer", "minimum": 0},
        "squared_sensitivity": {"type": "number", "minimum": 0},
        "rho": _NUMBER,
        "epsilon": _NUMBER,
    },
}
_DEPLOYMENT = {
    "type": ["object", "null"],
    "required": [
        "report_goal",
        "population",
        "noise_multiplier",
        "min_separation",
        "max_participations",
        "rho",
        "epsilon",
        "sentence",
    ],
    "properties": {
        "report_goal": {"type": "integer", "minimum": 1},
        "population": {"type": "integer", "minimum": 1},
        "noise_multiplier": _NUMBER,
        "min_separation": {"type": "integer", "minimum": 1},
        "max_participations": {"type": "integer", "minimum": 0},
        "rho": _NUMBER,
        "epsilon": _NUMBER,
        "sentence": {"type": "string"},
    },
}

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": SCHEMA_NAME,
    "type": "object",
    "additionalProperties": False,
    "required": [
        "schema",
        "version",
        "simulation",
        "sentence",
        "unit",
        "adjacency",
        "adjacency_in_words",
        "rho",
        "epsilon",
        "delta",
        "epsilon_printed",
        "conversion",
        "mechanisms",
        "clip_norm",
        "report_goal",
        "estimator",
        "observed",
        "deployment",
        "covered",
        "not_covered",
        "assumptions",
        "notes",
        "software",
    ],
    "properties": {
        "schema": {"const": SCHEMA_NAME},
        "version": {"const": SCHEMA_VERSION},
        "simulation": {"type": "boolean"},
        "sentence": {"type": "string", "minLength": 20},
        "unit": {"type": "string", "minLength": 1},
        "adjacency": {"enum": ["zero-out", "add-remove", "replace-one", None]},
        "adjacency_in_words": _TEXT_OR_NONE,
        "rho": _NUMBER_OR_NONE,
        "epsilon": _NUMBER_OR_NONE,
        "delta": {"anyOf": [{"type": "number", "minimum": 0, "exclusiveMaximum": 1}, {"type": "null"}]},
        "epsilon_printed": {"type": "string"},
        "conversion": _TEXT_OR_NONE,
        "mechanisms": _MECHANISMS,
        # Where units took part in different things: what others did instead. Absent where all did the same.
        "alternatives": {"type": "array", "items": _MECHANISMS, "minItems": 1},
        # The part of delta that draws near their exact laws take; absent where there is none.
        "approximation": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "clip_norm": _NUMBER_OR_NONE,
        "report_goal": _COUNT_OR_NONE,
        "estimator": _TEXT_OR_NONE,
        "observed": _OBSERVED,
        "deployment": _DEPLOYMENT,
        "covered": _TEXTS,
        "not_covered": _TEXTS,
        "assumptions": _TEXTS,
        "notes": _TEXTS,
        "software": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
