"""Writing files so that nobody ever reads half of one."""

import os
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one go; several writers at once leave one whole text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(part, 0o644)  # mkstemp's own is for its owner alone
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
