"""One run is the same run over several processes: every event, every ban, every weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import meshlab
import pytest
import scripted
from meshlab import Processes, Row
from scripted import Mark
from torch import Tensor

from sentinel_bench.config import Cell, Component, Scenario
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.placement import Placement

WAITS = pytest.mark.xfail(reason="what a verifier draws is not keyed by its place yet")

Protection = tuple[str, str | Component, str]
"""Attack, defense and aggregator."""


def mark(*flags: Mark, **params: Any) -> Component:
    return scripted.script(*flags, **params)


def weigh(*drop: Mark, **params: Any) -> Component:
    return Component(name="scales", params={"drop": [list(d) for d in drop], **params})


@dataclass(frozen=True)
class Play:
    """Cells that share a warm-up, and what the run of one process shows of each.

    Attributes:
        grid: changes of the tiny scenario.
        cells: to be run one after the other.
        shows: for each cell the kinds of rows that it must have, so that no test is idle.
        plain: uses plain gradient descent; weights are then compared closely.
    """

    grid: dict[str, Any]
    cells: Sequence[Protection]
    shows: Sequence[str]
    plain: bool = False
    cost: bool = False


BOTH = {"threat__mode": "both", "threat__schedule": "at-once", "grid__stages": 5}
WHOLE = Play(
    grid={**BOTH, "train__steps": 24, "train__warmup_steps": 10},
    cells=[
        ("zeros", "sentinel:quarantine=true,violations=2", "mean"),
        ("random-value", "layered:quarantine=true,violations=2", "mean"),
        ("delay:steps=3", "sentinel:substitute=reference,violations=3", "mean"),
        ("non-finite", "sentinel:quarantine=true,on_ban=drop", "mean"),
        ("update-sign-flip", "none", "median"),
        ("sign-flip", "coherence:violations=2,on_ban=drop", "krum:strict=false"),
        ("zeros", "none", "mean"),
    ],
    shows=[
        "act flag amnesty ban tamper",
        "act flag ban tamper",
        "act flag ban tamper",
        "act flag ban tamper",
        "act tamper",
        "act flag ban tamper",
        "act tamper",
    ],
    cost=True,
)
"""The batch in one piece; AdamW."""

PARTS = Play(
    grid={
        **BOTH,
        "train__steps": 20,
        "train__warmup_steps": 8,
        "train__batch_size": 4,
        "train__microbatches": 4,
        "threat__poison_self": True,
        "threat__schedule": "rate",
    },
    cells=[
        ("zeros", "cross-replica:violations=3,quarantine=true", "mean"),
        ("random-value", "sentinel:quarantine=true,violations=4", "mean"),
        ("delay:steps=2", "surrogate:violations=4", "mean"),
        ("update-ipm", "none", "mean"),
        ("zeros", "cross-replica:violations=3,quarantine=true", "mean"),
    ],
    shows=["act flag ban", "act flag", "act flag", "act tamper", "act flag ban"],
)
"""Microbatches, and attackers that corrupt what they receive."""

FIRST = Play(
    grid={
        "threat__mode": "both",
        "threat__schedule": "at-once",
        "train__batch_size": 2,
        "train__microbatches": 2,
        "train__warmup_steps": 0,
        "train__steps": 5,
        "train__grad_clip": 1e9,
        "train__lr": 0.05,
    },
    cells=[
        ("none", mark((1, 3, "gradient", 0), (1, 1, "gradient", 2), quarantine=True), "mean"),
        ("none", mark((1, 0, "activation", 3), (1, 2, "gradient", 1), quarantine=True), "mean"),
        ("none", mark((1, 2, "gradient", 1), substitute="reference"), "mean"),
        ("none", mark((1, 2, "gradient", 1), severe=True, on_ban="drop"), "mean"),
        ("none", mark(*[(2, 1, "gradient", r) for r in range(4)], severe=True,
                      quarantine=True, amnesty=False), "mean"),
        ("liar:what=short", mark(quarantine=True), "mean"),
        ("liar:what=inf,since=2", mark(on_ban="drop"), "median"),
        ("liar:what=noise", mark((2, 1, "activation", 0)), "mean"),
        ("forger:what=flip", "none", "mean"),
        ("forger:what=flip", weigh((1, 2, "gradient", 1), (1, 1, "weights", 3)), "mean"),
        ("forger:what=flip", weigh(*[(2, s, "gradient", r) for s in (0, 3) for r in (0, 2)],
                                   severe=True, quarantine=True), "median"),
        ("planter:what=add", weigh((1, 1, "weights", 0), (1, 2, "weights", 3)), "mean"),
        ("planter:what=add,trigger=[[1, 2, 3], 4]", "none", "mean"),
        ("liar:what=nan", "none", "mean"),
    ],
    shows=["flag", "flag", "flag", "flag ban", "flag ban exhausted", "flag ban act", "flag ban",
           "flag act", "act", "act flag", "act flag ban", "act", "act trigger", "act"],
    plain=True,
)  # fmt: skip
"""Verdicts that are told, from the first step on; plain gradient descent shows every gradient."""

MODELS = Play(
    grid={"threat__mode": "both", "train__steps": 10, "threat__schedule": "at-once"},
    cells=[
        ("label-flip", "none", "mean"),
        ("backdoor", "none", "mean"),
        ("insider:what=noise,ask=[colluders, honest, detector]", "sentinel", "mean"),
    ],
    shows=["act tamper", "act trigger", "act tamper"],
)
"""Attackers that know the whole model: only where a process holds all of it."""


@dataclass
class Record:
    """What a play left behind, for each cell."""

    rows: list[list[Row]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


@pytest.fixture(scope="module")
def plugged() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        meshlab.plug(patch)
        yield


@pytest.fixture(scope="module")
def make(make_scenario: Callable[..., Scenario], plugged: None) -> Callable[[Play], list[Cell]]:
    """Return a function that makes the cells of a play."""

    def cells(play: Play) -> list[Cell]:
        scenario = make_scenario(**play.grid)
        return [
            Cell(
                scenario=scenario,
                attack=Component.parse(attack),
                defense=Component.parse(defense) if isinstance(defense, str) else defense,
                aggregator=Component.parse(aggregator),
            )
            for attack, defense, aggregator in play.cells
        ]

    return cells


@pytest.fixture(scope="module")
def expected(make: Callable[[Play], list[Cell]], tokens: Tokens) -> Callable[[Play], Record]:
    """Return a function that gives what one process makes of a play."""
    known: dict[int, Record] = {}

    def record(play: Play) -> Record:
        if id(play) not in known:
            found = known[id(play)] = Record()
            cells = make(play)
            with meshlab.plain_optimizer(play.plain):
                session = meshlab.alone(cells, tokens)
            for cell, shows in zip(cells, play.shows, strict=True):
                found.rows.append(meshlab.played(session, cell, cost=play.cost))
                found.weights.append(meshlab.weights(session))
                kinds = {row["type"] for row in found.rows[-1]}
                assert {*shows.split()} <= kinds, (cell.label, kinds)
        return known[id(play)]

    return record


@pytest.fixture(scope="module")
def two(tokens: Tokens) -> Iterator[Processes]:
    with meshlab.processes(2, tokens) as crew:
        yield crew


@pytest.fixture(scope="module")
def four(tokens: Tokens) -> Iterator[Processes]:
    with meshlab.processes(4, tokens) as crew:
        yield crew


Check = Callable[[Processes, Play], None]


@pytest.fixture
def same(make: Callable[[Play], list[Cell]], expected: Callable[[Play], Record]) -> Any:
    """Return a function that plays over processes what one process has played."""

    def check(crew: Processes, play: Play, *, deferred: bool = False, **placement: Any) -> None:
        where = Placement(processes=crew.crew.size, timeout=meshlab.TIMEOUT, **placement)
        cells, one = make(play), expected(play)
        session = crew.session(where, cells, plain=play.plain, deferred=deferred)
        for i, cell in enumerate(cells):
            rows = meshlab.played(session, cell, cost=play.cost)
            found = meshlab.differences(one.rows[i], rows)
            assert not found, (cell.attack.label(), cell.protection, *found)
            far = meshlab.distance(one.weights[i], crew.weights())
            assert far <= (1e-6 if play.plain else 1e-4), (cell.label, far)

    return check


ONE_CHUNK: list[dict[str, Any]] = [{}, {"groups": 2}]
INTERLEAVED = {"order": "interleaved", "chunks": 2}


@pytest.mark.parametrize("placement", [{}, {"groups": 2}])
def test_a_run_over_two_processes_is_that_of_one(
    two: Processes, same: Any, placement: dict[str, Any]
) -> None:
    same(two, WHOLE, **placement)


@pytest.mark.parametrize("placement", [{}, {"groups": 2}])
def test_a_run_over_four_processes_is_that_of_one(
    four: Processes, same: Any, placement: dict[str, Any]
) -> None:
    same(four, WHOLE, **placement)


@pytest.mark.parametrize("placement", [{"order": "1f1b"}, INTERLEAVED])
def test_microbatches_over_two_processes_are_those_of_one(
    two: Processes, same: Any, placement: dict[str, Any]
) -> None:
    same(two, PARTS, **placement)


@pytest.mark.parametrize("placement", [{"order": "1f1b"}, {"groups": 2, **INTERLEAVED}])
def test_microbatches_over_four_processes_are_those_of_one(
    four: Processes, same: Any, placement: dict[str, Any]
) -> None:
    same(four, PARTS, **placement)


@pytest.mark.parametrize("placement", [{"deferred": True}, {"groups": 2}, INTERLEAVED])
def test_verdicts_change_the_same_weights_over_two_processes(
    two: Processes, same: Any, placement: dict[str, Any]
) -> None:
    same(two, FIRST, **placement)


@pytest.mark.parametrize("placement", [{"groups": 2, "order": "1f1b"}])
def test_verdicts_change_the_same_weights_over_four_processes(
    four: Processes, same: Any, placement: dict[str, Any]
) -> None:
    same(four, FIRST, **placement)


def test_attackers_that_know_the_model_find_it_in_a_whole_pipeline(
    two: Processes, same: Any
) -> None:
    same(two, MODELS, groups=2)
