"""What ran: configuration, versions, devices and digests, written once at the start of a run."""

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import platform
from typing import Any

from trainers.common import files

PACKAGES = (
    "jaxpriv",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "dp-accounting",
    "numpy",
    "scipy",
)


def versions() -> dict[str, str]:
    """Installed versions of what a result may depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def config_dict(config: Any) -> dict[str, Any]:
    """A frozen dataclass as JSON values (paths as text, tuples as lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def write(
    run_dir: files.PathLike, *, command: str, config: Any, digests: dict[str, str], **facts: Any
) -> None:
    """Writes `config.json` and `manifest.json` into `run_dir`. Neither may hold a secret key.

    The manifest holds digests of private data, by which who has all but one record can test guesses of it: only the
    owner can read it.
    """
    import jax

    folder = pathlib.Path(run_dir)
    devices = jax.devices()
    record = {
        "command": command,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "platform": platform.platform(),
        "devices": {"kind": devices[0].device_kind, "count": len(devices), "processes": jax.process_count()},
        "digests": digests,
        **facts,
    }
    with files.atomic_write(folder / "manifest.json", permissions=0o600) as file:
        json.dump(record, file, indent=2)
        file.write("\n")
    with files.atomic_write(folder / "config.json") as file:  # last: a folder that has it is a whole run's
        json.dump(config_dict(config), file, indent=2)
        file.write("\n")
