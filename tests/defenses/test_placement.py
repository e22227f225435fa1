"""Where stages run and in which order signals come shows in no verdict of any defense."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hand_in import Scales
from torch import Tensor
from work_again import Desk

from sentinel_bench import registry
from sentinel_bench.api import (
    Defense,
    LinearCheck,
    ResponseParams,
    Setup,
    Signals,
    Updates,
    Verdict,
)
from sentinel_bench.config import Component
from sentinel_bench.defenses import DEFENSES

STAGES, REPLICAS, STEPS = 4, 5, 26
BATCH, TOKENS, HIDDEN = 4, 6, 8

Event = tuple[str, int, str, int]
"""What is looked at: "signal" and stage, direction, microbatch; or "update" and stage, kind, 0."""
Schedule = Callable[[int], list[Event]]
"""The events of a step, for a number of microbatches."""


def placeable(name: str) -> bool:
    """Tell whether what a defense says of itself lets its stages run in several processes."""
    defense = registry.defenses.create(component(name))
    copies = type(defense).redundancy is not Defense.redundancy
    return not (type(defense).passive or defense.across_stages or copies)


def component(name: str) -> Component:
    """Return a defense that draws often, if it draws."""
    known = registry.defenses.get(name).Params.model_fields
    return Component(name=name, params={"q": 0.3} if "q" in known else {})


PLACEABLE = [name for name in registry.defenses.names() if placeable(name)]
every_placeable = pytest.mark.parametrize("name", PLACEABLE)


# --- what is sent ---------------------------------------------------------------------------------


class Inquiry(Desk):
    """A desk that also tests linear layers."""

    def check_linears(self, of: Sequence[int], projections: int, seed: int) -> LinearCheck:
        """Claims lead to the honest signal; the error depends on the seed, as that of a test."""
        error = torch.full((len(of),), (seed % 1000) * 1e-9, dtype=torch.float64)
        return LinearCheck(self.honest[list(of)], error)


def drawn(*key: int, shape: tuple[int, ...]) -> Tensor:
    seed = sum(k * 1009**i for i, k in enumerate(key))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@cache
def batch(step: int, stage: int, direction: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a stage received, should have sent and sent, whole batches of all replicas."""
    place, shape = (stage, int(direction == "gradient")), (BATCH, TOKENS, HIDDEN)
    noise = drawn(step, *place, shape=(2, REPLICAS, *shape))
    received = drawn(0, *place, 5, shape=shape) + 0.2 * noise[0]
    work = drawn(0, *place, 6, shape=(HIDDEN, HIDDEN)) / 8
    honest = received + received @ work + 0.02 * noise[1]
    sent = honest.clone()
    if step >= 14 and stage in (1, 2):  # one liar each, in one part of the batch
        sent[stage, stage:] *= -3 if step % 2 else 1.5
    return received, honest, sent


def seen(event: Event, step: int, microbatches: int) -> Signals:
    """Return the signals of an event. From step 18 on one worker is banned."""
    _, stage, direction, m = event
    received, honest, sent = (x.chunk(microbatches, 1)[m] for x in batch(step, stage, direction))
    ends = (stage, direction) in ((0, "activation"), (STAGES - 1, "gradient"))
    active = torch.tensor([r != stage or step < 18 for r in range(REPLICAS)])
    return Signals(
        stage,
        direction,  # type: ignore[arg-type]
        step,
        sent.clone(),
        None if ends else received.clone(),
        active,
        Inquiry(honest, sent),
        m,
    )


def handed(event: Event, step: int) -> Updates:
    """Return the updates of an event; from step 14 on each stage but the last has a liar."""
    _, stage, kind, _ = event
    equal = kind == "weights"
    truth = drawn(step, stage, 7, shape=(1 if equal else REPLICAS, 40)) + 3
    truth = truth.repeat(REPLICAS if equal else 1, 1)
    sent = truth.clone()
    if step >= 14 and stage < STAGES - 1:
        sent[(stage + equal) % REPLICAS] *= 2
    signals = {d: batch(step, stage, d)[1] for d in directions(stage)}
    active = [r != stage or step < 18 for r in range(REPLICAS)]
    return Scales(truth, sent, signals).updates(active, stage=stage, step=step, kind=kind)


def directions(stage: int) -> list[str]:
    """Return the directions in which a stage sends."""
    return ["activation"] * (stage < STAGES - 1) + ["gradient"] * (stage > 0)


# --- schedules ------------------------------------------------------------------------------------


def gpipe(microbatches: int) -> list[Event]:
    """All forwards, then all backwards, then updates in the order of the stages."""
    forward = [
        ("signal", s, "activation", m) for m in range(microbatches) for s in range(STAGES - 1)
    ]
    backward = [
        ("signal", s, "gradient", m)
        for m in range(microbatches)
        for s in reversed(range(1, STAGES))
    ]
    updates = [("update", s, kind, 0) for kind in ("gradient", "weights") for s in range(STAGES)]
    return [*forward, *backward, *updates]


def one_forward_one_backward(microbatches: int) -> list[Event]:
    """Each stage alternates and then hands in; the stages take turns, the last one first."""

    def of(s: int) -> Iterator[Event]:
        ahead = min(microbatches, STAGES - s)
        order = [("activation", m) for m in range(ahead)]
        for m in range(microbatches):
            order.append(("gradient", m))
            if m + ahead < microbatches:
                order.append(("activation", m + ahead))
        yield from (("signal", s, d, m) for d, m in order if d in directions(s))
        yield ("update", s, "gradient", 0)
        yield ("update", s, "weights", 0)

    turns = zip_longest(*(of(s) for s in reversed(range(STAGES))))
    return [event for turn in turns for event in turn if event is not None]


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_both_schedules_hold_the_same_events_in_an_order_that_each_allows(microbatches):
    one, other = gpipe(microbatches), one_forward_one_backward(microbatches)
    assert one != other
    assert sorted(one) == sorted(other)
    assert len(one) == 2 * (STAGES - 1) * microbatches + 2 * STAGES
    for schedule in (one, other):
        for place in {event[:3] for event in schedule}:
            parts = [event[3] for event in schedule if event[:3] == place]
            assert parts == sorted(parts)


# --- runs -----------------------------------------------------------------------------------------


@dataclass
class Place:
    """The stages of one process, and the defense that looks at them."""

    stages: Sequence[int]
    defense: Defense[Any]

    def look(self, event: Event, step: int, microbatches: int) -> Any:
        """Return all that the defense says of an event."""
        given: Any
        if event[0] == "signal":
            given = seen(event, step, microbatches)
            given = replace(
                given,
                received=given.received if self.defense.needs_received else None,
                again=given.again if self.defense.needs_again else None,
            )
            verdict = self.defense.check(given)
            said = spoken(verdict)
            self.defense.learn(given, given.active & ~verdict.flagged)
            return said
        if not self.defense.needs_updates:
            return None
        given = handed(event, step)
        verdict = self.defense.check_updates(given)
        said = spoken(verdict)
        self.defense.learn_updates(given, given.active & ~verdict.flagged)
        return said


def spoken(verdict: Verdict) -> Any:
    """Return all that a verdict says, to the bit."""

    def raw(x: Tensor | None) -> bytes | None:
        return None if x is None else x.contiguous().numpy().tobytes()

    statistics = {k: (raw(x), low, high) for k, (x, low, high) in verdict.statistics.items()}
    flags = verdict.flagged.tolist(), verdict.severe.tolist()
    return (*flags, raw(verdict.reference), statistics)


def run(
    name: str, microbatches: int, schedule: Schedule, processes: Sequence[Sequence[int]]
) -> dict[tuple[int, Event], Any]:
    """Return what a defense says of each event of each step."""
    places = [Place(stages, registry.defenses.create(component(name))) for stages in processes]
    shape = (BATCH // microbatches, TOKENS, HIDDEN)
    for place in places:
        place.defense.start(Setup(STAGES, REPLICAS, shape, seed=3, microbatches=microbatches))
    found = {}
    for step in range(STEPS):
        for place in places:
            for event in schedule(microbatches):
                if event[1] in place.stages:
                    found[step, event] = place.look(event, step, microbatches)
            place.defense.end_step(step)
    return found


@cache
def reference(name: str, microbatches: int) -> dict[tuple[int, Event], Any]:
    """Return the verdicts of one process under GPipe."""
    return run(name, microbatches, gpipe, [range(STAGES)])


PLACEMENTS = {"one": [[0, 1, 2, 3]], "two": [[0, 1], [2, 3]], "uneven": [[3], [0, 1, 2]]}


@every_placeable
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("processes", PLACEMENTS)
def test_a_run_has_the_same_verdicts_however_it_is_placed_and_scheduled(
    name, microbatches, processes
):
    if microbatches > 1 and registry.defenses.create(component(name)).whole_batch:
        pytest.skip("needs the whole batch in one message")
    found = run(name, microbatches, one_forward_one_backward, PLACEMENTS[processes])
    expected = reference(name, microbatches)
    assert found.keys() == expected.keys()
    assert [key for key in found if found[key] != expected[key]] == []


@pytest.mark.parametrize("name", [n for n in PLACEABLE if n in DEFENSES])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_these_runs_hold_flags_to_compare(name, microbatches):
    said = [v for v in reference(name, microbatches).values() if v is not None]
    assert any(any(flagged) for flagged, *_ in said)
    assert not all(any(flagged) for flagged, *_ in said)
    assert any(statistics for *_, statistics in said)


def test_of_those_built_in_only_what_keeps_copies_or_looks_at_nothing_is_left_out():
    assert set(DEFENSES) - set(PLACEABLE) == {"none", "redundant-block", "skip-layer"}


class Compares(Defense[ResponseParams]):
    """Says that it compares stages with each other."""

    name = "compares"
    goal = formula = source = "test"
    across_stages = True


class Whole(Compares):
    """Says that it needs a whole batch."""

    name = "whole"
    across_stages = False
    whole_batch = True


@pytest.mark.parametrize("outer", ["layered:detectors", "cascade:screens"])
def test_what_watches_with_others_is_bound_by_what_any_of_them_says(plug, outer):
    plug(Compares, Whole)

    def bound(*names: str) -> tuple[bool, bool]:
        defense = registry.defenses.create(Component.parse(f"{outer}=[{', '.join(names)}]"))
        return defense.across_stages, defense.whole_batch

    assert bound("coherence", "audit") == (False, False)
    assert bound("coherence", "compares") == (True, False)
    assert bound("whole", "coherence") == (False, True)
    nested = "{name: layered, params: {detectors: [whole, compares]}}"
    assert bound("coherence", nested) == (True, True)
