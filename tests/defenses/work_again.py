"""Replicas of one stage that are asked for work a second time, without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Defense, Setup, Signals, Verdict
from sentinel_bench.config import Component

SHAPE = (2, 4, 8)


def started(
    text: str, replicas: int, shape: tuple[int, int, int] = SHAPE, **setup: Any
) -> Defense[Any]:
    """Return a started defense from `name:key=value`."""
    defense = registry.defenses.create(Component.parse(text))
    defense.start(Setup(3, replicas, shape, **setup))
    return defense


def truth(replicas: int, seed: int = 0, shape: tuple[int, int, int] = SHAPE) -> Tensor:
    """Return what all replicas should send."""
    return torch.randn(replicas, *shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Desk:
    """Does work again, and answers as `threat.verifiers` says; keeps what it was asked.

    Args:
        honest: `[replicas, batch, tokens, hidden]`, what all should have sent.
        sent: what they did send.
        liars: who is malicious.
        verifiers: what these answer.
    """

    honest: Tensor
    sent: Tensor
    liars: Sequence[int] = ()
    verifiers: str = "honest"
    asked: list[list[tuple[int, int]]] = field(default_factory=list)
    recomputed: list[list[int]] = field(default_factory=list)

    def recompute(self, of: Sequence[int]) -> Tensor:
        self.recomputed.append(list(of))
        return self.honest[list(of)]

    def ask(self, of: Sequence[int], by: Sequence[int]) -> Tensor:
        self.asked.append(list(zip(of, by, strict=True)))
        out = self.honest[list(of)].clone()
        for i, (whose, who) in enumerate(self.asked[-1]):
            if who in self.liars and self.verifiers != "honest":
                covers = self.verifiers != "lie" and whose in self.liars
                if covers or self.verifiers != "cover":
                    out[i] = self.sent[whose] if covers else -self.honest[whose]
        return out

    def signals(self, active: Sequence[bool] | None = None, **place: Any) -> Signals:
        """Return what the defense is shown."""
        mask = torch.tensor(active if active is not None else [True] * len(self.sent))
        where = {"stage": 1, "direction": "activation", "step": 0} | place
        return Signals(**where, sent=self.sent, received=None, active=mask, again=self)


def desk(
    replicas: int, wrong: Sequence[int] = (), verifiers: str = "honest", seed: int = 0, **more: Any
) -> Desk:
    """Return a desk at which some replicas sent twice what they should have sent."""
    honest = truth(replicas, seed, **more)
    sent = honest.clone()
    sent[list(wrong)] *= 2
    return Desk(honest, sent, tuple(wrong), verifiers)


def rows(mask: Tensor) -> list[int]:
    """Return where a mask is true."""
    return mask.nonzero().flatten().tolist()


def flagged(verdict: Verdict) -> list[int]:
    """Return who is flagged."""
    return rows(verdict.flagged)
