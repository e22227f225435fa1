"""Replicas outside of any pipeline, watched by one defense: what the checks of defenses play."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Defense, Direction, Setup, Signals, Verdict
from sentinel_bench.config import Component

STAGES, SHAPE, WARMUP = 3, (2, 4, 8), 20
BOUNDARIES: list[tuple[int, Direction]] = [
    (0, "activation"),
    (1, "activation"),
    (2, "gradient"),
    (1, "gradient"),
]


class Grid:
    """Honest replicas that send nearly the same, watched by one defense.

    Args:
        name: the defense.
        replicas: their number.
        spread: standard deviation of what sets replicas apart.
        order: the replicas' order in every tensor.
        dtype: of the signals.
    """

    def __init__(
        self,
        name: str,
        replicas: int = 4,
        spread: float = 0.05,
        order: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.defense: Defense[Any] = registry.defenses.create(Component(name=name))
        if not self.defense.passive:
            self.defense.start(Setup(STAGES, replicas, SHAPE))
        self.replicas, self.spread, self.dtype = replicas, spread, dtype
        self.order = list(order) if order is not None else list(range(replicas))
        self.now = 0

    def signals(self, stage: int, direction: Direction) -> Signals:
        """What all send honestly in this step."""
        base = torch.randn(SHAPE, generator=torch.Generator().manual_seed(stage))
        noise = torch.Generator().manual_seed(1000 + self.now * 10 + stage)
        own = torch.randn(self.replicas, *SHAPE, generator=noise)
        x = ((base + self.spread * own)[self.order]).to(self.dtype)
        everybody = torch.ones(self.replicas, dtype=torch.bool)
        received = x * 0.9 if (stage, direction) in BOUNDARIES[1::2] else None
        return Signals(stage, direction, self.now, x, received, everybody)

    def warm_up(self) -> Grid:
        """Let honest steps pass in which no flag counts."""
        for _ in range(WARMUP):
            self._step(lambda signals: signals, heed=False)
        return self

    def run(self, steps: int, change: Any = lambda signals: signals) -> list[Verdict]:
        """Let some steps pass, and return their verdicts."""
        return [verdict for _ in range(steps) for verdict in self._step(change)]

    def _step(self, change: Any, *, heed: bool = True) -> list[Verdict]:
        verdicts = []
        for stage, direction in BOUNDARIES:
            signals = change(self.signals(stage, direction))
            verdict = self.defense.check(signals)
            self.defense.learn(signals, signals.active & ~(verdict.flagged & heed))
            verdicts.append(verdict)
        self.defense.end_step(self.now)
        self.now += 1
        return verdicts


def with_rows(signals: Signals, rows: Sequence[int], value: float, *, active: bool) -> Signals:
    """Replace some replicas' signals, and say whether these are tested."""
    mask = torch.zeros(len(signals.sent), dtype=torch.bool)
    mask[list(rows)] = True
    sent = signals.sent.masked_fill(mask.view(-1, 1, 1, 1), value)
    return Signals(
        signals.stage,
        signals.direction,
        signals.step,
        sent,
        signals.received,
        signals.active if active else signals.active & ~mask,
    )


def inactive(*rows: int) -> Any:
    """As the harness gives what could not be read or was not finite: zeros, and not active."""
    return lambda signals: with_rows(signals, rows, 0.0, active=False)


def outcome(verdicts: Sequence[Verdict]) -> list[tuple[list[bool], list[bool]]]:
    return [(v.flagged.tolist(), v.severe.tolist()) for v in verdicts]


def assert_sound(verdicts: Sequence[Verdict], active: Sequence[bool]) -> None:
    """The form is right, nothing is NaN, and no untested replica is flagged."""
    for verdict in verdicts:
        for flags in (verdict.flagged, verdict.severe):
            assert flags.shape == (len(active),)
            assert flags.dtype == torch.bool
            assert not any(f and not a for f, a in zip(flags.tolist(), active, strict=True))
        assert verdict.reference is None or verdict.reference.isfinite().all()
        for values, low, high in verdict.statistics.values():
            assert values[torch.tensor(active)].isfinite().all()
            assert low <= high  # False for NaN


LIES = {
    "honest": lambda s: s,
    "one far": lambda s: with_rows(s, [2], 30.0, active=True),
    "one near": lambda s: near(s, 2),
    "most far": lambda s: with_rows(s, [0, 1, 3], -3.0, active=True),
    "one inactive": inactive(1),
    "all inactive": inactive(0, 1, 2, 3),
}


def near(signals: Signals, row: int) -> Signals:
    """Let one replica add a little to what it sends."""
    sent = signals.sent.clone()
    sent[row] *= 1.1
    return with_sent(signals, sent)


def with_sent(signals: Signals, sent: Tensor) -> Signals:
    s = signals
    return Signals(s.stage, s.direction, s.step, sent, s.received, s.active)


def state(thing: Any, seen: tuple[int, ...] = ()) -> Any:
    """Return all that an object holds as plain values; tensors, random numbers by their bytes."""
    if id(thing) in seen:
        return "itself"
    inner = partial(state, seen=(*seen, id(thing)))
    if isinstance(thing, Tensor):
        raw = thing.detach().cpu().contiguous().flatten().view(torch.uint8)
        return (str(thing.dtype), [*thing.shape], raw.numpy().tobytes())
    if isinstance(thing, torch.Generator):
        return inner(thing.get_state())
    if isinstance(thing, np.ndarray):
        return (str(thing.dtype), thing.shape, thing.tobytes())
    if isinstance(thing, np.random.Generator):
        return inner(thing.bit_generator.state)
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, dict):
        return {repr(k): inner(v) for k, v in thing.items()}
    if isinstance(thing, list | tuple | deque):
        return [inner(v) for v in thing]
    if isinstance(thing, set | frozenset):
        return sorted(map(repr, thing))
    if isinstance(thing, partial):
        return [inner(part) for part in (thing.func, thing.args, thing.keywords)]
    if thing is None or isinstance(thing, str | bytes | int | float | bool | type):
        return thing
    slots = [s for kind in type(thing).__mro__ for s in getattr(kind, "__slots__", ())]
    held = {s: getattr(thing, s) for s in slots if hasattr(thing, s)} | getattr(
        thing, "__dict__", {}
    )
    return (type(thing).__qualname__, inner(held))


def spoken(verdict: Verdict | None) -> Any:
    """Return all that a verdict says, by its bytes."""
    if verdict is None:
        return None
    statistics = {k: (state(v), low, high) for k, (v, low, high) in verdict.statistics.items()}
    parts = (verdict.flagged, verdict.severe, verdict.reference)
    return [*map(state, parts), statistics]
