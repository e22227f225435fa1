"""For one GPU: does it say what the CPU says, how fast is it, and what does it wait for.

1. Parity: small cells (zeros in both directions against no defense, SENTINEL and cascade) on the
   CPU in fp32, then on the GPU in fp32 and in bf16. In fp32 the same workers must be banned at the
   same steps, and no loss may differ by more than 0.1 % (TOLERANCE). bf16 stands beside it and is
   not judged.
2. Speed at the shape of the published 0.6B model, in bf16: plain training, the pipeline without a
   defense, with SENTINEL, and with cascade. Tokens per second by the clock on the wall, so what
   only the simulation has to do counts; the peak of memory that torch allocated; and how often in a
   step the host waits for the GPU, by place in the code (torch.cuda.set_sync_debug_mode).

What does not fit into the budget is left out, what fails does not stop the rest, and both are said.
The exit code is 1 if the GPU and the CPU differ, or something failed.

    python benchmarks/gpu.py [--device cuda|cpu] [--tiny] [--budget 420] [--steps 20]
                             [--json gpu.json] [--set grid.replicas=4 ...]

`--device cpu --tiny` runs it to the end without a GPU, as its test does. `--set` changes the speed
part; `--set data...` both.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import runners
import torch

from sentinel_bench import tracks
from sentinel_bench.config import Cell, Component, Scenario, merge
from sentinel_bench.data.batches import Batches
from sentinel_bench.data.tokens import load_tokens
from sentinel_bench.errors import SentinelBenchError
from sentinel_bench.pipeline.session import Session, prepare

TOLERANCE = 1e-3
"""Of losses in fp32, relative. Rounding differs between devices, and AdamW amplifies it."""
ROOT = Path(__file__).parent.parent
WIDE = "sentinel:quarantine=true,lambda=1"
"""Fences wide enough that rounding decides about nobody."""
CELLS = [("zeros", "none"), ("zeros", WIDE), ("zeros", "cascade")]
SMALL: dict[str, Any] = {
    "threat": {"mode": "both", "honest_last": 1},
    "train": {"lr_decay_ratio": 0.5},
}
SMALLER: dict[str, Any] = merge(
    SMALL,
    {
        "model": {"hidden_size": 16, "intermediate_size": 32},
        "train": {"steps": 24, "warmup_steps": 12, "seq_len": 8, "eval_sequences": 8},
    },
)
PUBLISHED: dict[str, Any] = {
    "model": {"preset": "llama-3-0.6b"},
    "grid": {"stages": 16, "replicas": 8},
    "train": {"batch_size": 1, "seq_len": 512, "warmup_steps": 12, "steps": 1000},
}
VOCABULARY = 128_256
"""Of the published model; the corpus has fewer tokens, which changes no shape."""
TINY: dict[str, Any] = {
    "model": {"preset": "llama-tiny", "hidden_size": 16, "intermediate_size": 32},
    "grid": {"stages": 4, "replicas": 4},
    "train": {"batch_size": 1, "seq_len": 16, "warmup_steps": 12, "steps": 1000},
}
VARIANTS = ["plain training", "none", "sentinel", "cascade"]


class Course:
    """How the measurements go: the seconds that are left, what was left out, what failed.

    Args:
        seconds: in all.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.skipped: list[str] = []
        self.failed: list[str] = []

    def allows(self, what: str, seconds: float) -> bool:
        """Tell whether there are so many seconds left; else note that `what` was left out."""
        left = self._end - time.monotonic()
        if left >= seconds:
            return True
        self.skipped.append(f"{what}: needs about {seconds:.0f} s, {left:.0f} s are left")
        return False

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Note an error within the `with` block, and go on."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.skipped.append(f"{what}: out of memory: {str(error).splitlines()[0]}")
        except Exception as error:
            traceback.print_exc()
            self.failed.append(f"{what}: {type(error).__name__}: {error}")


@dataclass
class Rows:
    """A log that keeps losses and bans."""

    losses: list[float] = field(default_factory=list)
    bans: list[list[int]] = field(default_factory=list)

    def append(self, kind: str, /, **fields: Any) -> None:
        """Keep a row."""
        if kind == "step":
            self.losses.append(fields["loss"])
        elif kind == "ban":
            self.bans.append([fields[key] for key in ("step", "stage", "replica")])


def run_cells(scenario: Scenario, course: Course) -> dict[str, Rows]:
    """Run the small cells; return what each logged."""
    cells = [
        Cell(scenario=scenario, attack=Component.parse(a), defense=Component.parse(d))
        for a, d in CELLS
    ]
    where = f"on {scenario.device} in {scenario.train.precision}"
    found: dict[str, Rows] = {}
    with course.attempt(f"warm-up {where}"):
        session = Session(scenario, cells, load_tokens(scenario.data))
        session.warm_up()
        for cell in cells:
            with course.attempt(f"{cell.label} {where}"):
                rows = Rows()
                session.run(cell, rows)
                found[cell.label] = rows
    return found


def parity(device: str, small: dict[str, Any], course: Course) -> list[dict[str, Any]]:
    """Compare a device with the CPU; return one row for each cell and precision.

    `small` is what differs from the track `smoke`.
    """
    rows: list[dict[str, Any]] = []
    took, base = 0.0, None
    for place, precision in (("cpu", "fp32"), (device, "fp32"), (device, "bf16")):
        if not course.allows(f"parity on {place} in {precision}", 2 * took):
            continue
        changes = runners.changed(small, [f"device={place}", f"train.precision={precision}"])
        started = time.monotonic()
        found = run_cells(tracks.scenario("smoke", changes), course)
        took = time.monotonic() - started
        base = found if base is None else base
        rows += [compared(c, place, precision, base[c], found[c]) for c in found if c in base]
    return rows


def compared(cell: str, device: str, precision: str, base: Rows, found: Rows) -> dict[str, Any]:
    """Hold what a cell logged against what it logged on the CPU."""
    pairs = list(zip(base.losses, found.losses, strict=False))
    apart = [0.0 if a == b or (a != a and b != b) else abs(a - b) / abs(a) for a, b in pairs]
    return {
        "cell": cell,
        "device": device,
        "precision": precision,
        "bans": found.bans,
        "same_bans": found.bans == base.bans,
        "same_length": len(base.losses) == len(found.losses),
        "loss": found.losses[-1],
        "worst_difference": worst(apart),
    }


def worst(apart: Sequence[float]) -> float:
    """Return the largest number; NaN counts as infinite."""
    return max(d if d == d else float("inf") for d in apart)


def agrees(row: dict[str, Any]) -> bool:
    """Tell whether a row is as it must be, which is asked of fp32 alone."""
    same = row["same_bans"] and row["same_length"] and row["worst_difference"] <= TOLERANCE
    return bool(same) or row["precision"] != "fp32"


@contextmanager
def synchronisations(device: str) -> Iterator[Counter[str]]:
    """Count how often the host waits for the device within the `with` block, by place."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            found[f"{_short(warning.filename)}:{warning.lineno}"] += 1


def _short(filename: str) -> str:
    path = Path(filename)
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return "/".join(path.parts[-3:])


def wait(device: str) -> None:
    """Wait until the device has nothing to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(
    name: str, make: Callable[[], runners.Step], scenario: Scenario, n: int
) -> dict[str, Any]:
    """Build a variant, train `n` steps, and return what they took."""
    device, first = scenario.device, scenario.train.warmup_steps
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    step = make()
    for t in range(first, first + 2):
        step(t)
    built = time.monotonic() - started
    seconds = []
    for t in range(first + 2, first + 2 + n):
        wait(device)
        began = time.perf_counter()
        step(t)
        wait(device)
        seconds.append(time.perf_counter() - began)
    with synchronisations(device) as places:
        for t in range(first + 2 + n, first + 4 + n):
            step(t)
    train = scenario.train
    tokens = scenario.grid.replicas * train.batch_size * train.seq_len
    cuda = device == "cuda"
    return {
        "variant": name,
        "tokens_per_second": tokens / statistics.median(seconds),
        "ms_per_step": 1e3 * statistics.median(seconds),
        "spread_ms": [1e3 * min(seconds), 1e3 * max(seconds)],
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "waits_per_step": sum(places.values()) / 2 if cuda else None,
        "waits_by_place": {place: count / 2 for place, count in places.most_common()},
        "built_seconds": built,
    }


def speed(
    scenario: Scenario, vocabulary: int | None, steps: int, course: Course
) -> list[dict[str, Any]]:
    """Measure all variants, one after the other, so that each has the memory for itself."""
    tokens = load_tokens(scenario.data)
    batches = Batches.of(tokens, scenario)
    size = max(vocabulary or 0, tokens.vocab_size)
    rows: list[dict[str, Any]] = []
    took = 0.0
    for name in VARIANTS:
        if not course.allows(name, 1.5 * took):
            continue
        log = runners.Counter()
        make = partial(runners.plain, scenario, batches, size)
        if name != "plain training":
            make = partial(runners.piped, scenario, batches, size, name, log)
        started = time.monotonic()
        with course.attempt(name):
            rows.append(timed(name, make, scenario, steps) | {"flags": log.flags})
        took = max(took, time.monotonic() - started)
    return rows


def show_parity(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table."""
    print(f"{'parity with the CPU':<36}{'bans':>6}{'same':>6}{'last loss':>12}{'difference':>12}")
    for row in rows:
        name = f"{row['cell']}, {row['device']} {row['precision']}"
        print(
            f"{name:<36}{len(row['bans']):>6}{'yes' if row['same_bans'] else 'NO':>6}"
            f"{row['loss']:>12.5f}{row['worst_difference']:>12.1e}"
        )


def show_speed(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table, and where the host waits."""
    print(
        f"\n{'speed':<16}{'tokens/s':>12}{'over plain':>12}{'over none':>11}{'ms/step':>10}"
        f"{'peak GB':>9}{'waits/step':>12}{'flags':>7}"
    )
    pace = {row["variant"]: row["tokens_per_second"] for row in rows}
    for row in rows:
        ratios = [
            f"{row['tokens_per_second'] / pace[other]:.3f}" if other in pace else "-"
            for other in ("plain training", "none")
        ]
        peak, waits = row["peak_gb"], row["waits_per_step"]
        print(
            f"{row['variant']:<16}{row['tokens_per_second']:>12,.0f}{ratios[0]:>12}"
            f"{ratios[1]:>11}{row['ms_per_step']:>10.1f}"
            f"{'-' if peak is None else format(peak, '.2f'):>9}"
            f"{'-' if waits is None else format(waits, '.1f'):>12}{row['flags']:>7}"
        )
    for row in rows:
        for place, count in list(row["waits_by_place"].items())[:12]:
            print(f"  {row['variant']} waits {count:g} times a step at {place}")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: to test this script")
    parser.add_argument("--budget", type=float, default=420, help="seconds")
    parser.add_argument(
        "--steps", type=runners.positive, default=20, help="timed steps of each variant"
    )
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="file to write")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


def main() -> int:
    """Measure what the arguments ask for."""
    arguments = parse()
    course, started = Course(arguments.budget), time.monotonic()
    try:
        if arguments.device == "cpu" and not arguments.tiny:
            raise SentinelBenchError("--device cpu is there to test this script: add --tiny")
        prepare(arguments.device, None)
        runners.writable(arguments.json)
        shape, small = (TINY, SMALLER) if arguments.tiny else (PUBLISHED, SMALL)
        changes = runners.changed(shape, [f"device={arguments.device}", *arguments.settings])
        small = merge(small, {"data": changes.get("data", {})})
        scenario = tracks.scenario("core", changes)
        torch.set_float32_matmul_precision("highest")  # fp32 is fp32
        same = parity(arguments.device, small, course)
        show_parity(same)
        vocabulary = None if arguments.tiny else VOCABULARY
        fast = speed(scenario, vocabulary, arguments.steps, course)
        show_speed(fast)
    except SentinelBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cuda = arguments.device == "cuda"
    result = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "scenario": scenario.model_dump(mode="json"),
        "vocabulary": vocabulary,
        "parity": same,
        "speed": fast,
        "skipped": course.skipped,
        "failed": course.failed,
        "seconds": time.monotonic() - started,
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for line in course.skipped:
        print(f"left out: {line}")
    wrong = [f"{row['cell']} differs from the CPU" for row in same if not agrees(row)]
    for line in (*course.failed, *wrong):
        print(f"FAILED: {line}")
    print(f"\n{result['device']}, torch {torch.__version__}; written: {arguments.json}")
    return 1 if course.failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
