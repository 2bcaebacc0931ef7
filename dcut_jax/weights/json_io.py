"""Reads the JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from dcut_jax.weights.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint.

    Raises:
      CheckpointError: naming the file, which is missing, broken or holds no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} is truncated or not JSON: {error}; fetch it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(value).__name__}; expected an object"
        )
    return value
