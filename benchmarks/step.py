"""What the pipeline, a defense and tampering cost: training steps side by side in one process.

Plain training of the Hugging Face model, the pipeline without a defense, and the pipeline with each
defense take turns after the track's warm-up, a few steps each, on the same batches. Printed are
tokens per second, the ratio to plain training (median over the rounds of the ratio within a round),
and how many signals were flagged meanwhile. With `--attacks`, in place of the defenses: the
pipeline without a defense, with 25 % of the replicas of each open stage attacking in one direction
or in both; the ratio is to the pipeline without an attack.

    python benchmarks/step.py [--rounds 15] [--steps 10] [--threads 2] [--shape tiny|0.6b|all]
                              [--defense NAME:key=value,... ...]
                              [--attacks activation|gradient|both]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from runners import Counter, piped, plain

from sentinel_bench import tracks
from sentinel_bench.config import Component
from sentinel_bench.data.batches import Batches
from sentinel_bench.data.tokens import load_tokens
from sentinel_bench.pipeline.cost import clock
from sentinel_bench.threat import place

DEFENSES = ("sentinel", "averaging", "cascade")
ATTACKS = (
    *("zeros", "ones", "random-value", "scaling", "sign-flip", "random-sign", "delay:steps=5"),
    *("bias", "invisible-noise", "alie", "update-sign-flip"),
)
SHAPES = {
    "tiny": {},
    "0.6b": {
        "model": {"preset": "llama-3-0.6b", "layers": 4},
        "grid": {"stages": 4, "replicas": 4},
        "train": {"batch_size": 1, "seq_len": 128, "warmup_steps": 12},
    },
}


def measure(
    shape: str, rounds: int, steps: int, *, defenses: Sequence[str], attacks: str | None
) -> None:
    """Print one table."""
    scenario = tracks.scenario("core", SHAPES[shape])
    train, grid = scenario.train, scenario.grid
    tokens = load_tokens(scenario.data)
    batches = Batches.of(tokens, scenario)
    logs: dict[str, Counter] = {}
    if attacks:
        threat = {"schedule": "at-once", "mode": attacks}
        attacked = tracks.scenario("core", {**SHAPES[shape], "threat": threat})
        runners = {
            f"+ {text}": piped(
                scenario, batches, tokens.vocab_size, "none", Counter(),
                place(attacked, Component.parse(text)),
            )
            for text in ("none", *ATTACKS)
        }  # fmt: skip
    else:
        runners = {"plain training": plain(scenario, batches, tokens.vocab_size)}
        names = ["none", *defenses]
        logs = {f"pipeline, {name}": Counter() for name in names}
        for name, log in zip(names, logs.values(), strict=True):
            runners[f"pipeline, {name}"] = piped(scenario, batches, tokens.vocab_size, name, log)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for round_ in range(rounds + 1):  # the first one warms up
        for name, step in runners.items():
            started = clock()
            for t in range(steps):
                step(train.warmup_steps + round_ * steps + t)
            if round_:
                seconds[name].append(clock() - started)
    per_round = steps * grid.replicas * train.batch_size * train.seq_len
    print(
        f"{shape}: {grid.stages} stages x {grid.replicas} replicas, batch {train.batch_size} x "
        f"{train.seq_len} tokens, {torch.get_num_threads()} threads, {rounds} rounds of {steps}"
    )
    over = "over none" if attacks else "over plain"
    width = max(map(len, seconds)) + 1
    print(f"{'':<{width}}{'tokens/s':>10}{over:>12}{'flags':>8}")
    base = next(iter(seconds.values()))
    for name, took in seconds.items():
        ratio = statistics.median(b / s for b, s in zip(base, took, strict=True))
        flags = logs[name].flags if name in logs else ""
        speed = per_round / statistics.median(took)
        print(f"{name:<{width}}{speed:>10,.0f}{ratio:>12.3f}{flags:>8}")


def main() -> None:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--defense", dest="defenses", nargs="+", default=DEFENSES)
    parser.add_argument("--attacks", choices=["activation", "gradient", "both"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for shape in SHAPES if arguments.shape == "all" else [arguments.shape]:
        few = shape != "tiny"
        measure(shape, max(3, arguments.rounds // 3) if few else arguments.rounds,
                2 if few else arguments.steps,
                defenses=arguments.defenses, attacks=arguments.attacks)  # fmt: skip


if __name__ == "__main__":
    main()
