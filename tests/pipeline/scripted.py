"""Attacks and defenses that do what a test tells them, and a small laboratory to run them in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sentinel_bench.api import Attack, AttackContext, Defense, ResponseParams, Signals, Verdict
from sentinel_bench.config import Cell, Component, Frozen, Scenario
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.pipeline.session import Session

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


SEEN: list[Seen] = []
"""By the defense that runs (in warm-up: by all of them)."""
HEARD: list[Seen] = []
"""By attackers, `sent` being the honest signal; only of the attack `liar:what=listen`."""
_CLOCK = ("seconds", "time")
LEARNED: list[tuple[int, int, str, list[bool]]] = []


def clear() -> None:
    """Forget what was seen."""
    SEEN.clear()
    HEARD.clear()
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


class Liar(Attack[LiarParams]):
    """Sends what it is told to send."""

    name = "liar"
    goal = formula = source = "test"
    Params = LiarParams

    def memory(self) -> int:
        return self.params.depth

    def signal(self, x: Tensor, ctx: AttackContext) -> Any:
        if ctx.step < self.params.since:
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


class Deaf(Script):
    """Cannot be made."""

    name: ClassVar[str] = "deaf"

    def __init__(self, params: ScriptParams) -> None:
        raise ValueError("broken constructor")


PLUGINS = (Script, Liar, Deaf)


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
