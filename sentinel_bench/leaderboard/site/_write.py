"""Writes the site, and removes those of its own pages whose entries are gone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from sentinel_bench.errors import RunError
from sentinel_bench.leaderboard.site._board import Board, load
from sentinel_bench.leaderboard.site._pages import index, pages
from sentinel_bench.record import write_atomically

SITE, MANIFEST, SCHEMA = "site", "pages.json", 1
ASSETS = ("style.css", "site.js")
RAW = ("board.csv", "board.json", "README.md")
"""Files of a track that are linked if they are there."""
_OWN = re.compile(
    r"index\.html|assets/(style\.css|site\.js)|data/[A-Za-z0-9][A-Za-z0-9._-]*\.json"
    r"|tracks/([A-Za-z0-9][A-Za-z0-9._-]*)/(index|(attack|defense)-[a-z0-9._-]+)\.html"
)
"""What the site writes: nothing else is ever removed, whatever its list says."""


def write(results: Sequence[Path], out: Path, track: str | None = None) -> Path:
    """Write `out/site/`.

    Tracks that are not below `results`, or not the one that was asked for, stay as they were
    written before, as long as there is a folder `out/<track>`.

    Args:
        results: folders that are searched for `result.json`, or such files.
        out: parent of the folders of the tracks.
        track: only this one anew; default: all.

    Returns:
        The first page.

    Raises:
        ConfigError: a path does not exist, or there is no usable result.
        RunError: a page cannot be written.
    """
    site = out / SITE
    boards = [board for board in load(results) if track in (None, board.name)]
    try:
        before = _listed(site)
        kept = _kept(site, out, before, {board.name for board in boards})
        content = dict(_content(out, boards, kept))
        old = {path for board in kept for path in before if _track_of(path) == board.name}
        wanted = content.keys() | old | {MANIFEST}
        _save(site / MANIFEST, _manifest(wanted | before))  # should this be the last that is done
        for path, text in content.items():
            _save(site / path, text)
        _remove(site, before - wanted)
        _save(site / MANIFEST, _manifest(wanted))
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{site}: cannot be written: {reason}; choose another folder") from error
    return site / "index.html"


def _content(
    out: Path, boards: Sequence[Board], kept: Sequence[Board]
) -> Iterable[tuple[str, str]]:
    """Yield path and text of each file but the list."""
    everything = sorted([*boards, *kept], key=lambda board: board.name)
    yield "index.html", index(everything)
    templates = files("sentinel_bench.leaderboard.site") / "templates"
    for name in ASSETS:
        yield f"assets/{name}", (templates / name).read_text(encoding="utf-8")
    for board in boards:
        raw = [name for name in RAW if (out / board.name / name).is_file()]
        for name, html in pages(board, raw):
            yield f"tracks/{board.name}/{name}", html
        data = {"schema": SCHEMA, "track": board.name, **board.content}
        yield f"data/{board.name}.json", _json(data)


def _kept(site: Path, out: Path, before: set[str], anew: set[str]) -> list[Board]:
    """Return the tracks of an earlier site that are not written anew."""
    from jinja2 import TemplateError

    found = []
    for name in sorted({name for path in before if (name := _track_of(path))} - anew):
        try:
            data = json.loads((site / f"data/{name}.json").read_bytes())
            board = Board(name, data)
            index([board])  # a file that was changed may lack anything
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError,
                TemplateError):  # fmt: skip
            continue
        if (out / name).is_dir() and data.get("schema") == SCHEMA:
            found.append(board)
    return found


def _track_of(path: str) -> str:
    head, _, rest = path.partition("/")
    name = rest.removesuffix(".json") if head == "data" else rest.partition("/")[0]
    return name if head in ("data", "tracks") else ""


def _listed(site: Path) -> set[str]:
    """Return what an earlier site wrote; nothing if its list cannot be used."""
    try:
        found = json.loads((site / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()
    listed = found if isinstance(found, list) else []
    return {path for path in listed if isinstance(path, str) and _OWN.fullmatch(path)}


def _manifest(paths: Iterable[str]) -> str:
    return json.dumps({"schema": SCHEMA, "files": sorted(paths)}, indent=0) + "\n"


def _json(data: Mapping[str, object]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n"


def _save(path: Path, text: str) -> None:
    if path.is_file() and path.read_bytes() == text.encode():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def _remove(site: Path, paths: Iterable[str]) -> None:
    home = site.resolve()
    for path in paths:
        place = site / path
        if place.parent.resolve().is_relative_to(home):
            place.unlink(missing_ok=True)
            if place.parent.is_dir() and not any(place.parent.iterdir()):
                place.parent.rmdir()
