"""Write the leaderboards of all tracks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sentinel_bench.errors import RunError
from sentinel_bench.leaderboard._markdown import render
from sentinel_bench.leaderboard._summary import summarize
from sentinel_bench.leaderboard._table import table
from sentinel_bench.record import write_atomically


def build(results: Sequence[Path], out: Path, track: str | None = None) -> list[Path]:
    """Write `README.md`, `board.json` and `board.csv` to `<out>/<track>/`, for each track or one.

    Each is written atomically. A result file that cannot be used is listed in every table with its
    reason, and in `summarize`.

    Args:
        results: folders that are searched for `result.json`, or such files.
        out: parent of the folders of the tracks; made if missing.
        track: only this one; default: all.

    Returns:
        The files written.

    Raises:
        ConfigError: a path does not exist, or there is no usable result (of the track).
        RunError: a file cannot be written.
    """
    summary = summarize(results, track)
    written = []
    for name, content in summary["tracks"].items():
        for path, text in _files(out / name, name, content, summary["problems"]).items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text)
            except OSError as error:
                reason = error.strerror or str(error)
                raise RunError(
                    f"{path}: cannot be written: {reason}; choose another folder"
                ) from error
            written.append(path)
    return written


def _files(
    folder: Path, name: str, content: Mapping[str, Any], problems: Sequence[Mapping[str, Any]]
) -> dict[Path, str]:
    board = {"schema": 1, "track": name, "problems": problems, **content}
    return {
        folder / "README.md": render(name, content, problems),
        folder / "board.json": json.dumps(board, indent=1, allow_nan=False) + "\n",
        folder / "board.csv": table(content["rows"]),
    }
