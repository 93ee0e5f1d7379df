"""safetensors files: named arrays and text beside them. The same contents make the same bytes."""

import json
from collections.abc import Mapping

import numpy as np

from trainers.common import files


def write(path: files.PathLike, arrays: Mapping[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes the file, whole or not at all."""
    from safetensors.numpy import save

    with files.atomic_write(path, "wb") as file:
        file.write(_in_order(save(dict(arrays), metadata=metadata)))


def _in_order(whole: bytes) -> bytes:
    """The same file with the names in its header sorted: the package writes metadata in a random order."""
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.dumps(json.loads(whole[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the arrays begin at a multiple of 8
    return len(header).to_bytes(8, "little") + header + whole[end:]


def read(path: files.PathLike) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the metadata.

    Raises:
      ValueError: with the reason why the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (SafetensorError, OSError, OverflowError) as error:
        raise ValueError(str(error)) from error
