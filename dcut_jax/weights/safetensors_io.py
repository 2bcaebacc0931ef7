"""Reads and writes safetensors files (format: github.com/huggingface/safetensors)."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dcut_jax.weights.errors import CheckpointError

READABLE = ("F32", "F16", "BF16")


class TensorFiles(Mapping[str, np.ndarray]):
    """Tensors of one or several files by name, each read when it is asked for.

    Values are float32, float16 or (ml_dtypes) bfloat16, as stored.
    """

    def __init__(self, paths: Sequence[Path]):
        self._open: dict[Path, Any] = {}
        self._file: dict[str, Path] = {}
        for path in paths:
            self._open[path] = _open(path)
            for name in self._open[path].keys():
                if name in self._file:
                    raise CheckpointError(
                        f"{path}: tensor {name} is there twice; {self._file[name]} "
                        f"has it too"
                    )
                self._file[name] = path

    def __getitem__(self, name: str) -> np.ndarray:
        path = self._file[name]
        kind = self._open[path].get_slice(name).get_dtype()
        if kind not in READABLE:
            raise CheckpointError(
                f"{path}: tensor {name} is {kind}; expected one of "
                f"{', '.join(READABLE)} (quantised checkpoints are not supported)"
            )
        return self._open[path].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)

    def file_of(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        return str(self._file[name])


def _open(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; expected a safetensors file")
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file: {error}; fetch it again"
        ) from error


def read_tensors(paths: str | Path | Sequence[str | Path]) -> TensorFiles:
    """Opens one file, or the shards of one checkpoint.

    Raises:
      CheckpointError: a file is missing, truncated or of another format, or two files
        hold a tensor of the same name.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    return TensorFiles([Path(p) for p in paths])


def write_tensors(
    path: str | Path,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one file, whole or not at all.

    Args:
      tensors: NumPy or JAX arrays, stored in the dtype they have.
      metadata: strings for the header, which has no such block where it is None.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    # Contiguous, since the writer copies memory as it lies.
    arrays = {n: np.ascontiguousarray(np.asarray(t)) for n, t in tensors.items()}
    save_file(arrays, partial, metadata=None if metadata is None else dict(metadata))
    os.replace(partial, path)
