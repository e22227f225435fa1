"""Run folders with a record that was written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from sentinel_bench.config import Cell, Component, Scenario
from sentinel_bench.record import EVENTS, RunFolder, read_events
from sentinel_bench.score import result
from sentinel_bench.trace import Trace

Row = dict[str, Any]
STAGES, REPLICAS, STEPS, WARMUP = 3, 4, 10, 4


def at(kind: str, step: int, stage: int, replica: int, **more: Any) -> Row:
    return {"type": kind, "step": step, "stage": stage, "replica": replica, **more}


def flag(step: int, stage: int, replica: int, direction: str = "activation", **said: Any) -> Row:
    said = said or {"l1": [0.5, 0.1, 0.2], "l2": [1.5, 1.0, 2.0]}
    return at("flag", step, stage, replica, direction=direction, tampered=False, statistics=said)


def ban(step: int, stage: int, replica: int, reason: str = "violations") -> Row:
    return at("ban", step, stage, replica, reason=reason)


def act(step: int, stage: int, replica: int) -> Row:
    return at("act", step, stage, replica, direction="activation")


def tamper(stage: int, replica: int) -> Row:
    return {"type": "tamper", "stage": stage, "replica": replica, "signals": 5, "size": 0.625}


def log(
    *rows: Row,
    attackers: Sequence[tuple[int, int]] = ((1, 0), (1, 1), (2, 3)),
    loss: float | str | None = 2.0,
    baseline: str | None = None,
    status: str | None = "complete",
    losses: Mapping[int, Any] | None = None,
) -> list[Row]:
    """A run of 10 steps, 4 of them warm-up, on 3 stages x 4 replicas, with `rows` in it."""
    who = [
        {
            "stage": s,
            "replica": r,
            "start": 5,
            "attack": "zeros",
            "params": {},
            "mode": "activation",
        }
        for s, r in attackers
    ]
    start = {"type": "start", "time": "2026-01-01T00:00:00Z", "stages": STAGES}
    start |= {"replicas": REPLICAS, "steps": STEPS, "warmup_steps": WARMUP}
    events: list[Row] = [
        {**start, "tokens_per_step": 100, "attackers": who, "state_bytes": 640},
        {
            "type": "baseline",
            "digest": baseline,
            "validation_loss": 1.97,
            "tokens_per_second": 500.0,
        },
    ]
    for step in range(STEPS):
        checked, flagged = ([10, 2], [1, 1]) if step >= WARMUP else ([0, 0], [0, 0])
        value = (losses or {}).get(step, 4.0 - 0.1 * step)
        row = {"type": "step", "step": step, "loss": value, "grad_norm": 1.0, "tampered": 0}
        events.append(
            {**row, "seconds": 0.25, "checked": checked, "flagged": flagged, "excluded": 0}
        )
        events += [row for row in rows if row.get("step") == step]
    events += [row for row in rows if row.get("step", STEPS) >= STEPS]
    if loss is not None:
        events.append({"type": "eval", "step": STEPS - 1, "loss": loss, "tokens": 1000})
    cost = {"type": "cost", "flops": 3, "step_flops": 100, "bytes": 7424, "steps": 1}
    end = {"type": "end", "status": status, "time": "2026-01-01T00:01:00Z", "seconds": 60}
    return [*events, cost, *([end] if status else [])]


def write_run(
    root: Path,
    scenario: Scenario,
    events: Sequence[Row],
    *,
    attack: str = "zeros",
    defense: str = "sentinel",
    aggregator: str = "mean",
    commands: Sequence[Any] = ("sentinel-bench run --attack zeros --resume",),
    finished: bool = True,
    trace: Sequence[tuple[int, int, str, Any]] | None = None,
) -> Path:
    """Write a run folder as the runner does, and return it."""
    attack, defense, aggregator = (Component.parse(t) for t in (attack, defense, aggregator))
    cell = Cell(scenario=scenario, attack=attack, defense=defense, aggregator=aggregator)
    identity = {
        "scenario": scenario.model_dump(mode="json", exclude={"track"}),
        "attack": {"name": attack.label(), "source": "a" * 8},
        "defense": {"name": defense.label(), "source": "d" * 8},
        "aggregator": {"name": aggregator.label()},
        "data": "0123abcd",
        "engine": "feedbeef",
        "versions": {"sentinel-bench": "0.1.0", "torch": "2.13.0"},
    }
    config = {
        "cell": cell.model_dump(mode="json"),
        "defense": {"violations": 5},
        "identity": identity,
        "commands": list(commands),
    }
    with RunFolder.create(root, cell.label, config) as folder:
        text = "".join(json.dumps(row) + "\n" for row in events)
        (folder.path / EVENTS).write_text(text)
        if trace is not None:
            with Trace(folder.path) as written:
                for boundary in trace:
                    written.append(*boundary)
        if finished:
            made = {"packages": {"torch": "2.13.0"}, "python": "3.11.2", "cpus": 2}
            content = result({**config, "digest": folder.digest}, read_events(folder.path), made)
            folder.finish(content)
    return folder.path


def digest_of(folder: Path) -> str:
    found: str = json.loads((folder / "config.json").read_text())["digest"]
    return found


def cut(folder: Path, size: int = 20) -> None:
    """Cut off the end of the events, as a kill does."""
    path = folder / EVENTS
    path.write_bytes(path.read_bytes()[:-size])


class Page(HTMLParser):
    """What is on a page. Fails on tags that are not closed in order."""

    VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts.append(data)
        elif "style" not in self.open:
            self.words.append(data)
            if self.open and {"td", "th"} & {*self.open}:
                self.cells[-1][-1] += data

    @property
    def text(self) -> str:
        """All text, with single spaces."""
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of each element with a tag."""
        return [attributes for name, attributes in self.tags if name == tag]

    def row(self, *start: str) -> list[str]:
        """The one row of a table that starts with some texts."""
        rows = [[" ".join(cell.split()) for cell in row] for row in self.cells]
        (found,) = [row for row in rows if row[: len(start)] == [*start]]
        return found

    @property
    def data(self) -> Any:
        """What the script of the page draws from."""
        (found,) = [i for i, a in enumerate(self.all("script")) if a.get("id") == "data"]
        return json.loads(self.scripts[found])
