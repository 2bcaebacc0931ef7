"""Writing files so that nobody ever reads half of one."""

import os
import threading
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one go; several writers at once leave one whole text.

    Raises:
      OSError: it cannot be written; the file is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)  # nothing is left of one that failed
