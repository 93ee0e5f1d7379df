"""`jaxpriv keyboard`: train, evaluate, compare."""

import os
import sys

from trainers.common import command, files
from trainers.common.errors import InputError

COMMANDS = {
    "train": "train a private model, with its guarantee, pictures and baselines",
    "evaluate": "score the model of a run folder on test clients again",
    "compare": "draw several runs on one picture",
}


def main(argv: list[str]) -> int:
    """Runs `jaxpriv keyboard COMMAND`; returns the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
        print(f"usage: jaxpriv keyboard COMMAND [OPTIONS]\n\ncommands:\n{rows}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        raise InputError(f"unknown command {name!r}; choose one of {', '.join(COMMANDS)}")
    return {"train": _train, "evaluate": _evaluate, "compare": _compare}[name](rest)


def _train(argv: list[str]) -> int:
    from trainers.keyboard.config import PRESETS, Config

    config = command.parse(
        Config, argv, prog="jaxpriv keyboard train", presets=PRESETS, description=Config.__doc__ or ""
    )
    prepare_devices(config.devices)
    from trainers.keyboard import session

    result, text = session.train(config)
    command.finish(result, as_json=config.json, text=text)
    return 0


def _evaluate(argv: list[str]) -> int:
    from trainers.keyboard.config import EvaluateConfig

    config = command.parse(
        EvaluateConfig,
        argv,
        prog="jaxpriv keyboard evaluate",
        presets={"default": EvaluateConfig()},
        description=EvaluateConfig.__doc__ or "",
    )
    prepare_devices(1)
    from trainers.keyboard import session

    result, text = session.evaluate_run(config)
    command.finish(result, as_json=config.json, text=text)
    return 0


def _compare(argv: list[str]) -> int:
    from trainers.keyboard.config import CompareConfig

    config = command.parse(
        CompareConfig,
        argv,
        prog="jaxpriv keyboard compare",
        presets={"default": CompareConfig()},
        description=CompareConfig.__doc__ or "",
    )
    if not config.runs:
        raise InputError("--runs needs at least one run folder")
    from trainers.keyboard import session

    result, text = session.compare(config)
    command.finish(result, as_json=config.json, text=text)
    return 0


def prepare_devices(devices: int | None) -> None:
    """Splits a CPU into as many devices as are asked for (None: two, if it has two cores), before jax starts."""
    if devices is not None and devices < 1:
        raise InputError(f"--devices must be at least 1, got {devices}")
    # What one run compiled, its resumption and the next run find again.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(files.cache_dir("xla")))
    count = devices or min(2, os.cpu_count() or 1)
    flag = "--xla_force_host_platform_device_count"
    if "jax" not in sys.modules and flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={count}".strip()
