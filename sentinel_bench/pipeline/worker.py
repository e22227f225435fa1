"""The inside of a worker of a crew: what it is given, what it obeys, what it says of a failure.

No torch at the top of this file: the chief needs none.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from sentinel_bench import errors
from sentinel_bench.errors import PluginError, RunError, SentinelBenchError

Listen = Callable[[str, dict[str, Any]], None]
Build = Callable[["Post"], object]
Command = tuple[str | Build, tuple[Any, ...]]
"""What to call, with which arguments: the function that builds the object, or a method of it."""

BEAT = 0.3
"""Seconds between two heartbeats."""

PR_SET_PDEATHSIG = 1
"""Of Linux: which signal a process gets when its parent ends (prctl(2))."""

UNREACHABLE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|remote process exited", re.I
)
"""What gloo and NCCL say of a peer that is gone."""

CHATTER = re.compile(r"\nException raised from|\. This is typically caused by")
"""Where frames of C++ and good wishes begin in a message of torch."""


class WorkerError(RunError):
    """Something went wrong in a worker that no error of this package tells of.

    `party` is who is at fault: "host" (memory, disk, network, a killed process) or "pipeline".
    """

    def __init__(self, message: str, party: str = "host") -> None:
        super().__init__(message)
        self.party = party


@dataclass(frozen=True)
class Post:
    """The place of a worker in its crew.

    Attributes:
        rank: its number, from 0 on.
        size: the number of workers.
        init_method: where `torch.distributed.init_process_group` finds the others.
        timeout: seconds that a wait for the others may take.
        listen: is told things; None for every rank but 0.
    """

    rank: int
    size: int
    init_method: str
    timeout: float
    listen: Listen | None = None

    def tell(self, kind: str, /, **fields: Any) -> None:
        """Tell the chief's `listen`; what ranks other than 0 tell is dropped."""
        if self.listen is not None:
            self.listen(kind, fields)


@dataclass(frozen=True)
class Failure:
    """What a worker says when it cannot go on.

    Attributes:
        error: the reason.
        lost: whether it only says that another worker cannot be reached.
    """

    error: SentinelBenchError
    lost: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error by what caused it: torch wraps what a stage raises."""
        chain = list(_causes(error))
        for cause in chain:
            if isinstance(cause, SentinelBenchError):
                return cls(_plain(cause))
        lost = any(map(_is_unreachable, chain))
        origin = chain[-1]
        frames = traceback.extract_tb(origin.__traceback__)
        place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        text = CHATTER.split(str(origin))[0]
        message = f"{type(origin).__name__}{place}: {' '.join(text.split())}"
        no_host = not lost and not isinstance(origin, OSError | MemoryError)
        party = "pipeline" if no_host and "out of memory" not in text else "host"
        return cls(WorkerError(message, party), lost)


class Worker:
    """Builds its object when it is told to, and calls methods of it afterwards."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._object: object = None

    def answer(self, command: bytes) -> bytes:
        """Obey; return ("done", value of rank 0) or ("failed", failure). All of it packed."""
        try:
            what, args = pickle.loads(command)
            value = None
            if isinstance(what, str):
                value = getattr(self._object, what)(*args)
            else:
                self._object = what(self._post)
            return pack(("done", value if self._post.rank == 0 else None))
        except BaseException as error:  # sys.exit() in a plugin would leave the others waiting
            return pack(("failed", Failure.of(error)))


def pack(message: object) -> bytes:
    """Return what `pickle.loads` reads.

    Raises:
        RunError: something in it cannot be pickled.
    """
    try:
        return pickle.dumps(message)
    except Exception as error:  # pickling runs the code of whatever is pickled
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"cannot be sent between processes: {reason}") from error


END = pack(None)
"""The last command."""


def work(
    pipe: Connection,
    beats: MutableSequence[int],
    post: Post,
    threads: int,
    environment: dict[str, str],
) -> None:
    """Obey the commands that come through `pipe`, until `END` comes. Runs in a process of its own.

    Args:
        pipe: to the chief, and back.
        beats: of all ranks; a thread counts up the own one.
        post: its place, without `listen`.
        threads: of torch.
        environment: the chief's.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the chief
    end_with_the_chief()
    commands: SimpleQueue[bytes] = SimpleQueue()
    beat = threading.Thread(target=_attend, args=(pipe, commands, beats, post.rank), daemon=True)
    beat.start()
    os.environ.update(environment)
    if "lo" in (name for _, name in socket.if_nameindex()):  # all workers are on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(threads)
    one_at_a_time = threading.Lock()

    def send(data: bytes) -> None:
        with one_at_a_time:
            pipe.send_bytes(data)

    if post.rank == 0:
        post = replace(post, listen=lambda kind, fields: send(pack(("tell", (kind, fields)))))
    worker = Worker(post)
    while (command := commands.get()) != END:
        send(worker.answer(command))


def _attend(
    pipe: Connection, commands: SimpleQueue[bytes], beats: MutableSequence[int], rank: int
) -> None:
    """Beat, and take commands; end the process, busy or not, when the chief is gone."""
    try:
        while True:
            if pipe.poll(BEAT):
                commands.put(pipe.recv_bytes())
            beats[rank] += 1
    except (EOFError, OSError):
        os._exit(1)


def end_with_the_chief() -> None:
    """Let the system kill this process when the chief is gone: a stopped one reads no pipe.

    A worker is a child of the fork server. That one ends with the last process that holds its
    "alive" pipe, which is the chief once the workers let go of it.
    """
    server: Any = forkserver._forkserver
    alive, server._forkserver_alive_fd = getattr(server, "_forkserver_alive_fd", None), None
    if alive is not None:
        os.close(alive)
    signal_at_end_of_parent(signal.SIGKILL)


def signal_at_end_of_parent(number: int) -> None:
    """Let the system send this process a signal when its parent ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _plain(error: SentinelBenchError) -> SentinelBenchError:
    """Return an error of the nearest class in `errors`: a plugin's own may not survive pickling."""
    kind = next(c for c in type(error).__mro__ if c.__module__ == errors.__name__)
    plain: SentinelBenchError = kind(str(error))
    if isinstance(plain, PluginError) and isinstance(error, PluginError):
        plain.party = str(error.party)
    return plain


def _is_unreachable(error: BaseException) -> bool:
    """Return whether an error says that another worker is gone, or does not answer."""
    if isinstance(error, ConnectionError):
        return True
    name, text = type(error).__name__, str(error)
    return isinstance(error, RuntimeError) and (
        name in ("DistNetworkError", "DistStoreError") or bool(UNREACHABLE.search(text))
    )
