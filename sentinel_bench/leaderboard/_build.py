"""Write the leaderboards of all tracks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sentinel_bench.errors import RunError
from sentinel_bench.leaderboard._markdown import render
from sentinel_bench.leaderboard._summary import summarize
from sentinel_bench.record import write_atomically


def build(results: Sequence[Path], out: Path, track: str | None = None) -> list[Path]:
    """Write `<out>/<track>/README.md` for each track, or for one; each atomically.

    A result file that cannot be used is listed in every table with its reason, and in `summarize`.

    Args:
        results: folders that are searched for `result.json`, or such files.
        out: parent of the folders of the tracks; made if missing.
        track: only this one; default: all.

    Returns:
        The files written.

    Raises:
        ConfigError: a path does not exist, or there is no usable result (of the track).
        RunError: a table cannot be written.
    """
    summary = summarize(results, track)
    written = []
    for name, content in summary["tracks"].items():
        path = out / name / "README.md"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, render(name, content, summary["problems"]))
        except OSError as error:
            reason = error.strerror or str(error)
            raise RunError(f"{path}: cannot be written: {reason}; choose another folder") from error
        written.append(path)
    return written
