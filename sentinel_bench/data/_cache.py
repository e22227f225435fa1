"""Arrays in the user's cache folder: one `.npz` per entry, whole or not there at all.

A cache saves time and nothing else: an entry that cannot be read is built again, and one that
cannot be written is done without.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from numpy.typing import NDArray

ENVIRONMENT = "SENTINEL_BENCH_CACHE"

Arrays = dict[str, NDArray[Any]]


def folder() -> Path:
    """Return the cache folder, which need not exist."""
    given = os.environ.get(ENVIRONMENT)
    root = (
        Path(given).expanduser() if given else Path(platformdirs.user_cache_dir("sentinel-bench"))
    )
    return root / "tokens"


def read(name: str, say: Callable[[str], None]) -> Arrays | None:
    """Return the arrays of an entry; None, with a line, if it cannot be read or is corrupt."""
    path = folder() / f"{name}.npz"
    try:
        with np.load(path, allow_pickle=False) as entry:
            return {key: entry[key] for key in entry.files}
    except (FileNotFoundError, NotADirectoryError):
        return None
    # What numpy and zipfile raise for files that are cut, changed or something else altogether.
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        AttributeError,
        NotImplementedError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        say(f"cache entry {path} cannot be read ({type(error).__name__}); it is built again")
        return None


def write(name: str, arrays: Arrays, say: Callable[[str], None]) -> None:
    """Write an entry in one step, so that no reader ever sees a part of it.

    Several processes may write the same entry: each has its own temporary file, and the last one
    to finish wins. A folder that cannot be written, or a full disk, is told in one line.
    """
    temporary: Path | None = None
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=folder(), prefix=f".{name[:12]}-", suffix=".tmp", delete=False
        ) as file:
            temporary = Path(file.name)
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder() / f"{name}.npz")
        temporary = None
    except OSError as error:
        say(
            f"warning: tokens are not cached, {folder()} cannot be written "
            f"({error.strerror or error}); set {ENVIRONMENT} to a folder that can"
        )
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
