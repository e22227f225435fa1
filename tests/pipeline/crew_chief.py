"""A process whose workers are busy until something ends it. No torch is imported in it."""

from __future__ import annotations

import os
import sys
import time

from sentinel_bench.pipeline import crew


class Sleeper:
    def __init__(self, post: crew.Post) -> None:
        self.post = post

    def sleeps(self) -> None:
        self.post.tell("pid", pid=os.getpid())
        time.sleep(600)


if __name__ == "__main__":
    crew.PRELOAD[:] = ["torch"]
    with crew.LocalCrew(int(sys.argv[1]), Sleeper, timeout=60) as workers:
        workers.call("sleeps", listen=lambda kind, fields: os.write(1, b"%d\n" % fields["pid"]))
