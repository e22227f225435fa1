"""Documents from the user's own text files."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from sentinel_bench.errors import ConfigError

MIN_CHARACTERS = 2000
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


def read_path(path: Path) -> list[str]:
    """Read a text file, the `*.txt` below a folder, or the files that a glob matches.

    Several files are one document each, in the order of their paths; the blocks of a single file,
    which blank lines separate, are grouped to documents of at least 2,000 characters.

    Raises:
        ConfigError: nothing is there, or a file is empty, unreadable or not UTF-8.
    """
    files = _expand(path.expanduser())
    texts = [read_text(file) for file in files]
    if len(texts) > 1:
        return texts
    return list(group(_BLANK_LINES.split(texts[0]), "\n\n"))


def read_text(file: Path) -> str:
    """Read a file as UTF-8; newlines are made one kind, and a byte order mark is dropped.

    Raises:
        ConfigError: the file is empty, unreadable or not UTF-8.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text (byte {error.start}); convert it, for example with iconv"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); check --data PATH and its permissions"
        ) from error
    if not text.strip():
        raise ConfigError(f"{file} is empty; remove it or give a file with text")
    return text


def group(blocks: Iterable[str], joint: str) -> Iterator[str]:
    """Join blocks of text to documents of at least 2,000 characters; blank blocks are left out.

    The last document takes in the rest. A corpus shorter than that makes one document.
    """
    ready: list[str] = []
    current: list[str] = []
    for block in blocks:
        if block.strip():
            current.append(block)
        if sum(map(len, current)) >= MIN_CHARACTERS:
            if ready:
                yield joint.join(ready)
            ready, current = current, []
    if ready or current:
        yield joint.join(ready + current)


def _expand(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            files = sorted(f for f in path.rglob("*.txt") if f.is_file())
            if not files:
                raise ConfigError(f"folder {path} holds no *.txt file; give a file or a glob")
            return files
        if path.exists():
            return [path]
        if not glob.has_magic(str(path)):
            raise ConfigError(
                f"{path} does not exist; --data takes a text file, a folder, a glob or a name "
                "that `sentinel-bench list datasets` shows"
            )
        pattern = path.relative_to(path.anchor)
        found = Path(path.anchor or ".").glob(str(pattern))
        files = sorted(f for f in found if f.is_file())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); check --data PATH") from error
    if not files:
        raise ConfigError(f"glob {path} matches no file; check it (quoted, ** for all folders)")
    return files
