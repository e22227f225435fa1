"""The files of a submission, read so that nothing outside of its folder can be opened.

Everything is opened relative to its folder, without following links, and only if its name belongs
to an entry, it is a plain file with one name, and it is not too large.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sentinel_bench.errors import ConfigError
from sentinel_bench.submit.rules import (
    CELLS,
    EVENTS_FILE,
    FINDINGS,
    SMALL_FILE,
    YAML_FILE,
    Finding,
    RefusedError,
    finding,
)

ENTRY, VERIFICATION, FOLDER = "entry.yaml", "verification.json", "cells"
CONFIG, RESULT, EVENTS = "config.json", "result.json", "events.jsonl.gz"
OF_CELL = (CONFIG, RESULT, EVENTS)
CELL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,150}")
_LARGEST = {ENTRY: YAML_FILE, EVENTS: EVENTS_FILE}
_AS_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_AS_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Files:
    """What an entry consists of.

    Attributes:
        cells: names of the folders of cells.
        findings: what does not belong there, or cannot be read.
        seen: names of the files that may be read, such as `cells/x/result.json`.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self.cells: list[str] = []
        self.findings: list[Finding] = []
        self.seen: set[str] = set()
        self._list_root()

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            RefusedError: it is not there, or is not a plain file of at most the usual size.
        """
        if name not in self.seen:
            raise RefusedError("file-missing", "is missing")
        *folders, last = name.split("/")
        try:
            with _folder(self._root, *folders) as parent:
                return _content(parent, last, _LARGEST.get(last, SMALL_FILE))
        except OSError as error:
            raise _refused(error) from error

    def _list_root(self) -> None:
        known = {ENTRY: False, VERIFICATION: False, FOLDER: True}
        if FOLDER in self._list((), known):
            cells = self._list((FOLDER,), {})
            self.cells = sorted(cells)
        for cell in self.cells:
            if len(self.findings) > FINDINGS:
                break
            self._list((FOLDER, cell), dict.fromkeys(OF_CELL, False))

    def _list(self, where: tuple[str, ...], known: dict[str, bool]) -> list[str]:
        """Note what is in a folder; return the names of the folders in it that belong there.

        Args:
            where: the folder.
            known: name to whether it is a folder; empty for the folder of the cells.
        """
        folders: list[str] = []
        try:
            with _folder(self._root, *where) as opened, os.scandir(opened) as found:
                for number, item in enumerate(found):
                    if number >= CELLS:
                        self._add((*where,), "file-size", f"holds more than {CELLS} files")
                        break
                    place = (*where, item.name)
                    is_folder = known.get(item.name, True if not known else None)
                    wrong = self._wrong(item, is_folder)
                    if wrong is not None:
                        self._add(place, *wrong)
                    elif is_folder:
                        folders.append(item.name)
                    else:
                        self.seen.add("/".join(place))
        except OSError as error:
            refused = _refused(error)
            self._add(where, refused.rule, str(refused))
        return folders

    def _wrong(self, item: os.DirEntry[str], is_folder: bool | None) -> tuple[str, str] | None:
        """Say what is wrong with a thing in a folder: rule and reason."""
        form = item.stat(follow_symlinks=False)
        if is_folder is None:
            return "file-name", "does not belong into an entry"
        if is_folder:
            if not stat.S_ISDIR(form.st_mode):
                return "file-kind", f"must be a folder, and is {_kind(form.st_mode)}"
            if item.name != FOLDER and not CELL_NAME.fullmatch(item.name):
                return "file-name", "is no name of a cell"
            return None
        return _wrong_form(form, _LARGEST.get(item.name, SMALL_FILE))

    def _add(self, where: tuple[str, ...], rule: str, what: str) -> None:
        self.findings.append(finding("/".join(where) or ".", rule, what))


@contextmanager
def opened(folder: Path) -> Iterator[Files | Finding]:
    """Open the folder of an entry; a finding if it cannot be one.

    Raises:
        ConfigError: there is no such folder.
    """
    try:
        root = os.open(folder, _AS_FOLDER)
    except OSError as error:
        if folder.is_symlink():
            yield finding(".", "file-kind", "the folder is a symbolic link")
            return
        raise ConfigError(
            f"{folder}: cannot be opened as a folder: {error.strerror}; name that of an entry"
        ) from error
    try:
        yield Files(root)
    finally:
        os.close(root)


@contextmanager
def _folder(root: int, *names: str) -> Iterator[int]:
    """Open a folder below another one, step by step, without following a link."""
    current = os.dup(root)
    try:
        for name in names:
            below = os.open(name, _AS_FOLDER, dir_fd=current)
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


def _content(parent: int, name: str, largest: int) -> bytes:
    """Read a file whose form is looked at once it is open: nobody can swap it in between."""
    file = os.open(name, _AS_FILE, dir_fd=parent)
    try:
        wrong = _wrong_form(os.fstat(file), largest)
        if wrong is not None:
            raise RefusedError(*wrong)
        parts, left = [], largest + 1
        while left > 0 and (part := os.read(file, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(file)
    if left <= 0:
        raise RefusedError("file-size", f"is larger than {largest:,} bytes")
    return b"".join(parts)


def _wrong_form(form: os.stat_result, largest: int) -> tuple[str, str] | None:
    if not stat.S_ISREG(form.st_mode):
        return "file-kind", f"must be a plain file, and is {_kind(form.st_mode)}"
    if form.st_nlink != 1:
        return "file-kind", f"has {form.st_nlink} names (hard links)"
    if form.st_size > largest:
        return "file-size", f"has {form.st_size:,} bytes; at most {largest:,} are taken"
    return None


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a folder",
        stat.S_IFREG: "a file",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def _refused(error: OSError) -> RefusedError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return RefusedError("file-kind", "is a link, or lies behind one")
    if error.errno == errno.ENOENT:
        return RefusedError("file-missing", "is missing")
    return RefusedError("file-read", f"cannot be read: {(error.strerror or str(error)).lower()}")
