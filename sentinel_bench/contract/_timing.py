"""What a plugin costs beside others, on signals of the shape of track `core`: a first impression.

Only calls of the plugin are timed, none of the work that it has done again. What a step of the
pipeline costs with it is another matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, cycle
from statistics import median
from typing import Any

import torch

from sentinel_bench import registry, tracks
from sentinel_bench.api import Setup, Signals
from sentinel_bench.config import Component
from sentinel_bench.contract import aggregators
from sentinel_bench.contract._worker import VOCABULARY, Worker
from sentinel_bench.models.presets import resolve

Call = Callable[[], object]
ROUNDS, SLICE, SLOW = 15, 5e-3, 0.2
"""Rounds in which all take turns; seconds of a turn; of a call that is slow: then few rounds do."""


@dataclass(frozen=True)
class Cost:
    """Median time of a call.

    Attributes:
        name: of the plugin, its kind before it.
        microseconds: of a call.
        call: what a call is.
    """

    name: str
    microseconds: float
    call: str


def measure(reg: registry.Registry[Any], name: str) -> list[Cost]:
    """Time a plugin, the plugin of its kind that does nothing, and `sentinel`, side by side."""
    baseline = "mean" if reg.kind == "aggregator" else "none"
    sentinel = (registry.defenses, "sentinel")
    others = dict.fromkeys([(reg, name), (reg, baseline), sentinel])
    calls = {f"{r.kind} {n}": _call(r, n) for r, n in others}
    first = {label: _seconds(call, 1) for label, (call, _) in calls.items()}
    rounds = ROUNDS if max(first.values()) < SLOW else 3
    turns = {label: max(1, min(50, int(SLICE / took))) for label, took in first.items()}
    seen: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(rounds):
        for label, (call, _what) in calls.items():
            seen[label].append(_seconds(call, turns[label]))
    return [Cost(label, 1e6 * median(took), calls[label][1]) for label, took in seen.items()]


def _seconds(call: Call, times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def _call(reg: registry.Registry[Any], name: str) -> tuple[Call, str]:
    """Return a call that is timed, and what it is."""
    if reg.kind == "attack":
        return _attack(name)
    return _defense(name) if reg.kind == "defense" else _aggregator(name)


def _attack(name: str) -> tuple[Call, str]:
    *shape, parameters, _ = _core()
    worker = Worker(name, shape=tuple(shape), parameters=parameters)
    direction = worker.directions[0]
    signals = cycle([worker.honest() for _ in range(4)])
    what = f"one {direction}, {' x '.join(map(str, worker.shape))}"
    return lambda: worker.send(direction, next(signals)), what


def _defense(name: str) -> tuple[Call, str]:
    """Return a call of `check`, `learn` and `end_step` on honest signals of one boundary."""
    *shape, _, replicas = _core()
    defense = registry.defenses.create(Component(name=name))
    if not defense.passive:
        defense.start(Setup(2, replicas, (shape[0], shape[1], shape[2])))
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(shape, generator=generator)
    sent = [base + 0.05 * torch.randn(replicas, *shape, generator=generator) for _ in range(4)]
    steps, signals = count(), cycle(sent)
    everybody = torch.ones(replicas, dtype=torch.bool)

    def call() -> None:
        step, x = next(steps), next(signals)
        received = 0.9 * x if defense.needs_received else None
        given = Signals(1, "activation", step, x, received, everybody)
        verdict = defense.check(given)
        defense.learn(given, everybody & ~verdict.flagged)
        defense.end_step(step)

    return call, f"the signals of {replicas} replicas, {' x '.join(map(str, shape))} each"


def _aggregator(name: str) -> tuple[Call, str]:
    *_, parameters, replicas = _core()
    rule = aggregators.create(name, strict=False)
    rows = torch.randn(replicas, parameters, generator=torch.Generator().manual_seed(5))
    return lambda: rule(rows, 2), f"{replicas} weight gradients of {parameters:,} numbers"


def _core() -> tuple[int, int, int, int, int]:
    """Return batch, tokens, hidden size, about the parameters of a stage, and replicas of `core`.

    The parameters are a multiple of the vocabulary of a `Worker`.
    """
    scenario = tracks.scenario("core", {})
    shape, train = resolve(scenario.model), scenario.train
    attention = 2 * shape.hidden_size**2 * (shape.heads + shape.kv_heads) // shape.heads
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size
    parameters = layer // VOCABULARY * VOCABULARY
    return train.batch_size, train.seq_len, shape.hidden_size, parameters, scenario.grid.replicas
