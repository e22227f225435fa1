"""What the workers of one stage hand in when a step ends, without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sentinel_bench.api import Redone, Updates


@dataclass
class Scales:
    """Gives what is handed in, and keeps what it was asked.

    Args:
        truth: `[replicas, parameters]`, what all should hand in.
        handed: what they did.
        signals: "activation" and "gradient" to what they should have sent, where they send it.
        excluded: whose gradients are not averaged.
    """

    truth: Tensor
    handed: Tensor
    signals: dict[str, Tensor] = field(default_factory=dict)
    excluded: Sequence[int] = ()
    calls: list[tuple[str, list[int]]] = field(default_factory=list)

    def sent(self, of: Sequence[int]) -> Tensor:
        self.calls.append(("sent", list(of)))
        return self.handed[list(of)]

    def recompute(self, of: Sequence[int]) -> Tensor:
        self.calls.append(("recompute", list(of)))
        return self.truth[list(of)]

    def mean(self) -> tuple[list[int], Tensor]:
        counted = [r for r in range(len(self.handed)) if r not in self.excluded]
        return counted, self.handed[counted].mean(0)

    def redo(self, of: Sequence[int]) -> Redone:
        self.calls.append(("redo", list(of)))
        parts = {name: x[list(of)] for name, x in self.signals.items()}
        return Redone(parts.get("activation"), parts.get("gradient"), self.truth[list(of)].mean(0))

    def project(self, of: Sequence[int], onto: Tensor) -> Tensor:
        self.calls.append(("project", list(of)))
        return self.handed[list(of)].float() @ onto.T

    def losses(self) -> Tensor | None:
        return None

    def updates(self, active: Sequence[bool] | None = None, **place: Any) -> Updates:
        """Return what the defense is shown."""
        mask = torch.tensor(active if active is not None else [True] * len(self.truth))
        where = {"stage": 1, "step": 0, "kind": "gradient"} | place
        return Updates(**where, active=mask, work=self)

    def asked(self, what: str) -> list[list[int]]:
        """Return whom one kind of question was about."""
        return [of for name, of in self.calls if name == what]


def scales(
    replicas: int, wrong: Sequence[int] = (), equal: bool = False, size: int = 300, **more: Any
) -> Scales:
    """Return scales on which some put twice what they should; `equal`: all have the same."""
    draw = torch.Generator().manual_seed(5)
    truth = torch.randn(1 if equal else replicas, size, generator=draw).repeat(
        replicas if equal else 1, 1
    )
    handed = truth.clone()
    handed[list(wrong)] *= 2
    return Scales(truth, handed, **more)
