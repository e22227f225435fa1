"""The inside of a job of a suite: a process that runs the cells of one group as it is handed them.

No torch at the top of this file: whoever starts jobs needs none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sentinel_bench import plugins, suite
from sentinel_bench.config import Cell, Scenario
from sentinel_bench.errors import RunError, SentinelBenchError
from sentinel_bench.pipeline.worker import end_with_the_chief
from sentinel_bench.placement import Placement
from sentinel_bench.runner import Group, Job, message

BEAT = 0.3
"""Seconds between two signs of progress."""


@dataclass(frozen=True)
class Work:
    """Where and how the cells of a suite are run; can be pickled.

    Attributes:
        out: folder of the run folders.
        commands: what the user typed, for the record.
        threads: of torch, in each process; None leaves torch's choice.
        placement: in which processes the stages and replicas of a cell are.
        files: plugin files in use, with their sources.
    """

    out: Path
    commands: tuple[str, ...] = ()
    threads: int | None = 1
    placement: Placement = field(default_factory=Placement)
    files: dict[Path, bytes] = field(default_factory=plugins.in_use)


def work(
    pipe: Connection,
    task: Work,
    scenario: Scenario,
    cells: Sequence[Cell],
    environment: dict[str, str],
) -> None:
    """Warm up, say "ready", and run the cells whose numbers come; None ends it.

    Each order is a number and the result of the cell without attack and defense, if it is known.
    What is told: ("hello", None), ("say", text), ("share", of the steps), ("ready", None), and
    ("over", (folder, result, reason)); without a result the reason says why. ("refused", reason)
    is the last word of a job that cannot begin.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the suite, which ends its jobs
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_with_the_chief()  # a suite that is killed leaves nobody at work
    os.environ.update(environment)
    from sentinel_bench.pipeline.session import prepare

    told = Told(pipe)
    told.tell("hello")
    with contextlib.suppress(KeyboardInterrupt):
        try:
            plugins.use(task.files)
            threads = prepare(scenario.device, task.threads)
            tokens = suite.load_tokens(scenario, told)
        except SentinelBenchError as error:
            told.tell("refused", str(error))
            return
        execution = {"threads": threads, "placement": task.placement.record()}
        with suite.opener(task.placement, scenario, tokens, threads) as opened:
            job = Job(tokens, task.out, told, task.commands, execution, {}, opened)
            _obey(pipe, told, Group(job, scenario, cells), cells)


def _obey(pipe: Connection, told: Told, group: Group, cells: Sequence[Cell]) -> None:
    with contextlib.suppress(Exception):  # each cell says for itself what is wrong
        group.warm_session(cells[0])
    told.tell("ready")
    while (order := _next(pipe)) is not None:
        number, group.baseline = order
        try:
            done = group.run(cells[number])
        except (RunError, OSError) as error:  # the record could not be written
            told.tell("over", (None, None, message(error)))
        else:
            told.tell("over", (done.folder, done.result, ""))


def _next(pipe: Connection) -> tuple[int, dict[str, Any] | None] | None:
    try:
        order: tuple[int, dict[str, Any] | None] | None = pipe.recv()
    except (EOFError, OSError):
        return None
    return order


class Told:
    """Progress that is told through a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._done, self._total = 0, 1
        self._told = 0.0

    def tell(self, kind: str, value: object = None) -> None:
        """Tell the suite. Without one this process ends at once: nobody waits for its cell.

        An error would be recorded as one of the cell.
        """
        try:
            self._pipe.send((kind, value))
        except OSError:
            os._exit(1)

    def say(self, text: str) -> None:
        """Pass on a line."""
        self.tell("say", text)

    def start(self, label: str, total: int) -> None:
        """Begin a piece of work of `total` steps."""
        self._done, self._total = 0, max(1, total)

    def advance(self) -> None:
        """One step is done."""
        self._done += 1
        now = time.monotonic()
        if now - self._told >= BEAT:
            self._told = now
            self.tell("share", self._done / self._total)

    def finish(self) -> None:
        """The piece of work is over."""
