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
from sentinel_bench.errors import RunError
from sentinel_bench.placement import Placement

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
        cost: what it costs is compared as well, on one placement.
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
        ("random-value", "cascade:quarantine=true", "mean"),
        ("zeros", "none", "mean"),
    ],
    shows=[
        "act flag amnesty ban tamper",
        "act flag ban tamper",
        "act flag ban tamper",
        "act flag ban tamper",
        "act tamper",
        "act flag ban tamper",
        "act flag ban tamper",
        "act tamper",
    ],
    cost=True,
)
"""The batch in one piece; AdamW."""

PARTS = Play(
    grid={
        **BOTH,
        "train__steps": 16,
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
        ("update-sign-flip", "audit:q=0.5", "mean"),
        ("random-value", "duplicate-work", "mean"),
        ("zeros", "cross-replica:violations=3,quarantine=true", "mean"),
    ],
    shows=[
        "act flag ban",
        "act flag",
        "act flag",
        "act flag",
        "act flag",
        "act flag ban",
    ],
)
"""Microbatches, and attackers that corrupt what they receive."""

FIRST = Play(
    grid={
        "threat__mode": "both",
        "threat__schedule": "at-once",
        "train__batch_size": 2,
        "train__microbatches": 2,
        "train__warmup_steps": 0,
        "train__steps": 4,
        "train__grad_clip": 1e9,
        "train__lr": 0.05,
        "faults__on_crash": "ban",
    },
    cells=[
        ("crash:after=2", mark(quarantine=True), "mean"),
        (f"straggle:seconds={meshlab.WAIT:.0f},rate=0.4", "none", "mean"),
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
        ("none", "again", "mean"),
        ("liar:what=nan", "none", "mean"),
    ],
    shows=["act ban", "act", "flag", "flag", "flag", "flag ban", "flag ban exhausted",
           "flag ban act", "flag ban", "flag act", "act", "act flag", "act flag ban", "act",
           "act trigger", "step", "act"],
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
    costs: list[Row] = field(default_factory=list)


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
                found.rows.append(meshlab.played(session, cell))
                found.weights.append(meshlab.weights(session))
                if play.cost:
                    found.costs.append(meshlab.cost(session, cell))
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
        cost = play.cost and where.processes == 2 and not placement  # takes its time
        session = crew.session(where, cells, plain=play.plain, deferred=deferred)
        for i, cell in enumerate(cells):
            found = meshlab.differences(one.rows[i], meshlab.played(session, cell))
            assert not found, (cell.attack.label(), cell.protection, *found)
            far = meshlab.distance(one.weights[i], crew.weights())
            assert far <= (1e-6 if play.plain else 1e-4), (cell.label, far)
            if cost:
                found = meshlab.differences([one.costs[i]], [meshlab.cost(session, cell)])
                assert not found, (cell.label, *found)

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


# --- the wire -------------------------------------------------------------------------------------

HONEST = Play(
    grid={**FIRST.grid, "train__steps": 3, "grid__stages": 5},
    cells=[("random-value", mark((1, 2, "gradient", 1), quarantine=True), "mean")],
    shows=["act flag"],
)


@pytest.mark.parametrize("placement", [{}, INTERLEAVED])
def test_a_message_that_is_turned_round_twice_changes_nothing_at_all(
    two: Processes, make: Callable[[Play], list[Cell]], placement: dict[str, Any]
) -> None:
    cells, where = make(HONEST), Placement(processes=2, **placement)
    found = {}
    try:
        for kind in ("plain", "mirror", "half"):
            two.crew.call("wire", kind)
            rows = meshlab.played(two.session(where, cells), cells[0])
            found[kind] = scripted.Events(rows).timeless(), two.weights()
    finally:
        two.crew.call("wire", "plain")
    (rows, weights), (same_rows, same_weights) = found["plain"], found["mirror"]
    assert rows == same_rows
    assert scripted.equal(weights, same_weights)
    assert not scripted.equal(weights, found["half"][1])  # the mirror is really there


@pytest.mark.parametrize(
    "direction, seen, place",
    [
        ("activation", {"activation": 1, "gradient": 2}, "rank 1 (stages 2-3): boundary 1"),
        ("gradient", {"activation": 2, "gradient": 1}, "rank 0 (stages 0-1): boundary 0"),
    ],
)
def test_a_lost_message_ends_the_run_with_the_place(
    tokens: Tokens,
    make: Callable[[Play], list[Cell]],
    direction: str,
    seen: dict[str, int],
    place: str,
) -> None:
    cells = make(FIRST)
    with meshlab.processes(2, tokens) as crew:
        session = crew.session(Placement(processes=2), cells)
        crew.crew.call("miscount", int(place[5]), direction)
        with pytest.raises(RunError) as error:
            session.run(cells[2], scripted.Events())
    assert str(error.value) == (
        f"{place} saw {seen} in one pass, not 2 of each: a message was lost or came twice"
    )


SIGNAL = 4 * 2 * 8 * 16 * 4
"""Bytes of a signal of `FIRST`: replicas, sequences, tokens, hidden, bytes of a number."""


@pytest.mark.parametrize(
    "placement, crossings",
    [({}, 1), (INTERLEAVED, 3), ({"groups": 2}, 0)],
)
def test_what_travels_between_processes_is_counted(
    two: Processes, make: Callable[[Play], list[Cell]], placement: dict[str, Any], crossings: int
) -> None:
    cells, where = make(FIRST), Placement(processes=2, **placement)
    session = two.session(where, cells)
    sent = {}
    for cell in (cells[2], cells[-1]):  # a defense looks, or nobody
        (row,) = [r for r in meshlab.played(session, cell) if r["type"] == "traffic"]
        sent[cell.defense.name] = row["sent"]
    for kinds in sent.values():
        assert kinds["activation"] == kinds["gradient"] == crossings * SIGNAL
    assert sent["none"]["taint"] == 0
    assert sent["script"]["taint"] == crossings * 2 * 2 * 4 * 4  # both ways, of two microbatches
    grouped = "groups" in placement
    parameters = sum(w.nbytes for w in two.weights().values())
    loss = 4  # rides with the weight gradients
    assert sent["script"]["weights"] == sent["none"]["weights"] == grouped * 2 * (parameters + loss)
    assert sent["script"]["replicas"] == grouped * 2 * 3 * SIGNAL  # three boundaries, both ways
