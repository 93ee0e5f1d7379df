"""`jaxpriv keyboard`: train, evaluate, compare."""

import os
import sys

from trainers.common import command
from trainers.common.errors import InputError

COMMANDS = {
    "train": "train a private model, with its guarantee, pictures and baselines",
    "evaluate": "score the model of a run folder on test clients again",
    "compare": "draw several runs on one picture",
}


def main(argv: list[str]) -> int:
    """Runs `jaxpriv keyboard COMMAND`; returns the exit status."""
    name, rest = command.choose("keyboard", COMMANDS, argv), argv[1:]
    if name is None:
        return 0
    from trainers.keyboard import config as settings

    presets = {
        "train": settings.PRESETS,
        "evaluate": {"default": settings.EvaluateConfig()},
        "compare": {"default": settings.CompareConfig()},
    }[name]
    kind = type(next(iter(presets.values())))
    config = command.parse(
        kind, rest, prog=f"jaxpriv keyboard {name}", presets=presets, description=kind.__doc__ or ""
    )
    prepare_devices(getattr(config, "devices", None))
    command.keep_compilations()
    from trainers.keyboard import session

    run = {"train": session.train, "evaluate": session.evaluate_run, "compare": session.compare}[name]
    result, text = run(config)
    command.finish(result, as_json=config.json, text=text)  # pyright: ignore[reportAttributeAccessIssue]
    return 0


def prepare_devices(devices: int | None) -> None:
    """Splits a CPU into as many devices as are asked for (None: two, if it has two cores), before jax starts."""
    if devices is not None and devices < 1:
        raise InputError(f"--devices must be at least 1, got {devices}")
    count = devices or min(2, os.cpu_count() or 1)
    flag = "--xla_force_host_platform_device_count"
    if "jax" not in sys.modules and flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={count}".strip()
