"""What a defense owes that answers white-box attackers: a preview is true and leaves no trace."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Defense, Signals, Verdict
from sentinel_bench.contract._check import require
from sentinel_bench.contract._grid import BOUNDARIES, Grid, inactive, with_rows

_NO_PREVIEW = "it offers no `preview`"
_PURE = "let `preview` compute what `check` computes, and assign to nothing"

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


def says_in_a_preview_what_it_then_says(name: str) -> str | None:
    """A preview says what the check then says, and leaves no trace."""
    if not _previews(name):
        return _NO_PREVIEW
    for lie in LIES:
        for warm in (False, True):
            grid = Grid(name).warm_up() if warm else Grid(name)
            for _ in range(2):
                for stage, direction in BOUNDARIES:
                    signals = LIES[lie](grid.signals(stage, direction))
                    _asked(grid.defense, signals, lie)
                grid.defense.end_step(grid.now)
                grid.now += 1
    return None


def _asked(defense: Defense[Any], signals: Signals, when: str) -> None:
    """Ask twice, then check; of a defense that draws afterwards, a part may be left out."""
    given = [t for t in (signals.sent, signals.received, signals.active) if t is not None]
    before = [(t.clone(), t._version) for t in given]
    held, drawn = state(defense), torch.get_rng_state()
    asked = [defense.preview(signals) for _ in range(2)]
    require(state(defense) == held, f"`preview` changes the state ({when})", _PURE)
    require(
        torch.equal(torch.get_rng_state(), drawn), f"`preview` draws random numbers ({when})", _PURE
    )
    for tensor, (value, version) in zip(given, before, strict=True):
        unchanged = torch.equal(tensor, value) and tensor._version == version
        require(unchanged, f"`preview` changes what it is given ({when})", _PURE)
    verdict = defense.check(signals)
    one, other = asked
    require(spoken(one) == spoken(other), f"two previews of one signal differ ({when})", _PURE)
    if one is not None and {*one.statistics} == {*verdict.statistics}:
        true = spoken(one) == spoken(verdict)
        require(true, f"`check` says something else than `preview` did ({when})", _PURE)
    elif one is not None:
        require(
            {*one.statistics} < {*verdict.statistics}
            and not (one.flagged & ~verdict.flagged).any(),
            f"`preview` says something that `check` does not ({when})",
            "leave out what is drawn after the signals were sent, and nothing else",
        )
    defense.learn(signals, signals.active & ~verdict.flagged)


def comes_to_the_same_verdicts_when_it_is_asked_all_the_time(name: str) -> str | None:
    """A defense that is asked all the time comes to the same verdicts."""
    if not _previews(name):
        return _NO_PREVIEW
    quiet, asked = Grid(name), Grid(name)
    for _ in range(30):
        for stage, direction in BOUNDARIES:
            signals = near(quiet.signals(stage, direction), 1)
            other = with_rows(signals, [0, 2], 5.0, active=True)
            pair = []
            for grid, ask in ((quiet, False), (asked, True)):
                grid.defense.preview(other) if ask else None
                pair.append(grid.defense.check(signals))
                grid.defense.preview(other) if ask else None
                grid.defense.learn(signals, signals.active & ~pair[-1].flagged)
                grid.defense.preview(other) if ask else None
            one, two = map(spoken, pair)
            require(one == two, "a defense that was asked before judges differently", _PURE)
        for grid in (quiet, asked):
            grid.defense.end_step(grid.now)
            grid.now += 1
    equal = state(quiet.defense) == state(asked.defense)
    require(equal, "a defense that was asked before is in another state", _PURE)
    return None


def previews_whatever_the_order_of_questions(name: str) -> str | None:
    """What a preview says does not depend on the questions before."""
    if not _previews(name):
        return _NO_PREVIEW
    grid = Grid(name).warm_up()
    signals = [LIES[lie](grid.signals(1, "activation")) for lie in LIES]
    straight = [spoken(grid.defense.preview(s)) for s in signals]
    backwards = [spoken(grid.defense.preview(s)) for s in reversed(signals)]
    require(straight == backwards[::-1], "previews depend on the questions before", _PURE)
    return None


def _previews(name: str) -> bool:
    return registry.defenses.get(name).preview is not Defense.preview
