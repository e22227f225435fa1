"""A crew of processes that torchrun has started: rank 0 is the chief, and worker 0 as well.

Commands and answers go through the store of the launcher. Rank 0 works in a thread, so that its
main thread can supervise, and write the record, while the work hangs.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from sentinel_bench.errors import RunError
from sentinel_bench.pipeline.chief import FAREWELL, POLL, START, Chief, Event
from sentinel_bench.pipeline.worker import (
    END,
    Build,
    Command,
    Failure,
    Listen,
    Post,
    Worker,
    WorkerError,
    pack,
    signal_at_end_of_parent,
)

BETWEEN_CALLS = timedelta(days=365)
"""How long a worker waits for the next command: the chief has other things to do."""


def under_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


class TorchrunCrew(Chief):
    """The processes of torchrun: each creates one of these; all but rank 0 then `follow`.

    Rank 0 ignores SIGTERM from now on. The launcher sends it as soon as another rank has failed;
    the running call raises then, and the record can be written before the process ends.

    Args:
        build: makes the object of a worker; picklable.
        timeout: seconds after which a call that shows no progress is given up.
        describe: says what a rank does, for messages ("stages 4-5").

    Attributes:
        rank: of this process.

    Raises:
        SentinelBenchError, RunError: in rank 0, as `call` does, for `build`. Other ranks exit.
    """

    def __init__(
        self, build: Build, *, timeout: float, describe: Callable[[int], str] = lambda rank: ""
    ) -> None:
        super().__init__(int(os.environ["WORLD_SIZE"]), timeout, describe)
        self.rank = int(os.environ["RANK"])
        self._number = -1
        self._awaited: set[int] = set()
        self._told_to_end = False
        self._next_look = 0.0
        if self.rank == 0:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            signal_at_end_of_parent(signal.SIGTERM)
        else:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for rank 0
            signal_at_end_of_parent(signal.SIGKILL)
        self._store = _store(max(timeout, START))
        self._commands: SimpleQueue[bytes] = SimpleQueue()
        self._inbox: SimpleQueue[bytes] = SimpleQueue()
        if self.rank == 0:
            worker = Worker(self._post(self._tell))
            threading.Thread(target=self._work, args=(worker,), daemon=True).start()
            self._run((build, ()))
        else:
            self._worker = Worker(self._post(None))
            self._obey(0, pack((build, ())))

    def follow(self) -> None:
        """Obey rank 0 until it closes the crew. Ends the process with 1 if a call fails.

        Raises:
            RunError: the launcher is gone.
        """
        for number in count(1):
            with _launcher():
                self._store.wait([_command(number)], BETWEEN_CALLS)
                command = self._store.get(_command(number))
            if command == END:
                self._set(_answer(number, self.rank), b"")
                return
            self._obey(number, command)

    def close(self) -> None:
        """Let the other ranks return from `follow`. Does nothing the second time."""
        if self._over or self.rank:
            return
        self._over = "the crew was closed"
        self._abandon()
        with suppress(RuntimeError):
            answers = [_answer(self._number, rank) for rank in range(1, self.size)]
            self._store.wait(answers, timedelta(seconds=FAREWELL))

    def _post(self, listen: Listen | None) -> Post:
        return Post(self.rank, self.size, "env://", self._timeout, listen)

    def _obey(self, number: int, command: bytes) -> None:
        answer = self._worker.answer(command)
        self._set(_answer(number, self.rank), answer)
        if pickle.loads(answer)[0] == "failed":
            os._exit(1)  # at once: it closes the connections on which others wait

    def _work(self, worker: Worker) -> None:
        while True:
            self._inbox.put(worker.answer(self._commands.get()))

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        self._inbox.put(pack(("tell", (kind, fields))))

    def _send(self, command: Command) -> None:
        data = pack(command)
        self._number += 1
        self._awaited = set(range(1, self.size))
        if self._number > 0:  # all ranks build without being told
            self._set(_command(self._number), data)
        self._commands.put(data)

    def _events(self) -> Iterator[Event]:
        with suppress(Empty):
            yield 0, *pickle.loads(self._inbox.get(timeout=POLL))
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + POLL
        yield from self._answered()
        if self._told_to_end:
            text = "torchrun ended the run (SIGTERM); its own report says which process failed"
            yield 0, "failed", Failure(WorkerError(text), lost=True)

    def _answered(self) -> list[Event]:
        """Return what ranks other than 0 have answered since the last time."""
        events: list[Event] = []
        with _launcher():
            for rank in sorted(self._awaited):
                key = _answer(self._number, rank)
                if self._store.check([key]):
                    self._awaited.remove(rank)
                    events.append((rank, *pickle.loads(self._store.get(key))))
        return events

    def _abandon(self) -> None:
        """Let those end that wait for a command; the others fail, or the launcher ends them."""
        self._number += 1
        with suppress(RunError):
            self._set(_command(self._number), END)

    def _set(self, key: str, data: bytes) -> None:
        with _launcher():
            self._store.set(key, data)  # type: ignore[arg-type]  # takes bytes as well

    def _on_sigterm(self, *_: object) -> None:
        self._told_to_end = True


def _command(number: int) -> str:
    return f"command/{number}"


def _answer(number: int, rank: int) -> str:
    return f"answer/{number}/{rank}"


def _store(timeout: float) -> Store:
    with _launcher():
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return PrefixStore("sentinel-bench/crew", store)


@contextmanager
def _launcher() -> Iterator[None]:
    """Say what it means that the store does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise RunError("the store of torchrun does not answer: was torchrun ended?") from error
