"""What leads to the ground truth, and a search for it along ordinary references.

What a process's memory, its stack or its garbage collector hold is out of scope here: a defense
is code that the benchmark runs. What is looked for are leaks along ordinary references.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import (
    Attack,
    AttackContext,
    Defense,
    Direction,
    Setup,
    Signals,
    Updates,
    Verdict,
)
from sentinel_bench.config import Component, Scenario, ThreatConfig
from sentinel_bench.contract._check import require
from sentinel_bench.ledger import Ledger
from sentinel_bench.pipeline.boundary import Boundary, echo
from sentinel_bench.pipeline.exchange import Contributed, LiveExchange
from sentinel_bench.pipeline.inspect import Inspector
from sentinel_bench.pipeline.tamper import History, Sent, Tamperer
from sentinel_bench.pipeline.updates import Handed
from sentinel_bench.pipeline.weights import StageWork
from sentinel_bench.threat import Attacker

SECRET: tuple[type[Any], ...]
SECRET = (Attacker, Tamperer, ThreatConfig, Scenario, Attack, AttackContext, Sent, History)
SECRET += (Contributed, Handed)
HARNESS = (LiveExchange, Inspector, StageWork)
FORWARD: tuple[tuple[int, Direction], ...] = ((0, "activation"), (1, "activation"))
BACKWARD: tuple[tuple[int, Direction], ...] = ((2, "gradient"), (1, "gradient"))
STAGES, REPLICAS, SHAPE = 4, 4, (2, 4, 8)
ATTACKERS = [Attacker(1, 2, 3, Component(name="scaling"), "both", seed=9)]
FORGERS = [
    Attacker(2, 1, 3, Component(name="update-sign-flip"), "update", seed=9),
    Attacker(2, 3, 3, Component(name="contract/heavy"), "update", seed=9),
]


class Heavy(Attack[Any]):
    """Holds weights that are twice as large."""

    name = "contract/heavy"
    goal = formula = source = "test"
    axis = "weights"

    def inject(self, weights: Tensor, ctx: AttackContext) -> Tensor:
        return weights * 2


def reachable(*roots: Any) -> Iterator[Any]:
    """Yield every object at the end of a chain of attributes, closures and containers."""
    seen: dict[int, Any] = {}
    todo = list(roots)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | ModuleType | str | bytes | int | float):
            continue
        seen[id(item)] = item  # kept, so that no id is used twice
        yield item
        todo.extend(_next(item))


def _next(item: Any) -> Iterator[Any]:
    yield from getattr(item, "__dict__", {}).values()
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(item, slot):
                yield getattr(item, slot)
    if isinstance(item, dict):
        yield from item.keys()
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset | deque):
        yield from item
    elif isinstance(item, FunctionType):
        yield from (cell.cell_contents for cell in item.__closure__ or ())
        yield from item.__defaults__ or ()
        yield from (item.__kwdefaults__ or {}).values()
    elif isinstance(item, MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, Tensor):
        yield from (item._base, item.grad_fn, item._backward_hooks)
    elif hasattr(item, "next_functions"):  # a node of autograd
        yield from (node for node, _ in item.next_functions)


def secrets(*roots: Any) -> set[str]:
    """Return the types of what should not be reachable."""
    return {type(o).__name__ for o in reachable(*roots) if isinstance(o, SECRET + HARNESS)}


def refuse_secrets(*roots: Any) -> None:
    """Refuse a way to the ground truth.

    Raises:
        Violation: there is one.
    """
    found = secrets(*roots)
    require(
        not found,
        f"it can reach {', '.join(sorted(found))}",
        "keep nothing but tensors and numbers of what it is given; if it does, report this",
    )


class Events:
    """A log that keeps nothing."""

    def append(self, kind: str, /, **fields: Any) -> None:
        """Forget the row."""


def exchange(defense: Defense[Any]) -> LiveExchange:
    """Put a defense behind the boundaries of four stages with one attacker."""
    if not defense.passive:
        defense.start(Setup(STAGES, REPLICAS, SHAPE))
    ledger = Ledger(defense.params, STAGES, REPLICAS)
    tamperer = Tamperer([*ATTACKERS, *FORGERS], History(), "cpu", ledger.banned)
    live = LiveExchange(tamperer, Inspector(defense, ledger, Events()))
    live.redo = Workshop(live).redo
    return live


class Workshop:
    """Does all work again; it knows the scenario, as the trainer does."""

    def __init__(self, live: LiveExchange) -> None:
        self.scenario = Scenario()
        self._depart = live.depart
        live.depart = self.depart  # type: ignore[method-assign]

    def depart(
        self, stage: int, direction: Any, x: Tensor, taint: Tensor, microbatch: int = 0
    ) -> Any:
        self.honest = x.detach().clone()
        return self._depart(stage, direction, x, taint, microbatch)

    def redo(self, stage: int, direction: Any, of: Any, received: Tensor | None) -> Tensor:
        return self.honest[list(of)]


def run(live: LiveExchange, steps: int = 16) -> int:
    """Send honest signals through the exchange; return how many were tampered with."""
    tampered = 0
    noise = torch.Generator().manual_seed(1)
    base = torch.randn(SHAPE, generator=noise)
    for step in range(steps):
        live.step = step
        tainted = torch.zeros(REPLICAS)
        for stage, direction in FORWARD + BACKWARD:
            x = base + 0.05 * torch.randn(REPLICAS, *SHAPE, generator=noise)
            _, tainted = live.depart(stage, direction, x, tainted)
        tampered += live.inspector.tally.tampered
        if live.weighs:
            tampered += hand_in(live)
        live.inspector.end_step(step)
        live.end_step()
    return tampered


def hand_in(live: LiveExchange) -> int:
    """Let all stages hand in weight gradients and weights; return how many lied."""
    lies = 0
    for stage in range(STAGES):
        layer = torch.nn.Linear(SHAPE[2], SHAPE[2])
        fed, passed = (torch.randn(REPLICAS * SHAPE[0], *SHAPE[1:]) for _ in range(2))
        labels = torch.zeros(len(fed), SHAPE[1], dtype=torch.long)
        last = stage == STAGES - 1
        quiet = torch.autocast("cpu", enabled=False)
        work = StageWork([layer], fed, None if last else passed, labels, REPLICAS, quiet, SHAPE[2])
        lies += len(live.contribute(stage, live.inspector.excluded(), work).sent)
        weights = torch.randn(72)
        held = live.hold(stage, weights, REPLICAS, lambda _: None)  # type: ignore[arg-type, return-value]
        lies += not torch.equal(held, weights)
    return lies


def pried(updates: Updates) -> list[Any]:
    """Return all that can be had of updates."""
    work, everybody = updates.work, range(REPLICAS)
    sent = work.sent(everybody)
    answers: list[Any] = [
        sent,
        *map(work.sent, ([r] for r in everybody)),
        work.recompute(everybody),
    ]
    answers += [work.project(everybody, torch.ones(1, sent.shape[1])), work.losses()]
    if updates.kind == "gradient":
        answers += [work.redo(everybody), work.mean()]
    return [updates, work, *answers]


def spied(name: str, seen: list[Any]) -> Defense[Any]:
    """Return a defense that also notes what it is given and what it answers."""
    kind = registry.defenses.get(name)

    class Spied(kind):  # type: ignore[misc, valid-type]
        def check(self, signals: Signals) -> Verdict:
            verdict: Verdict = super().check(signals)
            seen.extend([signals, verdict])
            return verdict

        def learn(self, signals: Signals, clean: Tensor) -> None:
            seen.extend([signals, clean])
            super().learn(signals, clean)

        def check_updates(self, updates: Updates) -> Verdict:
            verdict: Verdict = super().check_updates(updates)
            seen.extend([*pried(updates), verdict])
            refuse_secrets(self, seen[-20:])  # while the handle is open
            return verdict

        def learn_updates(self, updates: Updates, clean: Tensor) -> None:
            seen.extend([updates, clean])
            super().learn_updates(updates, clean)

    return Spied(registry.defenses.params(Component(name=name)))


def truth_in_signals(name: str) -> bool:
    """Let a defense watch liars through the exchange; return whether it was shown anything.

    Raises:
        Violation: there is a way to the ground truth from what it was given, or keeps.
    """
    seen: list[Any] = []
    defense = spied(name, seen)
    with _known(Heavy):
        lies = run(exchange(defense))
    if lies == 0:
        raise RuntimeError("nobody lied: the check checks nothing")
    refuse_secrets(defense, seen)
    return bool(seen)


def truth_in_autograd(name: str) -> bool:
    """Let a defense watch a training step with real boundaries, each a node of the graph.

    Returns whether it was shown anything.

    Raises:
        Violation: as above.
    """
    seen: list[Any] = []
    defense = spied(name, seen)
    with _known(Heavy):
        live = exchange(defense)
        boundaries = [Boundary(stage, REPLICAS) for stage in range(STAGES - 1)]
        layers = [torch.nn.Linear(SHAPE[2], SHAPE[2]) for _ in range(STAGES)]
        for step in range(6):  # honest until the attacker starts
            live.step = step
            h = torch.randn(REPLICAS * SHAPE[0], *SHAPE[1:])
            rode = torch.zeros(REPLICAS, requires_grad=True)
            for layer, boundary in zip(layers, [*boundaries, None], strict=True):
                h = layer(h)
                if boundary is not None:
                    boundary.exchange = live
                    h, rode = boundary(h, rode)
            if "Attacker" not in secrets(h):  # the way is there, for who has a tensor of the graph
                raise RuntimeError("the graph leads nowhere: the check checks nothing")
            (h.square().mean() + echo(rode)).backward()  # type: ignore[no-untyped-call]
            live.inspector.end_step(step)
            live.end_step()
    refuse_secrets(defense, seen)
    return bool(seen)


@contextmanager
def _known(attack: type[Attack[Any]]) -> Iterator[None]:
    """Make an attack known by its name for a while."""
    registry.attacks.add(attack.name, attack)
    try:
        yield
    finally:
        registry.attacks.drop(attack.name)
