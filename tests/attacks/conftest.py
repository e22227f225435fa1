"""An attack by name, and what one malicious worker knows when it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sentinel_bench import registry
from sentinel_bench.api import Attack, AttackContext
from sentinel_bench.config import Component

SEED = 5


@pytest.fixture
def create() -> Callable[[str], Attack[Any]]:
    """Make an attack from `name:key=value`."""
    return lambda text: registry.attacks.create(Component.parse(text))


@pytest.fixture
def context() -> Callable[..., AttackContext]:
    """Make a context, with random numbers of seed 5 unless told otherwise."""

    def make(seed: int = SEED, **changes: Any) -> AttackContext:
        known: dict[str, Any] = {
            "step": 0,
            "stage": 1,
            "replica": 0,
            "direction": "activation",
            "received": None,
            "history": (),
            "generator": torch.Generator().manual_seed(seed),
        }
        return AttackContext(**(known | changes))

    return make


@pytest.fixture
def normal() -> Callable[..., torch.Tensor]:
    """Draw the standard normal noise that a worker of a seed draws first."""
    return lambda *shape, seed=SEED: torch.empty(shape).normal_(
        generator=torch.Generator().manual_seed(seed)
    )


@pytest.fixture
def x() -> torch.Tensor:
    """One sequence of two tokens, three hidden units."""
    return torch.tensor([[[1.0, -2.0, 3.0], [0.0, 4.0, -4.0]]])
