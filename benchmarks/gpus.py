"""For several GPUs: does a run over N of them say what a run on one says, and how fast is it.

The same cells (zeros against no defense, SENTINEL and cascade) on one GPU in one process, over N by
torchrun, and over N as two replica groups. The same workers must be banned at the same steps, and
no loss may differ by more than TOLERANCE; a table has tokens per second and their ratios.

    python benchmarks/gpus.py N [--device cuda|cpu] [--tiny] [--json gpus.json] [--set KEY=VALUE]

`--device cpu --tiny` runs it without GPUs, over gloo. The exit code is 1 if placements differ, or a
run failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sentinel_bench.record import read_events

TOLERANCE = 1e-3
"""Of losses, relative. On one GPU all replicas are one batch, and other kernels round otherwise."""
DEFENSES = ("none", "sentinel:quarantine=true,lambda=1", "cascade")
PUBLISHED = {
    "model.preset": "llama-3-0.6b",
    "grid.stages": 16,
    "grid.replicas": 8,
    "train.batch_size": 4,
    "train.microbatches": 4,
    "train.seq_len": 512,
    "train.steps": 60,
    "train.warmup_steps": 20,
    "train.precision": "fp32",
    "threat.mode": "both",
}
TINY = {"train.batch_size": 4, "train.microbatches": 4, "train.steps": 30, "train.warmup_steps": 15}


def placements(n: int) -> dict[str, list[str]]:
    """Return what is run, by name, and how it is started."""
    over = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    found: dict[str, list[str]] = {"1": [], f"{n}": over}
    if n % 2 == 0:
        found[f"2 x {n // 2}"] = [*over, "--replica-groups"]
    return found


def run(start: list[str], options: list[str], out: Path) -> list[dict[str, Any]]:
    """Run all cells in one placement; return the results that the command prints."""
    groups = ["--replica-groups", "2"] if start[-1:] == ["--replica-groups"] else []
    launcher = [part for part in start if part != "--replica-groups"]
    command = [sys.executable, *launcher, "-m", "sentinel_bench", "run", "--json", *options]
    done = subprocess.run(
        [*command, *groups, "--out", str(out)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"failed with {done.returncode}: {' '.join(command)}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def told(folder: str) -> tuple[list[tuple[int, int, int]], list[float]]:
    """Return bans and losses of a run."""
    rows = read_events(Path(folder))
    bans = [(r["step"], r["stage"], r["replica"]) for r in rows if r["type"] == "ban"]
    return bans, [r["loss"] for r in rows if r["type"] in ("step", "eval")]


def compared(
    name: str, base: list[dict[str, Any]], found: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Hold the runs of a placement against those of one process."""
    rows = []
    for one, other in zip(base, found, strict=True):
        (bans, losses), (bans_too, losses_too) = told(one["folder"]), told(other["folder"])
        apart = [abs(a - b) / abs(a) for a, b in zip(losses, losses_too, strict=False)]
        speed, plain = (r["scores"]["tokens_per_second"] for r in (other, one))
        rows.append(
            {
                "placement": name,
                "cell": Path(other["folder"]).name.split("_")[1],
                "same_bans": bans == bans_too and len(losses) == len(losses_too),
                "difference": max(apart, default=float("inf")),
                "tokens_per_second": speed,
                "over_one": speed / plain,
            }
        )
    return rows


def main() -> int:
    """Run all placements, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("n", type=int, help="number of GPUs, or of processes on a CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, dest="path")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    settings = [f"{k}={v}" for k, v in (TINY if given.tiny else PUBLISHED).items()]
    options = ["--track", "smoke", "--device", given.device, "--attack", "zeros"]
    options += [word for name in DEFENSES for word in ("--defense", name)]
    options += [word for item in settings + given.set for word in ("--set", item)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        base: list[dict[str, Any]] = []
        for name, start in placements(given.n).items():
            found = run(start, options, Path(folder) / name.replace(" ", ""))
            base = base or found
            rows += compared(name, base, found)
    head = f"{'same bans':>10}{'difference':>12}{'tokens/s':>12}{'over 1':>9}"
    print(f"{'placement':<11}{'cell':<22}{head}")
    for r in rows:
        print(
            f"{r['placement']:<11}{r['cell']:<22}{'yes' if r['same_bans'] else 'NO':>10}"
            f"{r['difference']:>12.1e}{r['tokens_per_second']:>12,.0f}{r['over_one']:>9.2f}"
        )
    if given.path:
        given.path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0 if all(r["same_bans"] and r["difference"] <= TOLERANCE for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
