"""What all crews have in common: one interface, and how a chief waits for its workers.

A crew is a number of workers that each build the same kind of object. A call of the chief runs the
same method in all of them, in lock-step. What goes wrong in a worker ends the crew and is raised in
the chief: an exception, a killed or a stopped process, a deadlock.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self

from sentinel_bench.errors import RunError, SentinelBenchError
from sentinel_bench.pipeline.worker import Command, Failure, Listen

POLL = 0.1
"""Seconds between two looks at workers that say nothing."""
GRACE = 2.0
"""Seconds to wait for the cause, once a worker says that it cannot reach another one."""
START = 60.0
"""Seconds that workers may take to start and build, where `timeout` is shorter."""
FAREWELL = 5.0
"""Seconds that workers have to end when they are asked to."""

Event = tuple[int, str, Any]
"""Rank; "tell", "done" or "failed"; (kind, fields), value or `Failure`."""


class Crew(Protocol):
    """Workers that execute the same calls. Also a context manager, which closes it."""

    size: int

    def call(self, method: str, /, *args: Any, listen: Listen = ...) -> Any:
        """Call a method in all workers and return what that of rank 0 returns.

        Args:
            method: its name.
            args: picklable.
            listen: is given, in this process, what rank 0 tells meanwhile.

        Raises:
            SentinelBenchError: what a worker raised, with its rank in front.
            RunError: anything else that went wrong in a worker, or the crew has ended before.
        """

    def close(self) -> None:
        """End the workers. Does nothing the second time."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Chief(ABC):
    """What all crews share: waiting for answers, and finding out why there are none.

    Args:
        size: the number of workers.
        timeout: seconds without any sign of progress after which a call fails.
        describe: says what a rank does, for messages.
    """

    def __init__(self, size: int, timeout: float, describe: Callable[[int], str]) -> None:
        self.size = size
        self._timeout = timeout
        self._describe = describe
        self._limit = max(timeout, START)
        self._over = ""

    @property
    def over(self) -> bool:
        """True once the workers have ended."""
        return bool(self._over)

    def call(self, method: str, /, *args: Any, listen: Listen = lambda kind, fields: None) -> Any:
        """Call a method in all workers: see `Crew`."""
        return self._run((method, args), listen)

    def _run(self, command: Command, listen: Listen = lambda kind, fields: None) -> Any:
        if self._over:
            raise RunError(f"the workers have ended: {self._over}")
        try:
            self._send(command)
            value = self._answers(listen)
        except BaseException as error:
            self._over = str(error) or type(error).__name__
            self._abandon()
            raise
        self._limit = self._timeout  # the first command starts and builds
        return value

    def _answers(self, listen: Listen) -> Any:
        """Wait until all have answered; return the value of rank 0."""
        value, waiting, idle = None, set(range(self.size)), Stopwatch()
        while waiting:
            for rank, kind, content in self._events():
                idle.restart()
                if kind == "tell":
                    listen(*content)
                    continue
                waiting.discard(rank)
                if kind == "failed":
                    raise self._cause(rank, content, waiting)
                if rank == 0:
                    value = content
            if idle.tick() > self._limit + GRACE:  # by now a stopped worker would be known
                raise RunError(
                    f"no progress for {self._limit:g} s: no answer from {self._names(waiting)}; "
                    "raise --timeout if a step may take longer, else they wait for each other"
                )
        return value

    def _cause(self, rank: int, failure: Failure, waiting: set[int]) -> SentinelBenchError:
        """Return the first error that does not merely say that another worker is gone."""
        patience = Stopwatch()
        while failure.lost and waiting and patience.tick() < GRACE:
            for other, kind, content in self._events():
                if kind != "tell":
                    waiting.discard(other)
                if kind == "failed" and not content.lost:
                    rank, failure = other, content
                    break
        error = failure.error
        silent = f"; no answer from {self._names(waiting)}" if failure.lost and waiting else ""
        error.args = (f"{self._names([rank])}: {error}{silent}",)
        return error

    def _names(self, ranks: Iterable[int]) -> str:
        texts = {rank: self._describe(rank) for rank in sorted(ranks)}
        return ", ".join(f"rank {r} ({text})" if text else f"rank {r}" for r, text in texts.items())

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Send a command to all workers."""

    @abstractmethod
    def _events(self) -> Iterator[Event]:
        """Yield what has happened; wait up to `POLL` seconds for it."""

    @abstractmethod
    def _abandon(self) -> None:
        """End the workers, whatever they do."""

    @abstractmethod
    def close(self) -> None:
        """End the workers. Does nothing the second time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Stopwatch:
    """Counts the seconds that a loop waits, by looking often.

    A loop that was itself held up (Ctrl-Z, a suspended machine, a slow disk) has not waited for
    anybody in that time: no look counts for more than a second.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin at 0."""
        self._seconds, self._looked = 0.0, time.monotonic()

    def tick(self) -> float:
        """Look, and return the seconds counted."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, 1.0)
        self._looked = now
        return self._seconds
