"""A crew of worker processes on this machine, forked from a server that has imported torch.

Nothing is left running, whatever happens to the chief or to a worker.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue

from sentinel_bench.errors import RunError
from sentinel_bench.pipeline.chief import FAREWELL, GRACE, POLL, Chief, Crew, Event, Stopwatch
from sentinel_bench.pipeline.worker import (
    END,
    Build,
    Command,
    Failure,
    Post,
    WorkerError,
    pack,
    work,
)

__all__ = ["Crew", "LocalCrew", "Post", "WorkerError"]

PRELOAD = [
    "sentinel_bench.pipeline.session",
    "torch.distributed.pipelining",
    "sentinel_bench.cli",  # what runs in the chief, which multiprocessing imports in each worker
    __name__,
]
"""Modules that the fork server imports once, for all workers."""


class LocalCrew(Chief):
    """Workers in processes that are started here. The chief is none of them.

    Args:
        size: the number of workers.
        build: makes the object of a worker, in the worker; picklable.
        timeout: seconds after which a worker that shows no sign of life, or a call that shows
            no progress, is given up.
        describe: says what a rank does, for messages ("stages 4-5").
        threads: of torch, in each worker.

    Raises:
        SentinelBenchError, RunError: as `call` does, for `build`.
    """

    def __init__(
        self,
        size: int,
        build: Build,
        *,
        timeout: float,
        describe: Callable[[int], str] = lambda rank: "",
        threads: int = 1,
    ) -> None:
        super().__init__(size, timeout, describe)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._inbox: SimpleQueue[tuple[int, bytes | None]] = SimpleQueue()
        folder = Path(tempfile.mkdtemp(prefix="sentinel-bench-"))
        self._kill = weakref.finalize(self, _kill, self._processes, folder)
        self._silence = [Stopwatch() for _ in range(size)]
        self._seen = [0] * size
        try:
            self._start(threads, f"file://{folder}/rendezvous")
        except BaseException:
            self._abandon()
            raise
        self._run((build, ()))

    def close(self) -> None:
        """End the workers: first ask, then force. Does nothing the second time."""
        try:
            if not self._over:
                self._over = "the crew was closed"
                self._broadcast(END)
                deadline = time.monotonic() + FAREWELL
                for process in self._processes:
                    process.join(max(0.0, deadline - time.monotonic()))
        finally:
            self._abandon()

    def _start(self, threads: int, init_method: str) -> None:
        context = fork_server(threads)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._beats = context.RawArray("Q", self.size)
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            post = Post(rank, self.size, init_method, self._timeout)
            process = context.Process(
                target=work,
                args=(theirs, self._beats, post, threads, environment),
                name=f"worker {rank}",
                daemon=True,
            )
            try:
                process.start()
            except (EOFError, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise RunError(f"{self._names([rank])} could not be started: {reason}") from error
            theirs.close()  # else the end of the worker would not be seen
            self._processes.append(process)
            self._pipes.append(mine)
            threading.Thread(target=_read, args=(rank, mine, self._inbox), daemon=True).start()

    def _send(self, command: Command) -> None:
        self._broadcast(pack(command))

    def _broadcast(self, data: bytes) -> None:
        for pipe in self._pipes:
            threading.Thread(target=_write, args=(pipe, data), daemon=True).start()

    def _events(self) -> Iterator[Event]:
        with suppress(Empty):
            rank, data = self._inbox.get(timeout=POLL)
            yield rank, *(("failed", self._death(rank)) if data is None else pickle.loads(data))
        for rank, silence in enumerate(self._silence):
            if self._beats[rank] != self._seen[rank]:
                self._seen[rank] = self._beats[rank]
                silence.restart()
            elif silence.tick() > self._limit:
                text = f"no heartbeat for {self._limit:g} s: it is stopped, or the machine swaps"
                yield rank, "failed", Failure(WorkerError(text))

    def _death(self, rank: int) -> Failure:
        process = self._processes[rank]
        process.join(GRACE)
        return Failure(WorkerError(f"the process {_fate(process.exitcode)}"))

    def _abandon(self) -> None:
        self._kill()


def fork_server(threads: int) -> ForkServerContext:
    """Return what starts processes, forked from a server that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # the server would start it, and unblock interrupts
    with _variable("OMP_NUM_THREADS", str(threads)), _without_interrupts():
        forkserver.ensure_running()
    return context


def _read(rank: int, pipe: Connection, inbox: SimpleQueue[tuple[int, bytes | None]]) -> None:
    """Pass on what a worker says, then None. In a thread: half a message must block nobody."""
    with suppress(EOFError, OSError):
        while True:
            inbox.put((rank, pipe.recv_bytes()))
    inbox.put((rank, None))


def _write(pipe: Connection, data: bytes) -> None:
    """Send to a worker. In a thread: one that does not read must block nobody."""
    with suppress(OSError):  # its death is noticed by who reads
        pipe.send_bytes(data)


def _kill(processes: Sequence[BaseProcess], folder: Path) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(FAREWELL)
    shutil.rmtree(folder, ignore_errors=True)


def _fate(code: int | None) -> str:
    if code is None:
        return "broke off"
    if code >= 0:  # 255 is also what multiprocessing says once the fork server is gone
        server = ", or its fork server was killed" if code == 255 else ""
        return f"ended with exit code {code}{server}"
    names = {int(known): known.name for known in signal.Signals}
    name = names.get(-code, f"signal {-code}")
    hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block Ctrl-C for a while, and for good in processes that are started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
