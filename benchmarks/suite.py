"""What a shared warm-up saves: the cells of a track that fork from one, and the same cells alone.

The attacks of the track in its modes, without and with one defense, for one seed. Each cell is run
alone (its own warm-up) and from the warm-up that all share, the two in turn, in one process. The
time to build and warm up the shared session counts in full, watching defenses included. The events
of both must be equal but for times; the exit code is 1 if they are not.

    python benchmarks/suite.py [--track core] [--defense sentinel] [--cells N] [--scale 0.2]

`--scale` shortens training and warm-up alike.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sentinel_bench import suite, tracks
from sentinel_bench.config import Component
from sentinel_bench.pipeline.session import Session
from sentinel_bench.record import read_events
from sentinel_bench.runner import Finished, Group, Job, title

NO_CLOCK = ("time", "seconds", "tokens_per_second")


class Quiet:
    """Progress that nobody sees."""

    def say(self, text: str) -> None:
        """Forget a line."""

    def start(self, label: str, total: int) -> None:
        """Begin a piece of work."""

    def advance(self) -> None:
        """One step is done."""

    def finish(self) -> None:
        """The piece of work is over."""


def timeless(done: Finished) -> list[dict[str, Any]]:
    """Return the events of a run, but for times and what depends on them."""
    return [{k: v for k, v in row.items() if k not in NO_CLOCK} for row in read_events(done.folder)]


def main() -> int:
    """Print a line for each cell, and the ratio of the sums."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--track", default="core")
    parser.add_argument("--defense", default="sentinel")
    parser.add_argument("--cells", type=int, help="only the first N")
    parser.add_argument("--scale", type=float, default=1.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    track = tracks.get(given.track)
    whole = tracks.scenario(given.track, {})
    shorter = {
        "train": {
            k: round(getattr(whole.train, k) * given.scale) for k in ("steps", "warmup_steps")
        },
        "threat": {"gap": round(whole.threat.gap * given.scale)},
    }
    scenario = tracks.scenario(given.track, shorter if given.scale != 1 else {})
    defense = Component.parse(given.defense)
    attacks = [Component.parse(text) for text in track.attacks]
    plan = suite.plan_track(
        scenario,
        track.modes,
        [0],
        attacks,
        [defense],
        {defense.name: tracks.tuned(given.track, defense)},
    )
    cells = plan.cells[: given.cells]
    tokens = suite.load_tokens(scenario, Quiet())
    equal = True
    with tempfile.TemporaryDirectory() as folder:
        job = Job(tokens, Path(folder), Quiet(), (), {"threads": 1, "placement": {}}, {},
                  partial(Session, tokens=tokens))  # fmt: skip
        shared = Group(job, scenario, cells)
        started = time.perf_counter()
        shared.warm_session(cells[0])
        together = warm = time.perf_counter() - started
        apart = 0.0
        print(f"{'cell':<45}{'alone':>9}{'shared':>9}\n{'warm-up':<45}{'':>9}{warm:>8.1f}s")
        for cell in cells:
            alone = Group(job, scenario, [cell])
            alone.baseline = shared.baseline
            times, runs = [], []
            for group in (alone, shared):
                started = time.perf_counter()
                runs.append(group.run(cell))
                times.append(time.perf_counter() - started)
            if cell.is_baseline:
                shared.baseline = runs[1].result
            equal &= timeless(runs[0]) == timeless(runs[1])
            apart, together = apart + times[0], together + times[1]
            print(f"{title(cell):<45}{times[0]:>8.1f}s{times[1]:>8.1f}s", flush=True)
    print(
        f"{'all':<45}{apart:>8.1f}s{together:>8.1f}s: shared is {apart / together:.2f} times faster"
    )
    print("events are equal" if equal else "EVENTS DIFFER")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
