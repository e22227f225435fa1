"""No defense can reach the ground truth by following the objects that it is given.

What a process's memory, its stack or its garbage collector hold is out of scope here: a defense
is code that the benchmark runs. What is tested is that nothing leaks along ordinary references.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sentinel_bench.api import (
    Defense,
    ResponseParams,
    Signals,
    Updates,
    Verdict,
)
from sentinel_bench.contract._secrets import (
    ATTACKERS,
    REPLICAS,
    STAGES,
    Heavy,
    exchange,
    pried,
    reachable,
    run,
    secrets,
)


@pytest.fixture(autouse=True)
def _heavy(plug: Callable[..., None]) -> None:
    plug(Heavy)


class Cheat(Defense[ResponseParams]):
    """Searches all it can reach for names that sound like the truth, and flags whom it finds."""

    name = "cheat"
    goal = formula = source = "test"
    needs_updates = True
    words = ("attack", "tamper", "malicious", "villain", "threat", "truth", "readable", "secret")

    def __init__(self, params: ResponseParams) -> None:
        super().__init__(params)
        self.found: list[str] = []
        self.kinds: set[str] = set()

    def check(self, signals: Signals) -> Verdict:
        return self._search(signals.active, signals)

    def check_updates(self, updates: Updates) -> Verdict:
        self.kinds.add(updates.kind)
        return self._search(updates.active, *pried(updates))

    def _search(self, active: Tensor, *given: Any) -> Verdict:
        names = {
            name
            for item in reachable(self, given)
            for name in (*getattr(item, "__dict__", {}), *getattr(item, "__slots__", ()))
        }
        self.found += [n for n in names if any(word in n.lower() for word in self.words)]
        guilty = torch.full_like(active, bool(self.found)) & active
        return Verdict(guilty, guilty)


def test_a_defense_that_searches_its_attributes_finds_nothing():
    cheat = Cheat(ResponseParams())
    live = exchange(cheat)
    assert run(live) > 0
    assert cheat.found == []
    assert cheat.kinds == {"gradient", "weights"}
    assert live.inspector.ledger.capacity() == [REPLICAS] * STAGES


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def method(self) -> None: ...


class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, secret: Any) -> Tensor:
        ctx.secret = secret
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


@pytest.mark.parametrize(
    "hide",
    [
        lambda secret: {"deep": [(secret,)]},
        lambda secret: deque([{1: {"k": secret}}]),
        Slotted,
        lambda secret: Slotted(secret).method,
        lambda secret: lambda: secret,
        lambda secret: lambda value=secret: value,
        lambda secret: partial(print, secret),
        lambda secret: Node.apply(torch.ones(2, requires_grad=True), secret) + 1,
    ],
)
def test_the_search_itself_finds_what_is_hidden(hide):
    assert secrets(hide(ATTACKERS[0])) == {"Attacker"}
