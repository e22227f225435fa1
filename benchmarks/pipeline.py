"""What the boundaries cost on top of torch's own pipelining: steps side by side in one set of runs.

All variants live in the same processes, start from the same weights, see the same batches, and take
turns, a few steps each, in an order that rotates from round to round:

* bare: torch's `PipelineStage` and schedule over the same stages, with the global gradient norm
  (one all-reduce) and AdamW; nothing of ours but the layers.
* none: our pipeline without attack and defense, a step as `sentinel-bench run` does it.
* each defense: the same, watching honest workers, after a warm-up of 30 steps. The default is
  SENTINEL with fences so wide that it flags nobody: each false flag costs work of its own.

Printed for each number of processes: tokens per second (median of the rounds), their ratio to
`bare` (median of the ratios within a round, and their quartiles), processor time of all processes
per step and the ratio of `bare` to it (steadier where others use the machine), the loss of the last
step, and flags per step, all of them false.

    python benchmarks/pipeline.py [--processes 2,4] [--order gpipe|1f1b] [--microbatches 4]
                                  [--model llama-tiny] [--defense NAME:key=value,... ...]
                                  [--rounds 20] [--steps 2] [--device cpu|cuda] [--json]
                                  [--set grid.replicas=4 ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from runners import Counter, Step, changed, piped, positive
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from sentinel_bench import tracks
from sentinel_bench.config import Cell, Component, Scenario
from sentinel_bench.data.batches import Batches
from sentinel_bench.data.tokens import load_tokens
from sentinel_bench.errors import ConfigError, SentinelBenchError
from sentinel_bench.models.build import build_model
from sentinel_bench.models.presets import layers_per_stage, resolve
from sentinel_bench.pipeline import mesh
from sentinel_bench.pipeline.cost import clock
from sentinel_bench.pipeline.crew import LocalCrew
from sentinel_bench.pipeline.loss import rank_loss
from sentinel_bench.pipeline.stages import split
from sentinel_bench.pipeline.train import autocast, learning_rate, make_optimizer
from sentinel_bench.pipeline.worker import Post
from sentinel_bench.placement import Placement

WARMUP = 30
"""Steps in which a defense learns: more than the 10 after which a fence of SENTINEL closes."""
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Plain(nn.Module):
    """Consecutive stages, and nothing between them."""

    def __init__(self, stages: Sequence[nn.Module], scenario: Scenario) -> None:
        super().__init__()
        self.stages = nn.Sequential(*stages)
        self._scenario = scenario

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states or logits."""
        with autocast(self._scenario):
            h: Tensor = self.stages(x)
        return h


def bare(scenario: Scenario, batches: Batches, vocabulary: int, team: mesh.Mesh) -> Step:
    """Return a function that trains one step by torch's own pipelining.

    Its loss is known in the last process; it is NaN elsewhere.
    """
    train = scenario.train
    stages = split(build_model(scenario, vocabulary, "cpu"), layers_per_stage(scenario))
    model = Plain([stages[i] for i in team.segments[0]], scenario).to(team.device)
    optimizer = make_optimizer(model, train)
    first, last = team.position == 0, team.position == team.placement.length - 1
    schedule = SCHEDULES[team.placement.order](
        _stage(model, scenario, team, first=first),
        n_microbatches=train.microbatches,
        loss_fn=lambda logits, labels: rank_loss(logits, labels, [False]),
    )

    def step(t: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, t)
        ids, labels = (
            (torch.from_numpy(a).to(team.device, non_blocking=True) for a in batches.train(t))
            if first or last
            else (None, None)
        )
        losses: list[Tensor] = []
        given = {"target": labels, "losses": losses} if last else {}
        schedule.step(*([ids] if first else []), return_outputs=False, **given)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        square = norm.square()
        dist.all_reduce(square, group=team.pipe)
        nn.utils.clip_grads_with_norm_(model.parameters(), train.grad_clip, square.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).detach().mean()) if last else float("nan")

    return step


def _stage(model: nn.Module, scenario: Scenario, team: mesh.Mesh, *, first: bool) -> PipelineStage:
    train, device = scenario.train, team.device
    rows = scenario.grid.replicas * train.batch_size // train.microbatches
    ids = torch.zeros(rows, train.seq_len, dtype=torch.int64, device=device)
    width = resolve(scenario.model).hidden_size
    hidden = torch.zeros(*ids.shape, width, device=device, requires_grad=True)
    return PipelineStage(
        model,
        team.position,
        team.placement.length,
        device,
        input_args=(ids if first else hidden,),
        output_args=(hidden,),
        group=team.pipe,
    )


class Bench:
    """What each process holds: all variants.

    Args:
        placement, scenario: the same in all processes.
        defenses: of the variants besides `bare`; "none" is one.
        post: of this process.
    """

    def __init__(
        self, placement: Placement, scenario: Scenario, defenses: Sequence[str], post: Post
    ) -> None:
        mesh.connect(placement, post.rank, post.init_method, scenario.device)
        tokens = load_tokens(scenario.data, lambda _: None)
        batches = Batches.of(tokens, scenario)
        self._post = post
        self._first = scenario.train.warmup_steps
        self._team = mesh.Mesh(placement, scenario)
        self._logs = {name: Counter() for name in defenses}
        self._steps = {"bare": bare(scenario, batches, tokens.vocab_size, self._team)}
        for name, log in self._logs.items():
            self._steps[name] = piped(
                scenario, batches, tokens.vocab_size, name, log, team=self._team
            )

    def measure(self, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
        """Let all take turns; return for each the seconds and the processor time of each turn."""
        found: dict[str, dict[str, Any]] = {
            name: {"seconds": [], "processor": [], "flags": 0} for name in self._steps
        }
        order = list(self._steps)
        for round_ in range(rounds + 1):  # the first one warms up
            turn = range(self._first + round_ * steps, self._first + (round_ + 1) * steps)
            for name in order:
                seconds, processor, loss = self._turn(self._steps[name], turn)
                found[name]["loss"] = loss
                if round_:
                    found[name]["seconds"].append(seconds)
                    found[name]["processor"].append(processor)
                elif name in self._logs:
                    self._logs[name].flags = 0
            order = order[1:] + order[:1]
            self._post.tell("tick")
        for name, log in self._logs.items():
            found[name]["flags"] = log.flags
        return found

    def _turn(self, step: Step, turn: range) -> tuple[float, float, float]:
        self._together()
        started, busy = clock(), time.process_time()
        for t in turn:
            loss = step(t)
        busy = time.process_time() - busy
        self._together()
        seconds = clock() - started
        told = self._team.share((busy, loss))
        return seconds, sum(busy for busy, _ in told), told[-1][1]

    def _together(self) -> None:
        """Wait for all processes."""
        if self._team.device.type == "cuda":
            torch.cuda.synchronize()
        self._team.share(None)


def measure(
    scenario: Scenario,
    placement: Placement,
    defenses: Sequence[str],
    rounds: int,
    steps: int,
    tick: Callable[..., None] = lambda *_: None,
) -> dict[str, Any]:
    """Measure all variants over a number of processes; return what `main` prints."""
    build = partial(Bench, placement, scenario, defenses)
    with LocalCrew(placement.processes, build, timeout=placement.timeout) as crew:
        found = crew.call("measure", rounds, steps, listen=tick)
    train = scenario.train
    tokens = steps * scenario.grid.replicas * train.batch_size * train.seq_len
    rows = []
    for name, got in found.items():
        ratios = {
            key: [b / s for b, s in zip(found["bare"][key], got[key], strict=True)]
            for key in ("seconds", "processor")
        }
        rows.append(
            {
                "variant": name,
                "tokens_per_second": tokens / statistics.median(got["seconds"]),
                "over_bare": quartiles(ratios["seconds"]),
                "processor_ms_per_step": 1e3 * statistics.median(got["processor"]) / steps,
                "processor_over_bare": quartiles(ratios["processor"]),
                "loss": got["loss"],
                "flags_per_step": got["flags"] / (rounds * steps),
            }
        )
    return {"processes": placement.processes, "variants": rows}


def quartiles(values: Sequence[float]) -> list[float]:
    """Return lower quartile, median and upper quartile."""
    if len(values) == 1:
        return [*values] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def show(result: dict[str, Any]) -> None:
    """Print one table."""
    width = max(len(row["variant"]) for row in result["variants"]) + 1
    print(f"\n{result['processes']} processes")
    print(
        f"{'':<{width}}{'tokens/s':>10}{'over bare':>11}{'quartiles':>15}{'cpu ms/step':>13}"
        f"{'over bare':>11}{'quartiles':>15}{'loss':>9}{'flags/step':>12}"
    )
    for row in result["variants"]:
        low, middle, high = row["over_bare"]
        cpu_low, cpu, cpu_high = row["processor_over_bare"]
        print(
            f"{row['variant']:<{width}}{row['tokens_per_second']:>10,.0f}{middle:>11.3f}"
            f"{f'{low:.3f}-{high:.3f}':>15}{row['processor_ms_per_step']:>13.1f}{cpu:>11.3f}"
            f"{f'{cpu_low:.3f}-{cpu_high:.3f}':>15}{row['loss']:>9.4f}"
            f"{row['flags_per_step']:>12.2f}"
        )


def read(arguments: argparse.Namespace) -> Scenario:
    """Return the scenario: track core with what the arguments change.

    Raises:
        SentinelBenchError: an unknown key, or a value that does not fit.
    """
    steps = WARMUP + (arguments.rounds + 1) * arguments.steps
    changes: dict[str, Any] = {
        "model": {"preset": arguments.model},
        "device": arguments.device,
        "train": {
            "microbatches": arguments.microbatches,
            "warmup_steps": WARMUP,
            "steps": steps,
            "lr_decay_ratio": 0.0,
        },
    }
    return tracks.scenario("core", changed(changes, arguments.settings))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", default="2,4", help="numbers, with commas")
    parser.add_argument("--order", choices=[*SCHEDULES], default="gpipe")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--defense", dest="defenses", nargs="+", default=["sentinel:lambda=1"])
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--steps", type=positive, default=2, help="of each turn")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


def places(arguments: argparse.Namespace, scenario: Scenario) -> list[Placement]:
    """Return which processes there are, for each number of them.

    Raises:
        SentinelBenchError: the model or a defense cannot be spread over them.
    """
    found = []
    for text in arguments.processes.split(","):
        if not text.strip().isdecimal() or int(text) < 2:
            raise ConfigError(f"--processes {arguments.processes!r}: numbers from 2 on, as in 2,4")
        found.append(Placement(processes=int(text), order=arguments.order))
        found[-1].check(scenario)
        for name in arguments.defenses:
            defense = Component.parse(name)
            found[-1].check_cell(
                Cell(scenario=scenario, attack=Component(name="none"), defense=defense)
            )
    return found


def main() -> int:
    """Measure what the arguments ask for."""
    arguments = parse()
    rounds, steps = arguments.rounds, arguments.steps
    defenses = list(dict.fromkeys(["none", *arguments.defenses]))
    try:
        scenario = read(arguments)
        placements = places(arguments, scenario)
        load_tokens(scenario.data, lambda text: print(text, file=sys.stderr))  # once, for all
        results = [measure(scenario, p, defenses, rounds, steps, _tick) for p in placements]
    except SentinelBenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(file=sys.stderr)
    grid, train = scenario.grid, scenario.train
    setting = {
        "stages": grid.stages,
        "replicas": grid.replicas,
        "batch_size": train.batch_size,
        "seq_len": train.seq_len,
        "microbatches": train.microbatches,
        "order": arguments.order,
        "model": scenario.model.model_dump(exclude_none=True),
        "rounds": rounds,
        "steps": steps,
        "device": scenario.device,
        "torch": torch.__version__,
    }
    if arguments.json:
        print(json.dumps({"setting": setting, "results": results}, indent=1))
        return 0
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    for result in results:
        show(result)
    return 0


def _tick(*_: Any) -> None:
    print(".", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
