"""The cells of a running suite: a live table on a terminal, a line for each cell elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sentinel_bench import batch
from sentinel_bench.batch import Entry, seconds_left
from sentinel_bench.batch_worker import Work
from sentinel_bench.cli._output import Reporter
from sentinel_bench.record import check_writable
from sentinel_bench.runner import title
from sentinel_bench.suite import Plan, load_tokens

if TYPE_CHECKING:
    from sentinel_bench.data.tokens import Tokens

MARGIN = 8
"""Lines of the terminal that are left for the rest."""
SIGNS = {"done": "✓", "reused": "=", "failed": "✗", "waiting": "·"}
STYLES = {"done": "green", "reused": "dim", "failed": "bold red", "running": "yellow"}


def look_up(plan: Plan, out: Path, shard: tuple[int, int] = (1, 1)) -> tuple[list[Entry], Tokens]:
    """Return the cells of a plan with what `out` has of them, and their corpus.

    Raises:
        ConfigError: the corpus cannot be used.
    """
    reporter = Reporter()
    tokens = load_tokens(plan.groups[0][0], reporter)
    entries = batch.entries_of(plan, tokens.digest, shard)
    for note in batch.reuse(entries, out):
        reporter.say(note)
    return entries, tokens


def work_off(entries: Sequence[Entry], plan: Plan, task: Work, jobs: int) -> None:
    """Run what is left of the entries of a plan, and show how it goes.

    Raises:
        ConfigError: the folder cannot be written, or another suite is at work there.
        KeyboardInterrupt: after the running cells were recorded as interrupted.
    """
    check_writable(task.out)
    with batch.alone_in(task.out), LiveTable(entries, jobs) as table:
        reused = sum(entry.over for entry in entries)
        if reused:
            table.say(f"{reused} of {len(entries)} cells are there already: {task.out}")
        batch.run(entries, plan, task, jobs, table.update, table.say)


class LiveTable:
    """Shows entries: rows are attacks, columns are defenses, one sign for each seed.

    Args:
        entries: as `batch.run` changes them.
        jobs: processes, for the time that is left.
    """

    def __init__(self, entries: Sequence[Entry], jobs: int) -> None:
        self._entries = entries
        self._jobs = jobs
        self._console = Console(stderr=True, highlight=False)
        self._over = {id(e) for e in entries if e.over}
        self._live = Live(console=self._console, refresh_per_second=2, transient=True)

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Show a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def update(self) -> None:
        """Show what has changed."""
        for entry in self._entries:
            if entry.over and id(entry) not in self._over:
                self._over.add(id(entry))
                if entry.state == "failed" or not self._console.is_terminal:
                    self.say(f"[{len(self._over)}/{len(self._entries)}] {told(entry)}{self._eta()}")
        if self._console.is_terminal:
            self._live.update(Group(self._table(), Text(self._summary())))

    def _eta(self) -> str:
        seconds = seconds_left(self._entries, self._jobs)
        return "" if not seconds else f"; {duration(seconds)} left"

    def _summary(self) -> str:
        states = [entry.state for entry in self._entries]
        failed = f", {states.count('failed')} failed" if "failed" in states else ""
        return f"{len(self._over)} of {len(self._entries)} cells{failed}{self._eta()}"

    def _table(self) -> Table:
        columns = list(dict.fromkeys(e.cell.protection for e in self._entries))
        rows = batch.by_attack(self._entries)
        names = list(rows)
        room = max(3, self._console.height - MARGIN)
        if len(names) > room:  # those at work, and their neighbours
            busy = [i for i, n in enumerate(names) if _states(rows[n]) & {"running"}]
            first = max(0, min((busy or [0])[0] - 2, len(names) - room))
            names = names[first : first + room]
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ["attack", *columns]:
            table.add_column(column, overflow="ellipsis", no_wrap=True)
        for name in names:
            cells = (Text(" ").join(map(_sign, rows[name].get(c, []))) for c in columns)
            table.add_row(Text(name), *cells)
        return table


def _states(row: dict[str, list[Entry]]) -> set[str]:
    return {entry.state for entries in row.values() for entry in entries}


def _sign(entry: Entry) -> Text:
    sign = f"{entry.share:.0%}" if entry.state == "running" else SIGNS[entry.state]
    return Text(sign, style=STYLES.get(entry.state, ""))


def told(entry: Entry) -> str:
    """Say in one line what has become of a cell."""
    if entry.state == "failed":
        return f"{title(entry.cell)}: failed: {entry.reason}"
    scores = entry.result["scores"] if entry.result else {}
    numbers = [str(scores.get("outcome"))]
    if not entry.cell.is_baseline:
        numbers += [f"F1 {scores['f1']:.0f}"] if scores.get("f1") is not None else []
        excess = scores.get("excess_loss")
        numbers += [f"excess loss {excess:+.3f}"] if excess is not None else []
    return f"{title(entry.cell)}: {', '.join(numbers)}, {duration(entry.seconds)}"


def duration(seconds: float) -> str:
    """Write a time for people."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
