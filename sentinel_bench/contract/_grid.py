"""Replicas outside of any pipeline, watched by one defense: what the checks of defenses play."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Defense, Direction, Setup, Signals, Verdict
from sentinel_bench.config import Component
from sentinel_bench.contract._check import require

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
        inside = self.defense.needs_received and (stage, direction) in BOUNDARIES[1::2]
        received = x * 0.9 if inside else None
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
            require_form(verdict, self.replicas)
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


def require_form(verdict: Any, replicas: int) -> None:
    """Refuse what is no verdict.

    Raises:
        Violation: it is none, or its flags are not bool `[replicas]`.
    """
    require(
        isinstance(verdict, Verdict),
        f"`check` returns {type(verdict).__name__}",
        "return a Verdict",
    )
    for what, flags in (("flagged", verdict.flagged), ("severe", verdict.severe)):
        form = (tuple(flags.shape), flags.dtype) if isinstance(flags, Tensor) else type(flags)
        require(
            form == ((replicas,), torch.bool),
            f"`{what}` is {form} for {replicas} replicas",
            "return a tensor with one bool for each replica",
        )


def require_sound(verdicts: Sequence[Verdict], active: Sequence[bool], when: str) -> None:
    """Refuse verdicts with NaN, or that flag who was not tested.

    Raises:
        Violation: with `when` in it.
    """
    for verdict in verdicts:
        for what, flags in (("flagged", verdict.flagged), ("severe", verdict.severe)):
            require(
                not any(f and not a for f, a in zip(flags.tolist(), active, strict=True)),
                f"`{what}` holds for a replica that is not active {when}",
                "combine it: flagged & signals.active",
            )
        require(
            verdict.reference is None or verdict.reference.isfinite().all(),
            f"the reference holds NaN or Inf {when}",
            "learn from clean signals only; offer None where there is nothing",
        )
        for name, (values, low, high) in verdict.statistics.items():
            sound = values[torch.tensor(active)].isfinite().all() and low <= high  # not for NaN
            require(
                sound,
                f"statistic {name} is not finite, or its fence is none, {when}",
                "leave out who is not active, before and after any mean",
            )
