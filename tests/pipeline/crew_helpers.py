"""Objects for crews: sums over all workers, and many ways to go wrong."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sentinel_bench.errors import PluginError, SentinelBenchError
from sentinel_bench.pipeline import chief
from sentinel_bench.pipeline.torchrun import TorchrunCrew
from sentinel_bench.pipeline.worker import Post


class PickyError(PluginError):
    """Cannot be unpickled: it takes two arguments and keeps one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}", party="defense")


class Toy:
    """Has a part in a sum over all workers."""

    def __init__(self, post: Post) -> None:
        self.post = post
        dist.init_process_group(
            "gloo",
            init_method=post.init_method,
            rank=post.rank,
            world_size=post.size,
            timeout=timedelta(seconds=60),
        )

    def total(self, number: float) -> float:
        """The sum over ranks of number + rank."""
        value = torch.tensor([float(number + self.post.rank)])
        dist.all_reduce(value)
        return value.item()

    def tells(self, times: int, pause: float = 0.0) -> str:
        for i in range(times):
            time.sleep(pause)
            self.post.tell("sum", rank=self.post.rank, i=i, kind="x", sum=self.total(i))
        return "told"

    def settings(self) -> dict[str, Any]:
        names = ("OMP_NUM_THREADS", "CREW_TEST")
        return {"threads": torch.get_num_threads()} | {n: os.environ.get(n) for n in names}

    def pids(self) -> list[int]:
        pids: list[Any] = [None] * self.post.size
        dist.all_gather_object(pids, os.getpid())
        return pids

    def large(self, data: bytes) -> bytes:
        return data[::-1]

    def unpicklable(self) -> object:
        return lambda: self

    def raises(self, rank: int, error: Exception, cause: Exception | None = None) -> None:
        """The others wait for `rank`."""
        if self.post.rank == rank:
            raise error from cause
        self.total(0)

    def raises_picky(self) -> None:
        raise PickyError("one", "two")

    def loses(self, rank: int, error: Exception | None) -> float:
        """All but `rank` lose a connection, and say so first."""
        if self.post.rank != rank:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        time.sleep(0.5)
        if error is None:
            time.sleep(600)
            return 0.0
        raise error

    def signals(self, rank: int, number: int) -> float:
        """`rank` gets a signal while the others wait for it."""
        self.total(0)
        if self.post.rank == rank:
            os.kill(os.getpid(), number)
        return self.total(0)

    def exits(self, rank: int) -> float:
        if self.post.rank == rank:
            os._exit(3)
        return self.total(0)

    def sleeps(self, rank: int) -> float:
        """`rank` takes no part."""
        if self.post.rank == rank:
            time.sleep(600)
        return self.total(0)

    def terminated(self) -> None:
        """Rank 0 is asked to end while all wait."""
        if self.post.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)

    def deadlocks(self) -> None:
        """Everybody waits for the next one."""
        dist.recv(torch.zeros(1), (self.post.rank + 1) % self.post.size)

    def stops_in_half_a_message(self) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        while True:
            self.post.tell("much", data=bytes(1 << 22))

    def sums_for_ever(self) -> None:
        while True:
            self.post.tell("sum", sum=self.total(0))


def fails_to_build(post: Post, rank: int, how: str) -> Toy:
    if post.rank == rank:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exits":
            os._exit(3)
        raise PluginError("no such place", "attack")
    return Toy(post)


def unreadable(*_: object) -> None:
    raise ImportError("no module named nonsense")


class Unreadable:
    """Can be pickled, but not read again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return unreadable, ()


def torchrun_rank(method: str, args: str, record: str) -> None:
    """What each process of torchrun runs; rank 0 writes down what came of a call of `method`."""
    chief.GRACE = 0.5
    workers = TorchrunCrew(Toy, timeout=1.5, describe=lambda rank: f"stage {rank}")
    if workers.rank:
        workers.follow()
        return
    lines, told = [], []
    with workers:
        lines.append(repr(workers.call("tells", 2, listen=lambda *event: told.append(event))))
        lines.append(repr(told))
        time.sleep(0.2)  # the others wait
        try:
            lines.append(repr(workers.call(method, *eval(args))))
        except SentinelBenchError as error:
            lines += [type(error).__name__, getattr(error, "party", "none"), str(error)]
            time.sleep(0.5)  # the launcher wants this process to end, and it is not yet done
    Path(record).write_text("\n".join(lines) + "\n")


def rank_without_launcher(rank: int, size: int, port: int, *args: str) -> None:
    """The same in a process that was not started by torchrun but has its variables."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torchrun_rank(*args)


if __name__ == "__main__":
    torchrun_rank(*sys.argv[1:])
