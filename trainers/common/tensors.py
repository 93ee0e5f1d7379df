"""safetensors files: named arrays and text beside them."""

from collections.abc import Mapping

import numpy as np

from trainers.common import files


def write(path: files.PathLike, arrays: Mapping[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes the file, whole or not at all."""
    from safetensors.numpy import save

    with files.atomic_write(path, "wb") as file:
        file.write(save(dict(arrays), metadata=metadata))


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
