"""For several GPUs of one machine: do they say what one says, and how much faster are they.

Each line is a run of its own of `sentinel-bench run`: in one process, under torchrun with a process
for each GPU, and the same with the replicas in two groups (2 pipelines of half the length).

1. Parity, in fp32: a small grid, zeros against no defense, SENTINEL and cascade. The same workers
   must be banned at the same steps, and no loss may differ by more than 0.1 %; else the exit code
   is 1.
2. Speed, in bf16 on GPUs: the layers of the published 0.6B model (with the vocabulary of the
   corpus), nobody attacks; tokens per second of each defense, and their ratio to one process.
3. The same against torch's bare pipelining: benchmarks/pipeline.py.

What does not fit into the budget is left out, what fails does not stop the rest, and both are said.

    python benchmarks/gpus.py [N] [--device cuda|cpu] [--tiny] [--budget 1200]
                              [--parts parity,speed,bare] [--json gpus.json] [--set KEY=VALUE ...]

`--device cpu --tiny` runs it with gloo, without a GPU, as its test does. `--set` changes all parts.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runners import positive, writable

from sentinel_bench.errors import ConfigError

TOLERANCE = 1e-3
"""Of losses in fp32, relative."""
DEFENSES = ["--defense", "sentinel:quarantine=true,lambda=1", "--defense", "cascade"]
PARITY = [
    *("--track", "smoke", "--attack", "zeros", "--mode", "both", "--set", "threat.honest_last=1"),
    *("--set", "train.precision=fp32", "--stages", "8", "--replicas", "8"),
    *("--batch-size", "2", "--microbatches", "2"),
]
SPEED = [
    *("--track", "core", "--attack", "none", "--model", "llama-3-0.6b", "--stages", "16"),
    *("--replicas", "8", "--batch-size", "4", "--microbatches", "4", "--seq-len", "512"),
    *("--steps", "60", "--warmup", "20", "--set", "train.eval_sequences=64"),
]
BARE = ["model.preset=llama-3-0.6b", "grid.stages=16", "train.seq_len=512"]
TINY = [
    *("--model", "llama-tiny", "--set", "model.hidden_size=16", "--seq-len", "8"),
    *("--set", "model.intermediate_size=32", "--steps", "24", "--warmup", "12", "--stages", "4"),
    *("--replicas", "4", "--batch-size", "2", "--microbatches", "2"),
]
TINY_BARE = ["model.hidden_size=16", "model.intermediate_size=32", "train.seq_len=8"]
ALONE = "1 process"


class Course:
    """Runs commands one after the other; knows what is left of the time, and what went wrong.

    Args:
        seconds: in all.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._longest = 0.0
        self.skipped: list[str] = []
        self.failed: list[str] = []

    def run(self, what: str, command: Sequence[str]) -> Any:
        """Return the JSON that a command prints; None if it was left out, or has failed."""
        left = self._end - time.monotonic()
        if left < self._longest:
            self.skipped.append(f"{what}: {left:.0f} s are left, too few for one more")
            return None
        print(f"{what} ...", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, *command],
                capture_output=True,
                text=True,
                timeout=left,
                check=False,
            )
        except subprocess.TimeoutExpired:
            self.skipped.append(f"{what}: was not done in the {left:.0f} s that were left")
            return None
        finally:
            self._longest = max(self._longest, time.monotonic() - started)
        try:
            found = json.loads(done.stdout)
        except ValueError:
            found = None
        if done.returncode or found is None:
            print(done.stderr, file=sys.stderr)
            lines = done.stderr.strip().splitlines() or ["it says nothing"]
            self.failed.append(f"{what}: exit code {done.returncode}: {lines[-1]}")
        return found


def placements(processes: int) -> dict[str, list[str]]:
    """Return which processes there are, as what runs them: name to command."""
    run = ["-m", "sentinel_bench", "run"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    found = {ALONE: run, f"{processes} x 1": [*torchrun, *run]}
    if processes % 2 == 0:
        found[f"{processes // 2} x 2 groups"] = [*torchrun, *run, "--replica-groups", "2"]
    return found


def cells(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each cell of a run its speed, its losses and its bans."""
    found = {}
    for result in results:
        lines = (Path(result["folder"]) / "events.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        attack, defense = (result["cell"][key].split(":")[0] for key in ("attack", "defense"))
        found[f"{attack} vs {defense}"] = {
            "outcome": result["scores"]["outcome"],
            "tokens_per_second": result["scores"]["tokens_per_second"],
            "losses": [row["loss"] for row in rows if row["type"] == "step"],
            "bans": [
                [row["step"], row["stage"], row["replica"]] for row in rows if row["type"] == "ban"
            ],
        }
    return found


def measure(
    part: str, options: Sequence[str], processes: int, course: Course
) -> dict[str, dict[str, dict[str, Any]]]:
    """Run the cells of a part in all placements: placement to cell to what it gave."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="sentinel-bench-") as folder:
        for name, command in placements(processes).items():
            out = str(Path(folder) / name.replace(" ", "-"))
            command = [*command, *options, *DEFENSES, "--json", "--out", out]
            results = course.run(f"{part}, {name}", command)
            if results is not None:
                found[name] = cells(results)
    return found


def compared(one: dict[str, Any], other: dict[str, Any]) -> tuple[bool, float]:
    """Tell whether two runs of a cell banned the same, and how far their losses are apart."""
    pairs = list(zip(one["losses"], other["losses"], strict=False))
    apart = [0.0 if a == b or (a != a and b != b) else abs(a - b) / abs(a) for a, b in pairs]
    same = one["bans"] == other["bans"] and len(one["losses"]) == len(other["losses"])
    return same, max((math.inf if d != d else d for d in apart), default=math.inf)


def show_parity(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Print a table; return what differs."""
    if ALONE not in found:
        return []
    wrong = []
    print(f"{'parity with ' + ALONE:<44}{'bans':>6}{'same':>6}{'last loss':>12}{'difference':>12}")
    for name, given in found.items():
        for cell in (cell for cell in given if cell in found[ALONE]):
            same, apart = compared(found[ALONE][cell], given[cell])
            bans, losses = given[cell]["bans"], given[cell]["losses"]
            print(
                f"{f'{cell}, {name}':<44}{len(bans):>6}{'yes' if same else 'NO':>6}"
                f"{losses[-1]:>12.5f}{apart:>12.1e}"
            )
            if not (same and apart <= TOLERANCE):
                wrong.append(f"{cell}: {name} differs from {ALONE}")
    return wrong


def show_speed(found: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print a table."""
    head = f"over {ALONE}"
    print(f"\n{'speed':<44}{'tokens/s':>12}{head:>18}{'over no defense':>18}")
    for name, given in found.items():
        for cell, row in given.items():
            pace = row["tokens_per_second"]
            others = [found.get(ALONE, {}).get(cell), given.get("none vs none")]
            ratios = [f"{pace / o['tokens_per_second']:.3f}" if o else "-" for o in others]
            print(f"{f'{cell}, {name}':<44}{pace:>12,.0f}{ratios[0]:>18}{ratios[1]:>18}")


def show_bare(found: Any) -> None:
    """Print a table."""
    print(f"\n{'beside bare pipelining':<44}{'tokens/s':>12}{'over bare':>18}{'quartiles':>18}")
    for row in found["results"][0]["variants"]:
        low, middle, high = row["over_bare"]
        print(
            f"{row['variant']:<44}{row['tokens_per_second']:>12,.0f}{middle:>18.3f}"
            f"{f'{low:.3f}-{high:.3f}':>18}"
        )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "processes", nargs="?", type=positive, help="default: the GPUs that torch sees"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: to test this script")
    parser.add_argument("--budget", type=float, default=1200, help="seconds")
    parser.add_argument("--parts", default="parity,speed,bare")
    parser.add_argument("--json", type=Path, default=Path("gpus.json"), help="file to write")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


def usable(arguments: argparse.Namespace) -> str | None:
    """Say what is wrong with the arguments, None if nothing is; fill in `processes`."""
    unknown = set(arguments.parts.split(",")) - {"parity", "speed", "bare"}
    if unknown:
        return f"--parts {arguments.parts!r}: parity, speed and bare, with commas"
    if arguments.device == "cpu" and not arguments.tiny:
        return "--device cpu is there to test this script: add --tiny"
    if arguments.device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
        arguments.processes = arguments.processes or gpus
        if arguments.processes > gpus or gpus < 2:
            return f"{max(arguments.processes, 2)} GPUs are needed, and torch sees {gpus}"
    try:
        writable(arguments.json)
    except ConfigError as error:
        return str(error)
    if (arguments.processes or 0) < 2:
        return "at least 2 processes are needed: benchmarks/gpus.sh 2 ..."
    return None


def measured(arguments: argparse.Namespace, course: Course) -> dict[str, Any]:
    """Run all parts; print a table of each."""
    processes, parts = arguments.processes, arguments.parts.split(",")
    tiny, own = TINY if arguments.tiny else [], ["--device", arguments.device]
    own += [part for setting in arguments.settings for part in ("--set", setting)]
    found: dict[str, Any] = {}
    if "parity" in parts:
        found["parity"] = measure("parity", [*PARITY, *tiny, *own], processes, course)
        course.failed += show_parity(found["parity"])
    if "speed" in parts:
        found["speed"] = measure("speed", [*SPEED, *tiny, *own], processes, course)
        show_speed(found["speed"])
    if "bare" in parts:
        settings = TINY_BARE if arguments.tiny else BARE
        own += [part for setting in settings for part in ("--set", setting)]
        rounds = ["--rounds", "2" if arguments.tiny else "10", "--processes", str(processes)]
        script = str(Path(__file__).with_name("pipeline.py"))
        found["bare"] = course.run("bare", [script, "--json", *rounds, *own])
        if found["bare"] is not None:
            show_bare(found["bare"])
    return found


def main() -> int:
    """Measure what the arguments ask for."""
    arguments = parse()
    wrong = usable(arguments)
    if wrong is not None:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    course = Course(arguments.budget)
    found = measured(arguments, course)
    content = {
        "processes": arguments.processes,
        **found,
        "skipped": course.skipped,
        "failed": course.failed,
    }
    arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for line in course.skipped:
        print(f"left out: {line}")
    for line in course.failed:
        print(f"FAILED: {line}")
    print(f"\nwritten: {arguments.json}")
    return 1 if course.failed else 0


if __name__ == "__main__":
    sys.exit(main())
