"""Command lines built by tyro from config dataclasses, with one-line errors and a JSON last line."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from trainers.common import files, metrics
from trainers.common.errors import InputError

C = TypeVar("C")
_PATIENCE = 7 * 24 * 3600  # seconds
_MOST_DEVICES = 1024


def choose(area: str, commands: Mapping[str, str], argv: Sequence[str]) -> str | None:
    """The command that `argv` begins with; None when help was asked for, which is then printed.

    Raises:
      InputError: it is none of `commands` (name -> what it does).
    """
    if not argv or argv[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:<10} {text}" for name, text in commands.items())
        print(f"usage: jaxpriv {area} COMMAND [OPTIONS]\n\ncommands:\n{rows}")
        return None
    if argv[0] not in commands:
        raise InputError(f"unknown command {argv[0]!r}; choose one of {', '.join(commands)}")
    return argv[0]


def prepare_devices(devices: int | None, processes: int = 1) -> None:
    """Splits a CPU into as many devices as are asked for (None: two, if it has two cores and the process is alone),
    before jax starts."""
    if devices is not None and not 1 <= devices <= _MOST_DEVICES:  # splitting a CPU takes memory for each
        raise InputError(f"--devices must be at least 1 and at most {_MOST_DEVICES}, got {devices}")
    if "jax" in sys.modules:
        return
    count = devices or (1 if processes > 1 else min(2, os.cpu_count() or 1))
    flags = {"xla_force_host_platform_device_count": count}
    if processes > 1 or (devices or 1) > 1:
        # How long devices wait for one another at a sum: as long as another's clients or an evaluation take.
        flags |= {
            "xla_cpu_collective_call_terminate_timeout_seconds": _PATIENCE,
            "xla_cpu_collective_call_warn_stuck_timeout_seconds": _PATIENCE,
            "xla_cpu_collective_timeout_seconds": _PATIENCE,
        }
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in flags.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()


def keep_compilations() -> None:
    """Keeps compiled programs in the user's cache: a resumed run and the next one find them again."""
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:  # not a declared attribute
        place = files.cache_dir("xla")
        with contextlib.suppress(OSError):  # somebody else's, or a file system without permissions
            place.chmod(0o700)  # should a program ever hold what is private as a constant
        jax.config.update("jax_compilation_cache_dir", str(place))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def parse(
    config: type[C], argv: Sequence[str], *, prog: str, presets: Mapping[str, C], description: str
) -> C:
    """Reads `argv` into a config; `--preset NAME` chooses the defaults that the other options change.

    Raises:
      InputError: unknown option or value, as one line. `--help` prints and exits with 0.
    """
    import tyro

    rest, name = list(argv), next(iter(presets))
    for i, word in enumerate(rest):
        if word == "--preset" or word.startswith("--preset="):
            if word == "--preset" and i + 1 == len(rest):
                raise InputError(f"{prog}: --preset needs a name: one of {', '.join(presets)}")
            name = rest[i + 1] if word == "--preset" else word.partition("=")[2]
            del rest[i : i + (2 if word == "--preset" else 1)]
            break
    if name not in presets:
        raise InputError(f"{prog}: unknown preset {name!r}; choose one of {', '.join(presets)}")
    listed = f"{description}\n\n--preset {{{','.join(presets)}}} chooses the defaults below (now: {name})."
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(
                config,
                args=rest,
                default=presets[name],
                prog=prog,
                description=listed,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        from accounting.options import one_line  # numpy comes with it

        raise InputError(f"{prog}: {one_line(captured.getvalue())}") from None


def finish(result: dict[str, Any], *, as_json: bool, text: str) -> None:
    """Prints a command's outcome: the text for a person, if any, or with `--json` one object as the last line."""
    if text:
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)
    if as_json:
        print(json.dumps(metrics.plain(result), allow_nan=False), flush=True)
