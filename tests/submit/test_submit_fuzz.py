"""Two hundred broken submissions: no traceback, no wrong number accepted, nothing read outside."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.submit import RULES, check
from sentinel_bench.submit.rules import ALL_EVENTS, Finding

BROKEN = 200
Break = Callable[[Path, random.Random], bool]
"""Breaks an entry; returns whether that must be found, whatever was drawn."""

_OPENED: list[str] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    watched = event in ("open", "import", "exec", "os.listdir", "os.scandir")
    if _OPENED is not None and watched and not isinstance(args[0], int):  # an open file
        _OPENED.append(f"{event} {args[0]}")


@pytest.fixture(scope="module")
def opened() -> Iterator[Callable[[], list[str]]]:
    """Return a function that tells what this process has opened since it was last called."""
    global _OPENED
    sys.addaudithook(_hook)  # there is no way to take it away again: it is quiet without a list
    _OPENED = []

    def take() -> list[str]:
        global _OPENED
        taken, _OPENED = _OPENED or [], []
        return taken

    yield take
    _OPENED = None


def allowed(entry: Path) -> set[str]:
    """What may be opened: the folder, and below it, by its name there, what belongs to it."""
    names = ["entry.yaml", "verification.json", "cells", "config.json", "result.json"]
    names += ["events.jsonl.gz", *(p.name for p in (entry / "cells").glob("*"))]
    return {f"open {name}" for name in [str(entry), *names]}


# What is done to one file, with bytes.


def some_file(entry: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(p for p in entry.rglob("*") if p.is_file()))


def some_json(entry: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(entry.rglob("*.json")))


def some_events(entry: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(entry.rglob("*.gz")))


def truncate(entry: Path, draw: random.Random) -> bool:
    path = some_file(entry, draw)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    return path.name.endswith(".gz")


def flip_bytes(entry: Path, draw: random.Random) -> bool:
    path = some_file(entry, draw)
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 3, 50])):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)
    return False


def repeat_bytes(entry: Path, draw: random.Random) -> bool:
    path = some_file(entry, draw)
    content = path.read_bytes()
    i, j = sorted(draw.randrange(len(content)) for _ in range(2))
    path.write_bytes(content[:j] + content[i:])
    return False


def garbage(entry: Path, draw: random.Random) -> bool:
    some_file(entry, draw).write_bytes(draw.randbytes(draw.choice([0, 1, 100, 10_000])))
    return True


def pickled(entry: Path, draw: random.Random) -> bool:
    some_file(entry, draw).write_bytes(pickle.dumps(Evil()))
    return True


class Evil:
    """Tells on who loads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


def huge(entry: Path, draw: random.Random) -> bool:
    with some_file(entry, draw).open("ab") as file:
        file.truncate(draw.choice([10**6 * 5, 5 * 10**9]))
    return True


BOMB = gzip.compress(b"0" * (20 * 1024**2), mtime=0)
ROWS = gzip.compress(b'{"type":"act"}\n' * 200_000, mtime=0)
LINE = gzip.compress(b'"' + b"x" * 200_000 + b'"\n', mtime=0)
DEEP = gzip.compress(b"[" * 100_000 + b"\n", mtime=0)


def gzip_bomb(entry: Path, draw: random.Random) -> bool:
    path = some_events(entry, draw)
    good = path.read_bytes()
    path.write_bytes(draw.choice([BOMB, ROWS, LINE, DEEP, good + good, good + b"x", good[:-1]]))
    return True


# What is done to JSON and YAML.

TEXTS = [
    '{"a": NaN}',
    "[" * 50_000,
    '{"a":' * 2000 + "1" + "}" * 2000,
    '{"schema": 1, "schema": 1}',
    '{"a": 1e999}',
    '{"a": ' + "9" * 4000 + "}",
    '{"a": ' + "9" * 5000 + "}",
    '{"a": "\\ud800"}',
    '{"a": "\\u202e"}',
    '"' + "x" * 100_000 + '"',
    "\ufeff{}",
    "null",
    "[]",
    "{}",
    "",
]


def odd_json(entry: Path, draw: random.Random) -> bool:
    some_json(entry, draw).write_text(draw.choice(TEXTS), encoding="utf-8")
    return True


def key_twice(entry: Path, draw: random.Random) -> bool:
    path = some_json(entry, draw)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1].rstrip(",") + ",", *lines[1:]]))
    return True


LAUGHS = "a: &a [x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
YAMLS = [
    LAUGHS,
    "!!python/object/apply:os.system [mkdir pwned]",
    "!!python/name:os.system",
    "[" * 16_000,
    "{" * 16_000,
    "? " * 8_000,
    "a: 1\na: 2",
    "2020-01-01",
    "schema: 1e999",
    "<<: {a: 1}",
    "a: !!binary 4oCu",
    "- " * 5_000,
    "{a: b, [c]: d}",
    "protocol: 0x" + "f" * 15_000,
    "x: " + "1:" * 5_000 + "1",
    "--- 1\n--- 2\n",
    "\x00",
]


def odd_yaml(entry: Path, draw: random.Random) -> bool:
    (entry / "entry.yaml").write_text(draw.choice(YAMLS), encoding="utf-8")
    return True


VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1e308,
    2**60,
    "x",
    "",
    [],
    {},
    [[]],
    "nan",
    "../..",
    "\u202e",
]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def forged_value(entry: Path, draw: random.Random) -> bool:
    """A value of a JSON file becomes another: of the scores, it must be found."""
    path = some_json(entry, draw)
    data = json.loads(path.read_text())
    tree, key = draw.choice(list(places(data)))
    old, tree[key] = tree[key], draw.choice(VALUES)
    path.write_text(json.dumps(data))
    same = json.dumps(tree[key]) == json.dumps(old)
    return path.name == "result.json" and tree is data["scores"] and not same


def forged_score(entry: Path, draw: random.Random) -> bool:
    path = draw.choice(sorted(entry.rglob("result.json")))
    data = json.loads(path.read_text())
    key = draw.choice([k for k, v in data["scores"].items() if type(v) in (int, float)])
    data["scores"][key] += draw.choice([1, -1, 0.01, 100])
    path.write_text(json.dumps(data))
    return True


def forged_events(entry: Path, draw: random.Random) -> bool:
    """Rows are changed, taken out, doubled or shuffled."""
    path = some_events(entry, draw)
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    at = draw.randrange(len(rows))
    kind = draw.choice(["change", "drop", "double", "swap"])
    if kind == "change":
        tree, key = draw.choice(list(places(rows[at])))
        tree[key] = draw.choice(VALUES)
    elif kind == "drop":
        del rows[at]
    elif kind == "double":
        rows.insert(at, rows[at])
    else:
        other = (at + draw.randrange(1, len(rows))) % len(rows)
        rows[at], rows[other] = rows[other], rows[at]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return kind in ("drop", "double")


# What is done to files and folders.


def renamed(entry: Path, draw: random.Random) -> bool:
    path = draw.choice(sorted(p for p in entry.rglob("*") if p.parent != entry or p.is_file()))
    names = ["x", "..x", "e\u0301", "\u202etxt", "a\nb", "\udcff", " ", "cell", "R\u00c9SULT.json"]
    path.rename(path.with_name(draw.choice(names)))
    return True


def swapped(entry: Path, draw: random.Random) -> bool:
    one, other = draw.sample(sorted((entry / "cells").iterdir()), 2)
    name = draw.choice(["config.json", "result.json", "events.jsonl.gz", ""])
    spare = entry / "spare"
    (one / name).rename(spare)
    (other / name).rename(one / name)
    spare.rename(other / name)
    return True


def removed(entry: Path, draw: random.Random) -> bool:
    path = draw.choice(sorted(entry.rglob("*")))
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return True


def added(entry: Path, draw: random.Random) -> bool:
    folder = draw.choice([entry, entry / "cells", *(entry / "cells").iterdir()])
    name = draw.choice(
        ["plugin.py", ".git", "x.pkl", "result.json~", "__init__.py", "\udc80", "r\n"]
    )
    if draw.random() < 0.5:
        (folder / name).write_bytes(pickle.dumps(Evil()))
    else:
        below = folder / name
        for _ in range(draw.choice([1, 50])):
            below = below / "d"
        below.mkdir(parents=True)
    return True


def linked(entry: Path, draw: random.Random) -> bool:
    """A file or a folder becomes a link: to outside, to itself, to nothing, or a hard one."""
    path = draw.choice(sorted(entry.rglob("*")))
    away = entry.parent / "away"
    path.rename(away)
    kind = draw.choice(["outside", "absolute", "self", "nothing", "hard"])
    if kind == "hard" and away.is_file():
        path.hardlink_to(away)
    else:
        targets = {"absolute": "/etc/passwd", "self": path.name, "nothing": "nowhere"}
        path.symlink_to(targets.get(kind, os.path.relpath(away, path.parent)))
    return True


def special(entry: Path, draw: random.Random) -> bool:
    """A pipe, a socket, a device or a folder where a file should be."""
    path = some_file(entry, draw)
    path.unlink()
    kind = draw.choice(["pipe", "socket", "device", "folder"])
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            here = Path.cwd()
            os.chdir(path.parent)  # the path of a socket must be short
            listener.bind(path.name)
            os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    else:
        try:
            os.mknod(path, 0o20644, os.makedev(1, 5)) if kind == "device" else os.mkfifo(path)
        except PermissionError:  # devices are for root
            os.mkfifo(path)
    return True


BREAKS: list[Break] = [
    *(truncate, flip_bytes, flip_bytes, repeat_bytes, garbage, pickled, huge, gzip_bomb),
    *(odd_json, key_twice, odd_yaml, forged_value, forged_value, forged_score, forged_events),
    *(forged_events, forged_events, renamed, swapped, removed, added, linked, special),
]


def scores(entry: Path) -> list[Any]:
    return [json.loads(path.read_text())["scores"] for path in sorted(entry.rglob("result.json"))]


def is_sound(found: Finding) -> bool:
    text = f"{found.place}{found.what}{found.remedy}"
    return found.rule in RULES and text.isprintable() and len(text) < 1000 and bool(found.what)


def test_broken_submissions_are_refused_and_nothing_else_is_read(
    packed: Path, tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    truth = scores(packed)
    assert check(packed).findings == []  # whatever is read once, is read now
    draw = random.Random(1)
    accepted = 0
    for number in range(BROKEN):
        change = BREAKS[number % len(BREAKS)]
        entry = Path(shutil.copytree(packed, tmp_path / str(number) / "mine"))
        told = f"{number}: {change.__name__}"
        must = change(entry, draw)
        opened()
        report = check(entry)
        extra = set(opened()) - allowed(entry)
        assert not extra, (told, extra)
        assert all(map(is_sound, report.findings)), (told, report.findings)
        assert report.findings or not must, told
        if not report.findings:
            accepted += 1
            assert scores(entry) == truth, told
        shutil.rmtree(entry)
    assert not (tmp_path / "pwned").exists()
    assert accepted < BROKEN // 10


def test_a_check_is_quick_about_what_is_large(packed: Path, tmp_path: Path) -> None:
    entry = Path(shutil.copytree(packed, tmp_path / "mine"))
    for path in entry.rglob("*.gz"):
        path.write_bytes(BOMB)
    assert len(BOMB) < 100_000 and ALL_EVENTS < 1024**3
    assert {f.rule for f in check(entry).findings} == {"file-size", "cell-missing"}


def test_the_hook_sees_what_is_opened(opened: Any, tmp_path: Path) -> None:
    opened()
    with pytest.raises(OSError):
        (tmp_path / "nothing").read_bytes()
    io.BytesIO()
    assert opened() == [f"open {tmp_path / 'nothing'}"]
