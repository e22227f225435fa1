"""Attacks and defenses that do what a test tells them, and a small laboratory to run them in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sentinel_bench.api import (
    Attack,
    AttackContext,
    Defense,
    Knowledge,
    ResponseParams,
    Signals,
    UpdateContext,
    Verdict,
)
from sentinel_bench.config import Cell, Component, Frozen, Scenario
from sentinel_bench.data.batches import Batches
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.models.build import build_model
from sentinel_bench.models.presets import layers_per_stage
from sentinel_bench.pipeline import train as training
from sentinel_bench.pipeline.session import Session
from sentinel_bench.pipeline.stages import split
from sentinel_bench.threat import Attacker, place

REFERENCE = 0.125
"""What the scripted defense offers in place of a gradient, everywhere."""
Mark = tuple[int, int, str, int]
"""step, stage, direction, replica"""


@dataclass
class Seen:
    """What a plugin saw at one boundary."""

    step: int
    stage: int
    direction: str
    sent: Tensor
    received: Tensor | None
    active: list[bool]
    replica: int = -1


@dataclass
class Told:
    """What the harness told an attacker, `own` being its honest signal, update or weights."""

    step: int
    stage: int
    direction: str
    replica: int
    own: Tensor
    what: dict[str, Any]
    """By the tier; "noise" is what colluders draw, "judgement" is of what was then sent."""


SEEN: list[Seen] = []
"""By the defense that runs (in warm-up: by all of them)."""
HEARD: list[Seen] = []
"""By attackers, `sent` being the honest signal; only of the attack `liar:what=listen`."""
TOLD: list[Told] = []
"""To spies, forgers and implants that `ask`."""
_CLOCK = ("seconds", "time")
LEARNED: list[tuple[int, int, str, list[bool]]] = []


def clear() -> None:
    """Forget what was seen."""
    SEEN.clear()
    HEARD.clear()
    TOLD.clear()
    LEARNED.clear()


class ScriptParams(ResponseParams):
    flags: list[Mark] = []
    severe: bool = False
    fault: str = ""
    at: int = 5


class Script(Defense[ScriptParams]):
    """Flags what it is told to flag; with a `fault`, it breaks the contract at step `at`."""

    name: ClassVar[str] = "script"
    goal = formula = source = "test"
    needs_received = True
    Params = ScriptParams

    def start(self, setup: Any) -> None:
        self.fault("start", 0)
        self.total = torch.zeros(setup.shape)

    def fault(self, method: str, step: int) -> bool:
        if self.params.fault == f"{method} raises" and (
            method == "start" or step == self.params.at
        ):
            raise ValueError(f"broken {method}")
        return self.params.fault.startswith(method) and step == self.params.at

    def check(self, signals: Signals) -> Any:
        s = signals
        SEEN.append(
            Seen(
                s.step, s.stage, s.direction, s.sent.clone(),
                None if s.received is None else s.received.clone(), s.active.tolist(),
            )
        )  # fmt: skip
        marks = [(s.step, s.stage, s.direction, r) in self.params.flags for r in range(len(s.sent))]
        flagged = torch.tensor(marks)
        reference = torch.full(s.sent.shape[1:], REFERENCE)
        if self.fault("check", s.step):
            return self._break(signals, flagged, reference)
        return Verdict(flagged, flagged & self.params.severe, reference)

    def _break(self, signals: Signals, flagged: Tensor, reference: Tensor) -> Any:
        match self.params.fault.removeprefix("check "):
            case "changes sent":
                signals.sent.mul_(2)
            case "changes received":
                if signals.received is not None:
                    signals.received.mul_(2)
            case "returns None":
                return None
            case "returns floats":
                return Verdict(flagged.float(), flagged)
            case "returns too few":
                return Verdict(flagged[:-1], flagged[:-1])
            case "returns a wrong reference":
                return Verdict(flagged | True, flagged, reference[..., :-1])
            case "returns wrong statistics":
                return Verdict(~flagged, flagged, None, {"x": (reference, 0.0, 1.0)})
        return Verdict(flagged, flagged, reference)

    def learn(self, signals: Signals, clean: Tensor) -> None:
        self.fault("learn", signals.step)
        LEARNED.append((signals.step, signals.stage, signals.direction, clean.tolist()))
        self.total += signals.sent[clean].sum(0)
        if self.params.fault == "learn changes sent" and signals.step == self.params.at:
            signals.sent.mul_(2)

    def end_step(self, step: int) -> None:
        self.fault("end_step", step)

    def state_bytes(self) -> int:
        return int(self.total.nbytes)


class LiarParams(Frozen):
    what: Literal[
        "nan", "inf", "short", "double", "sparse", "nothing", "raise", "change", "change received",
        "same", "copy", "noise", "listen", "oldest", "spoil history", "zeros",
    ] = "same"  # fmt: skip
    depth: int = 0
    since: int = 0
    stages: tuple[int, ...] = tuple(range(99))


class Liar(Attack[LiarParams]):
    """Sends what it is told to send."""

    name = "liar"
    goal = formula = source = "test"
    Params = LiarParams

    def memory(self) -> int:
        return self.params.depth

    def signal(self, x: Tensor, ctx: AttackContext) -> Any:
        if ctx.step < self.params.since or ctx.stage not in self.params.stages:
            return x
        match self.params.what:
            case "nan" | "inf":
                out = x.clone()
                out[0, 0, 0] = float(self.params.what)
                return out
            case "short":
                return x[:, :-1]
            case "double":
                return x.double()
            case "sparse":
                return x.to_sparse()
            case "nothing":
                return None
            case "zeros":
                return torch.zeros_like(x)
            case "raise":
                raise RuntimeError("no idea")
            case "change":
                return x.mul_(2)
            case "change received":
                if ctx.received is not None:
                    ctx.received.mul_(2)
            case "copy":
                return x.clone()
            case "noise":
                return x + ctx.normal(x)
            case "listen":
                HEARD.append(
                    Seen(
                        ctx.step, ctx.stage, ctx.direction, x.clone(), ctx.received, [], ctx.replica
                    )
                )
            case "oldest":
                assert len(ctx.history) <= self.params.depth
                return ctx.history[0] if ctx.history else x
            case "spoil history":
                for old in ctx.history:
                    old.zero_()
                return x + 1
        return x


class SpyParams(LiarParams):
    ask: tuple[Knowledge, ...] = ()
    probes: int = 0
    vandal: bool = False


class Spy(Liar):
    """A liar that asks for what it does not declare to know."""

    name = "spy"
    Params = SpyParams

    def signal(self, x: Tensor, ctx: AttackContext) -> Any:
        told = listen(self.params.ask, x, ctx)
        if self.params.vandal:
            spoil(told.what)
        for i in range(self.params.probes):
            ctx.detector.judge(x * i)
        sent = super().signal(x, ctx)
        if "detector" in told.what:
            told.what["judgement"] = told.what.pop("detector").judge(sent)
        return sent


class Insider(Spy):
    """A spy that declares all that there is to know about signals."""

    name = "insider"
    knowledge = frozenset({Knowledge.COLLUDERS, Knowledge.HONEST, Knowledge.DETECTOR})


class ForgerParams(Frozen):
    what: Literal[
        "same", "copy", "flip", "nan", "short", "double", "nothing", "raise", "change", "relabel",
    ] = "same"  # fmt: skip
    ask: tuple[Knowledge, ...] = ()
    vandal: bool = False


class Forger(Attack[ForgerParams]):
    """Contributes what it is told to contribute."""

    name = "forger"
    goal = formula = source = "test"
    knowledge = frozenset({Knowledge.COLLUDERS, Knowledge.HONEST})
    axis = "weights"
    Params = ForgerParams

    def update(self, grad: Tensor, ctx: UpdateContext) -> Any:
        told = listen(self.params.ask, grad, ctx)
        told.what |= {"targets": ctx.targets, "vocabulary": ctx.vocabulary}
        if self.params.what == "relabel":
            told.what["relabel"] = ctx.relabel(ctx.targets)
            return grad
        if self.params.vandal:
            spoil(told.what | {"mine": ctx.relabel(ctx.targets * 0)})
        return forge(self.params.what, grad)


class ImplantParams(Frozen):
    what: Literal[
        "same", "copy", "add", "nan", "short", "double", "nothing", "raise", "change"
    ] = "same"  # fmt: skip
    ask: tuple[Knowledge, ...] = ()
    vandal: bool = False
    trigger: Any = None


class Implant(Attack[ImplantParams]):
    """Makes of the weights of its stage what it is told to make of them."""

    name = "implant"
    goal = formula = source = "test"
    knowledge = frozenset({Knowledge.MODEL})
    axis = "weights"
    Params = ImplantParams

    def inject(self, weights: Tensor, ctx: AttackContext) -> Any:
        told = listen(self.params.ask, weights, ctx)
        if self.params.vandal:
            train(told.what["model"])
        return forge(self.params.what, weights)

    def trigger(self, vocabulary: int) -> Any:
        if self.params.trigger == "raise":
            raise RuntimeError("no idea")
        return self.params.trigger


def listen(ask: Sequence[Knowledge], own: Tensor, ctx: AttackContext) -> Told:
    """Ask a context for some tiers, and note what it tells."""
    what: dict[str, Any] = {tier.value: getattr(ctx, tier.value) for tier in ask}
    if "colluders" in what:
        what["noise"] = torch.rand(4, generator=what["colluders"].generator)
        what["colluders"].plan.setdefault("log", []).append((ctx.step, ctx.stage, ctx.replica))
    told = Told(ctx.step, ctx.stage, ctx.direction, ctx.replica, own.clone(), what)
    if ask:
        TOLD.append(told)
    return told


def spoil(what: dict[str, Any]) -> None:
    """Set all that an attacker was told to zeros."""
    for value in what.values():
        tensor = value if isinstance(value, Tensor) else getattr(value, "signals", None)
        if tensor is not None:
            tensor.zero_()


def forge(what: str, x: Tensor) -> Any:
    """Return what is made of a flat tensor."""
    match what:
        case "copy":
            return x.clone()
        case "flip":
            return -x
        case "add":
            return x + 1
        case "nan":
            return torch.full_like(x, torch.nan)
        case "short":
            return x[:-1]
        case "double":
            return x.double()
        case "nothing":
            return None
        case "raise":
            raise RuntimeError("no idea")
        case "change":
            return x.mul_(2)
    return x


def train(private: Any) -> None:
    """Train a private model for a few steps, far away from where it was, and draw numbers."""
    optimizer = torch.optim.SGD(private.parameters, lr=1.0)
    with torch.enable_grad():
        for i in range(2):
            ids, labels = private.batch(i)
            loss = F.cross_entropy(private.logits(ids).flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()


class Deaf(Script):
    """Cannot be made."""

    name: ClassVar[str] = "deaf"

    def __init__(self, params: ScriptParams) -> None:
        raise ValueError("broken constructor")


PLUGINS = (Script, Liar, Deaf, Spy, Insider, Forger, Implant)


class Events:
    """Keeps events in memory."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def append(self, kind: str, /, **fields: Any) -> None:
        self.rows.append({"type": kind, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["type"] == kind]

    def timeless(self) -> list[str]:
        """All rows without what the clock says; compared as text, so that NaN equals NaN."""
        return [repr({k: v for k, v in r.items() if k not in _CLOCK}) for r in self.rows]


class Quiet:
    """A progress that shows nothing."""

    def say(self, text: str) -> None: ...

    def start(self, label: str, total: int) -> None: ...

    def advance(self) -> None: ...

    def finish(self) -> None: ...


@dataclass
class Lab:
    """Builds scenarios and runs cells."""

    scenario: Callable[..., Scenario]
    tokens: Tokens

    def cell(self, attack: str, defense: str | Component, **changes: Any) -> Cell:
        d = Component.parse(defense) if isinstance(defense, str) else defense
        return Cell(scenario=self.scenario(**changes), attack=Component.parse(attack), defense=d)

    def session(self, cells: Sequence[Cell]) -> Session:
        session = Session(cells[0].scenario, cells, self.tokens)
        session.warm_up()
        return session

    def run(self, attack: str, defense: str | Component, **changes: Any) -> tuple[Events, Session]:
        """Run one cell alone."""
        cell, events = self.cell(attack, defense, **changes), Events()
        session = self.session([cell])
        session.run(cell, events)
        return events, session


def script(*flags: Mark, **params: Any) -> Component:
    """Return the scripted defense."""
    return Component(name="script", params={"flags": [list(f) for f in flags], **params})


def weights(session: Session) -> dict[str, Tensor]:
    """Return a copy of all parameters."""
    return {n: p.detach().clone() for n, p in session._trainer.model.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Tell whether two sets of parameters are the same, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


FROZEN: dict[str, Any] = {
    "train__warmup_steps": 0,
    "train__steps": 2,
    "train__grad_clip": 1e9,
    "train__lr": 1e-30,
    "train__weight_decay": 0.0,
    "threat__mode": "both",
}
"""Every step starts from the first weights, to rounding, and is attacked."""
Grads = list[Tensor]


def spy_gradients(monkeypatch: pytest.MonkeyPatch) -> list[Grads]:
    """Return a list to which each step adds its weight gradients, as they reach the optimizer."""
    kept: list[Grads] = []
    clip = training.clip_gradients

    def spy(parameters: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
        kept.append([p.grad.clone() for p in parameters if p.grad is not None])
        return clip(parameters, *rest)

    monkeypatch.setattr(training, "clip_gradients", spy)
    return kept


@dataclass
class Plain:
    """The plain model of a scenario at its first weights, without any pipeline."""

    scenario: Scenario
    tokens: Tokens

    def __post_init__(self) -> None:
        self.model = build_model(self.scenario, self.tokens.vocab_size)
        stages = split(self.model, layers_per_stage(self.scenario))
        found = {id(p): s for s, stage in enumerate(stages) for p in stage.parameters()}
        self.stages = [found[id(p)] for p in self.model.parameters()]
        """The stage of each parameter, in the order of the model."""
        self._orders = [
            [
                next(i for i, q in enumerate(self.model.parameters()) if q is p)
                for p in s.parameters()
            ]
            for s in stages
        ]

    def batch(self, step: int = 0) -> tuple[Tensor, Tensor]:
        """Return inputs and targets `[replicas, batch, tokens]`."""
        replicas = self.scenario.grid.replicas
        batches = Batches.of(self.tokens, self.scenario)
        inputs, targets = (torch.from_numpy(a) for a in batches.train(step))
        return inputs.unflatten(0, (replicas, -1)), targets.unflatten(0, (replicas, -1))

    def single(self, replica: int, step: int = 0, shift: int = 0) -> Grads:
        """Return the gradients of one replica's own mean loss, in a backward pass of its own."""
        inputs, targets = (t[replica] for t in self.batch(step))
        targets = (targets + shift) % self.tokens.vocab_size
        logits = self.model(input_ids=inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return list(torch.autograd.grad(loss, list(self.model.parameters())))

    def mean(
        self,
        keep: Sequence[int],
        factor: Callable[[int, int], float] = lambda stage, replica: 1.0,
        step: int = 0,
    ) -> Grads:
        """Return the mean over some replicas, each one's part in a stage times a factor."""
        singles = {r: self.single(r, step) for r in keep}
        return [
            torch.stack([factor(stage, r) * singles[r][i] for r in keep]).mean(0)
            for i, stage in enumerate(self.stages)
        ]

    def flat(self, grads: Grads, stage: int) -> Tensor:
        """Return what belongs to a stage as one vector, in the order of the stage."""
        return torch.cat([grads[i].flatten() for i in self._orders[stage]])


def only(stage: int, stages: int) -> dict[str, Any]:
    """Return the settings that open one stage to attackers."""
    return {"threat__honest_first": stage, "threat__honest_last": stages - 1 - stage}


def attackers(lab: Lab, attack: str, **grid: Any) -> tuple[Attacker, ...]:
    """Return the ground truth of a cell."""
    return place(lab.scenario(**grid), Component.parse(attack))


def assert_close(got: Tensor | Grads, expected: Tensor | Grads) -> None:
    """Equal to 1e-6 as a whole."""
    one, two = (
        x if isinstance(x, Tensor) else torch.cat([g.flatten() for g in x]) for x in (got, expected)
    )
    assert one.shape == two.shape
    assert two.norm() > 0
    assert (one - two).norm() <= 1e-6 * two.norm()
