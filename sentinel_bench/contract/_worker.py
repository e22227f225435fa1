"""A malicious worker outside of any pipeline: what the checks of attacks play."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sentinel_bench import registry
from sentinel_bench.api import (
    Attack,
    AttackContext,
    Colluders,
    Judgement,
    Knowledge,
    Late,
    Message,
    Silence,
    UpdateContext,
)
from sentinel_bench.config import Component
from sentinel_bench.contract._check import require

SHAPES = {"usual": (3, 4, 8), "batch 1": (1, 4, 8), "token 1": (3, 1, 8), "both 1": (1, 1, 8)}
VOCABULARY = 20


def create(name: str) -> Attack[Any]:
    """Make an attack; of those that deal, what one attacker was dealt."""
    component, _ = registry.attacks.get(name).deal(
        Component(name=name), "activation", np.random.default_rng(3)
    )
    return registry.attacks.create(component)


class Copy:
    """A private model of one embedding and one linear map, the map being the own stage."""

    vocabulary = VOCABULARY

    def __init__(self, weights: Tensor) -> None:
        generator = torch.Generator().manual_seed(1)
        own = weights.detach().float().view(VOCABULARY, -1)
        self._embed = torch.randn(own.shape, generator=generator)
        self.parameters = [nn.Parameter(own.clone())]

    def logits(self, ids: Tensor) -> Tensor:
        return self._embed[ids] @ self.parameters[0].T

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(index))
        return ids[:, :-1], ids[:, 1:]


class Permissive:
    """A detector that passes what is near to a signal, and asks nobody."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def judge(self, x: Tensor) -> Judgement:
        distance = float((x - self._x).float().abs().mean())
        return Judgement(distance > 1, {"distance": (distance, -1.0, 1.0)})


@dataclass
class Worker:
    """One malicious worker with as much past as its attack asks for, and a source of signals.

    An attack on weights is given as many `parameters`, a multiple of the vocabulary.
    """

    name: str
    seed: int = 3
    shape: tuple[int, ...] = SHAPES["usual"]
    dtype: torch.dtype = torch.float32
    parameters: int = VOCABULARY * 4
    attack: Attack[Any] = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.attack = create(self.name)
        self.generator = torch.Generator().manual_seed(self.seed)
        self._shared: list[torch.Generator] = []
        self._data = torch.Generator().manual_seed(17)
        self._age = dict.fromkeys(self.directions, -1)
        if self.directions == ("update",):
            self.shape = (self.parameters,)
        self.history = {
            d: [self.honest() for _ in range(self.attack.memory())] for d in self.directions
        }
        self.received: Tensor | None = self.honest()
        self.others = torch.stack([self.honest() for _ in range(4)])

    @property
    def directions(self) -> tuple[str, ...]:
        return ("update",) if self.attack.axis == "weights" else ("activation", "gradient")

    def honest(self) -> Tensor:
        x = torch.randn(self.shape, generator=self._data) * 2 + 0.5
        return x.to(self.dtype)

    def granted(self, x: Tensor) -> dict[Knowledge, Any]:
        every = {
            Knowledge.COLLUDERS: lambda: self._colluders(x),
            Knowledge.HONEST: lambda: self.others.clone(),
            Knowledge.DETECTOR: lambda: Permissive(x.clone()),
            Knowledge.MODEL: lambda: Copy(x),
        }
        return {k: v for k, v in every.items() if k in self.attack.needs()}

    def _colluders(self, x: Tensor) -> Colluders:
        self._shared.append(torch.Generator().manual_seed(self.seed))
        return Colluders(torch.stack([x, x + 1]), 0, {}, self._shared[-1])

    @property
    def drew(self) -> bool:
        """True if the attack has drawn anything, alone or together with its colluders."""
        untouched = torch.Generator().manual_seed(self.seed).get_state()
        generators = (self.generator, *self._shared)
        return not all(torch.equal(g.get_state(), untouched) for g in generators)

    def send(self, direction: str, x: Tensor) -> Message:
        self._age[direction] += 1
        known: dict[str, Any] = {
            "step": self._age[direction],
            "age": self._age[direction],
            "stage": 2,
            "replica": 1,
            "direction": direction,
            "received": self.received,
            "history": self.history[direction],
            "generator": self.generator,
            "name": self.name,
            "granted": self.granted(x),
        }
        if direction != "update":
            return _message(self.attack.send(x, AttackContext(**known)), direction)
        context = UpdateContext(
            **(known | {"received": None}),
            targets=torch.arange(6).view(2, 3),
            vocabulary=VOCABULARY,
            relabel=lambda targets: torch.cos(x.float() + targets.sum()).to(x.dtype),
        )
        overrides = type(self.attack).update is not Attack.update
        hand_in = self.attack.update if overrides else self.attack.inject
        return _message(hand_in(x, context), direction)

    def given(self, direction: str, x: Tensor) -> dict[str, Tensor]:
        """Return what is not to be changed when `x` is sent, by what it is."""
        past = {f"its past signal {i}": t for i, t in enumerate(self.history[direction])}
        received = {} if self.received is None else {"what it received": self.received}
        return {"its input": x, **received, **past}

    def run(self, steps: int = 3) -> list[Message]:
        """Return what is sent in some steps, all directions."""
        return [kept(self.send(d, self.honest())) for _ in range(steps) for d in self.directions]


def _message(sent: Any, direction: str) -> Message:
    late = isinstance(sent, Late) and isinstance(sent.signal, Tensor)
    require(
        isinstance(sent, Tensor | Silence) or late,
        f"it sends {type(sent).__name__} for {direction}",
        "return a tensor: a new one, or the argument itself to be honest; a fault may also return "
        "Silence() or Late(tensor, seconds)",
    )
    result: Message = sent
    return result


def tensors(sent: Message) -> list[Tensor]:
    """Return what a receiver gets to see: at most one tensor."""
    if isinstance(sent, Silence):
        return []
    return [sent.signal if isinstance(sent, Late) else sent]


def seconds(sent: Message) -> float:
    """Return how late a message is."""
    return sent.seconds if isinstance(sent, Late) else 0.0


def kept(sent: Message) -> Message:
    """Return the same, safe from what is done to it later."""
    if isinstance(sent, Late):
        return Late(sent.signal.clone(), sent.seconds)
    return sent.clone() if isinstance(sent, Tensor) else sent


def same(one: list[Message], other: list[Message]) -> bool:
    """Bit for bit, NaN being equal to NaN."""
    return all(
        (type(a), seconds(a)) == (type(b), seconds(b))
        and all(
            torch.equal(s.nan_to_num(7.25), t.nan_to_num(7.25))
            for s, t in zip(tensors(a), tensors(b), strict=True)
        )
        for a, b in zip(one, other, strict=True)
    )
