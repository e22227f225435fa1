"""The record of a run: a folder with its settings, its events and its result.

    runs/<UTC>_<attack>-vs-<defense>_<6 hex>/
        config.json     resolved settings; `identity` and its `digest` say which cell this is
        events.jsonl    typed rows, each written through before the next one
        result.json     written last and atomically: a folder without it was not finished

In `events.jsonl` a float that JSON has no word for is stored as the string "nan", "inf" or "-inf";
`read_events` turns exactly these strings back, so no text field may hold one of them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Self

from sentinel_bench.errors import ConfigError, RunError, SentinelBenchError
from sentinel_bench.provenance import differing, digest, provenance, source_digest, to_json

__all__ = [
    "CONFIG",
    "EVENTS",
    "RESULT",
    "RunFolder",
    "append_row",
    "check_writable",
    "differing",
    "digest",
    "find_finished",
    "find_runs",
    "provenance",
    "read_config",
    "read_events",
    "read_result",
    "read_rows",
    "source_digest",
    "write_atomically",
]

CONFIG, EVENTS, RESULT = "config.json", "events.jsonl", "result.json"
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_REMEDIES = {
    errno.ENOSPC: "free some space or choose another disk",
    errno.EDQUOT: "free some space or choose another disk",
    errno.EEXIST: "a file has this name; choose another folder",
    errno.ENOTDIR: "a part of the path is a file; choose another folder",
}


class RunFolder:
    """A run that is being written: `path` is its folder, `digest` identifies its cell."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self.digest = digest
        self._events = (path / EVENTS).open("ab", buffering=0)

    @classmethod
    def create(cls, root: Path, label: str, config: Mapping[str, Any]) -> Self:
        """Make a new folder in `root` and write `config`, with its digest, to it.

        Args:
            root: parent of all run folders; made if missing.
            label: short name of the cell; characters that are not fit for a file name become `-`.
            config: JSON-able settings; `identity` is what the digest is taken of.

        Raises:
            ConfigError: `identity` is missing or not JSON.
            RunError: the folder cannot be made or written.
        """
        if "identity" not in config:
            raise ConfigError("the config of a run needs an 'identity' to take the digest of")
        key = digest(config["identity"])
        text = to_json({**config, "digest": key}, indent=2) + "\n"
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", label)[:100]
        path = root
        try:
            root.mkdir(parents=True, exist_ok=True)
            while True:  # mkdir decides between two processes that draw the same name
                stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
                path = root / f"{stamp}_{name}_{secrets.token_hex(3)}"
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                    break
            write_atomically(path / CONFIG, text)
            return cls(path, key)
        except OSError as error:
            raise RunError(f"{path}: cannot make the run folder: {_explain(error)}") from error

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Go on with the record of a run whose process has died; half a row at its end is cut off.

        Raises:
            RunError: it cannot be read or written.
        """
        key = read_config(path)["digest"]
        try:
            with (path / EVENTS).open("ab+") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            return cls(path, key)
        except OSError as error:
            raise RunError(f"{path}: cannot be written: {_explain(error)}") from error

    def append(self, kind: str, /, **fields: Any) -> None:
        """Write one event; see `append_row`."""
        append_row(self._events, self.path / EVENTS, kind, **fields)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`; see `save_result`."""
        save_result(self.path, result)

    def close(self) -> None:
        """Close the event file; calling it twice does no harm."""
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def append_row(file: FileIO, path: Path, kind: str, /, **fields: Any) -> None:
    """Write one row to an unbuffered file; it is out of this process when the call returns.

    Raises:
        RunError: the write failed; what was written of the row is taken back.
        ValueError: a field has the name `type`.
    """
    if "type" in fields:
        raise ValueError("'type' is the kind of the event, not a field")
    rest = memoryview(to_json({"type": kind} | encode(fields)).encode() + b"\n")
    before = os.fstat(file.fileno()).st_size
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        with contextlib.suppress(OSError):
            file.truncate(before)
        message = f"{path.parent}: cannot write {path.name}: {_explain(error)}"
        raise RunError(message) from error


def save_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Write `result.json`, all of it or nothing.

    Raises:
        RunError: the write failed; an earlier `result.json` stays as it was.
    """
    try:
        write_atomically(folder / RESULT, to_json(encode(result), indent=2) + "\n")
    except OSError as error:
        raise RunError(f"{folder}: cannot write {RESULT}: {_explain(error)}") from error


def check_writable(root: Path) -> None:
    """Make `root` and prove that it takes files, before anything is computed.

    Raises:
        ConfigError: it does not; with the path and what to do.
    """
    probe = root / f".probe-{secrets.token_hex(6)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(probe, "x" * 4096)
        probe.unlink()
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "choose a folder that you may write to")
        raise ConfigError(f"{root}: cannot write here: {_explain(error)}; {remedy}") from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old or the new content, never a part.

    Raises:
        OSError: nothing was changed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json`.

    Raises:
        RunError: missing, not JSON, or its digest is not that of its identity.
    """
    config = _read_object(folder / CONFIG)
    identity = config.get("identity")
    if not isinstance(identity, dict) or config.get("digest") != digest(identity):
        raise RunError(f"{folder / CONFIG}: the digest is not that of the identity; it was changed")
    return config


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Read `events.jsonl`. A last line that was cut off by a kill is left out.

    Raises:
        RunError: missing, without a complete event, or corrupt before its last line.
    """
    return read_rows(folder / EVENTS)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file of rows; see `read_events`."""
    lines = _read(path).split(b"\n")
    if not lines[-1]:
        lines.pop()
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            row = decode(_loads(line))
            if not (isinstance(row, dict) and isinstance(row.get("type"), str)):
                raise ValueError("not an object with a 'type'")
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise RunError(f"{path}:{number}: not an event: {error}") from error
        events.append(row)
    if not events:
        raise RunError(f"{path}: holds no complete event; the run was killed as it began")
    return events


def read_result(folder: Path) -> dict[str, Any] | None:
    """Read `result.json`; None if the run has none.

    Raises:
        RunError: it cannot be read or is not JSON.
    """
    path = folder / RESULT
    return _read_object(path) if path.exists() else None


def find_runs(root: Path) -> list[Path]:
    """Return the run folders in `root`, oldest first; none if there is no `root`."""
    return sorted(path.parent for path in root.glob(f"*/{CONFIG}"))


def find_finished(root: Path) -> dict[str, Path]:
    """Return digest and folder of each valid, finished run in `root`; the newest of a digest."""
    finished = {}
    for folder in find_runs(root):
        try:
            key, result = read_config(folder)["digest"], read_result(folder)
        except SentinelBenchError:
            continue  # such a run has to be done again
        scores = result.get("scores") if result and result.get("digest") == key else None
        if isinstance(scores, dict) and scores.get("outcome") in ("defended", "broken"):
            finished[key] = folder
    return finished


def encode(value: Any) -> Any:
    """Make a value fit for JSON: NaN and Inf to words, tuples to lists, scalars to numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return encode(value.item()) if hasattr(value, "item") else value


def decode(value: Any) -> Any:
    """Turn the words that stand for NaN and Inf in an event back into numbers."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    return [decode(item) for item in value] if isinstance(value, list) else value


def _loads(text: bytes) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {_explain(error)}") from error
    if not content:
        raise RunError(f"{path}: is empty")
    return content


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = _loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path}: not a JSON object")
    return value


def _explain(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
