"""Crews of processes that run cells of scripted plugins too, and what their records have in common.

A crew is started once; each session that is opened in it may have a placement of its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import pytest
import scripted
import torch
from torch import Tensor, nn

from sentinel_bench import registry
from sentinel_bench.api import Knowledge, Setup, Signals, Updates, Verdict
from sentinel_bench.config import Cell, TrainConfig
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.pipeline import session as sessions
from sentinel_bench.pipeline import train
from sentinel_bench.pipeline.crew import LocalCrew
from sentinel_bench.pipeline.deferred import DeferredInspector
from sentinel_bench.pipeline.inspect import Inspector
from sentinel_bench.pipeline.remote import Host, Remote
from sentinel_bench.pipeline.session import Session
from sentinel_bench.pipeline.team import Alone
from sentinel_bench.pipeline.worker import Post
from sentinel_bench.placement import Placement

Row = dict[str, Any]
CLOCK = ("seconds", "time")
ROUNDED: dict[str, float] = {"loss": 1e-5, "grad_norm": 1e-4, "size": 1e-4}
"""Fields that are equal to rounding: relative distances. All others are equal."""
STATISTICS = 1e-4
"""Relative distance of statistics and fences; AdamW makes rounding larger."""
COST = 0.1
"""Distance of what a step costs, as a share of it."""
TIMEOUT = 60.0


class Planter(scripted.Implant):
    """Changes the weights of its stage, and knows no other; may have a trigger."""

    name = "planter"
    knowledge = frozenset({Knowledge.OWN})


class ScalesParams(scripted.ScriptParams):
    drop: list[scripted.Mark] = []


class Scales(scripted.Script):
    """Flags also the updates that it is told to flag: step, stage, kind, replica."""

    name = "scales"
    needs_updates = True
    Params = ScalesParams

    def check_updates(self, updates: Updates) -> Verdict:
        place = updates.step, updates.stage, updates.kind
        marks = [(*place, r) in self.params.drop for r in range(len(updates.active))]
        return Verdict(torch.tensor(marks), torch.tensor(marks) & self.params.severe)


class Again(scripted.Script):
    """Has all work of all replicas done again, and refuses what differs from what was sent."""

    name: ClassVar[str] = "again"
    needs_again = needs_updates = True

    def start(self, setup: Setup) -> None:
        super().start(setup)
        self._parts = setup.microbatches
        self._sent: dict[tuple[int, str], list[Tensor]] = {}

    def check(self, signals: Signals) -> Verdict:
        sent, again = signals.sent, signals.again
        assert again is not None
        everybody = range(len(sent))
        for of in ([*everybody], [2, 0]):
            self.compare(signals, again.recompute(of), sent[of])
            self.compare(signals, again.ask(of, of[::-1]), sent[of])
        claims = again.check_linears([1], projections=1, seed=signals.step)
        self.compare(signals, claims.result, sent[[1]])
        if float(claims.error.max()) > 100:
            raise ValueError(f"{signals.stage} {signals.direction}: linear layers {claims.error}")
        seen = self._sent.setdefault((signals.stage, signals.direction), [])
        if signals.microbatch != len(seen):
            raise ValueError(f"microbatch {signals.microbatch} after {len(seen)}")
        seen.append(sent.clone())
        return super().check(signals)

    def check_updates(self, updates: Updates) -> Verdict:
        nobody = torch.zeros(len(updates.active), dtype=torch.bool)
        if updates.kind == "weights":
            return Verdict(nobody, nobody)
        for of in ([0], [3, 1]):
            redone = updates.work.redo(of)
            for direction in ("activation", "gradient"):
                mine = getattr(redone, direction)
                sent = self._sent.get((updates.stage, direction))
                if mine is not None and sent is not None:
                    self.compare(updates, mine, torch.cat(sent, 1)[of])
            self.compare(updates, redone.update[None], updates.work.sent(of).mean(0)[None])
        kept, mean = updates.work.mean()
        if kept != [*range(len(nobody))]:
            raise ValueError(f"{kept} are averaged")
        self.compare(updates, mean[None], updates.work.sent(kept).mean(0)[None])
        return Verdict(nobody, nobody)

    def end_step(self, step: int) -> None:
        if any(len(parts) != self._parts for parts in self._sent.values()):
            raise ValueError("a message did not come")
        self._sent = {}

    def compare(self, where: Any, mine: Tensor, sent: Tensor) -> None:
        apart = (mine - sent).flatten(1).norm(dim=1) / sent.flatten(1).norm(dim=1)
        if not bool((apart < 1e-4).all()):
            raise ValueError(f"step {where.step}, stage {where.stage}: other work: {apart}")


PLUGINS = (*scripted.PLUGINS, Planter, Scales, Again)


def sgd(model: nn.Module, config: TrainConfig) -> torch.optim.SGD:
    """Return an optimizer that leaves differences of rounding as small as they are."""
    return torch.optim.SGD(model.parameters(), lr=config.lr)


def plug(patch: pytest.MonkeyPatch) -> None:
    """Make the scripted plugins known to the registries of this process."""
    for plugin in PLUGINS:
        defends = issubclass(plugin, scripted.Defense)
        where: Any = registry.defenses if defends else registry.attacks
        target = f"{plugin.__module__}:{plugin.__qualname__}"
        patch.setitem(where._targets, plugin.name, target)


class Stand(Host):
    """What each worker holds: a session on any placement of as many processes as there are."""

    def __init__(self, post: Post) -> None:
        plug(pytest.MonkeyPatch())
        super().__init__(Placement(processes=post.size, timeout=post.timeout), "cpu", post)
        self._adamw = train.make_optimizer

    def place(self, placement: Placement, plain: bool, deferred: bool) -> None:
        """Set the placement of the next session, its optimizer, and the kind of its inspector."""
        self._placement, self._mesh = placement, None
        sessions.INSPECTORS["cpu"] = DeferredInspector if deferred else Inspector
        train.make_optimizer = sgd if plain else self._adamw  # type: ignore[assignment]

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters of all stages, as those have them that hold the stage."""
        told = self._session._team.share(weights(self._session))
        first = told[: len(told) // self._session._team.column[1]]
        for i, other in enumerate(told):
            mine = first[i % len(first)]
            assert all(other[n].equal(mine[n]) or other[n].isnan().any() for n in mine)
        return {name: value for some in first for name, value in some.items()}

    def seen(self) -> list[scripted.Seen]:
        """Return what the scripted defense saw, in all processes, and forget it."""
        told = self._session._team.share(list(scripted.SEEN))
        scripted.clear()
        return [seen for some in told for seen in some]

    def resources(self) -> tuple[int, int]:
        """Return how many files and threads this process has."""
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def weights(session: Session) -> dict[str, Tensor]:
    """Return a copy of the parameters of the stages that are here."""
    return {
        f"{index}.{name}": p.detach().clone()
        for index, stage in session._trainer._stages.items()
        for name, p in stage.named_parameters()
    }


class Processes:
    """Runs cells in the workers of a crew.

    Args:
        crew: of `Stand`.
        tokens: the corpus.
    """

    def __init__(self, crew: LocalCrew, tokens: Tokens) -> None:
        self.crew = crew
        self._digest = tokens.digest

    def session(
        self,
        placement: Placement,
        cells: Sequence[Cell],
        *,
        plain: bool = False,
        deferred: bool = False,
    ) -> Remote:
        """Open a session on a placement, and do its warm-up.

        Args:
            placement, cells: where, and what will be run.
            plain: the optimizer is plain gradient descent.
            deferred: the inspector is that for GPUs.
        """
        placement.check(cells[0].scenario)
        for cell in cells:
            placement.check_cell(cell)
        self.crew.call("place", placement, plain, deferred)
        session = Remote(lambda: self.crew, cells[0].scenario, cells, self._digest)
        session.warm_up()
        return session

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters of all stages."""
        found: dict[str, Tensor] = self.crew.call("weights")
        return found


@contextmanager
def processes(size: int, tokens: Tokens, timeout: float = TIMEOUT) -> Iterator[Processes]:
    """Start a crew, and end it."""
    with LocalCrew(size, Stand, timeout=timeout) as crew:
        yield Processes(crew, tokens)


@contextmanager
def plain_optimizer(plain: bool = True) -> Iterator[None]:
    """Use plain gradient descent in this process."""
    before = train.make_optimizer
    train.make_optimizer = sgd if plain else before  # type: ignore[assignment]
    try:
        yield
    finally:
        train.make_optimizer = before


def alone(cells: Sequence[Cell], tokens: Tokens) -> Session:
    """Open a session in this process, and do its warm-up."""
    grid = cells[0].scenario.grid
    session = Session(cells[0].scenario, cells, tokens, Alone(grid.stages, grid.replicas))
    session.warm_up()
    return session


def played(session: Any, cell: Cell, *, cost: bool = False) -> list[Row]:
    """Run a cell, and return its rows: also those that come before and after."""
    events = scripted.Events()
    events.append("start", state_bytes=session.state_bytes(cell))
    events.append("ending", ending=session.run(cell, events))
    if cost:
        events.append("cost", **session.cost(cell))
    return events.rows


def differences(one: Sequence[Row], other: Sequence[Row]) -> list[str]:
    """Say where two records differ by more than rounding; one process has no traffic."""
    one, other = ([r for r in rows if r["type"] != "traffic"] for rows in (one, other))
    if [r["type"] for r in one] != [r["type"] for r in other]:
        short = [[f"{r['type']}@{r.get('step')}" for r in rows] for rows in (one, other)]
        at = next(i for i, pair in enumerate(zip_longest(*short)) if len({*pair}) > 1)
        return [f"other rows from {at} on: {short[0][at:]} and {short[1][at:]}"]
    found = []
    for a, b in zip(one, other, strict=True):
        if a.keys() != b.keys():
            found.append(f"other fields: {a} and {b}")
            continue
        for key in a.keys() - {*CLOCK}:
            if _different(a["type"], key, a, b):
                found.append(f"{a['type']} {key}: {a} and {b}")
    return found


def _different(kind: str, key: str, one: Row, other: Row) -> bool:
    """Tell whether a field differs by more than rounding."""
    a, b = one[key], other[key]
    if kind == "cost" and key in ("flops", "step_flops"):  # each process has an optimizer
        return abs(a - b) > COST * one["step_flops"]
    if key == "statistics":
        return a.keys() != b.keys() or not all(_near(a[k], b[k]) for k in a)
    if key in ROUNDED and isinstance(a, float):
        return not (a == b or math.isnan(a + b) or abs(a - b) <= ROUNDED[key] * abs(a))
    return bool(a != b)


def _near(a: Sequence[float], b: Sequence[float]) -> bool:
    """Tell whether a statistic and its fences are the same to rounding, on their own scale."""
    if [*map(math.isfinite, a)] != [*map(math.isfinite, b)]:
        return False
    scale = max((abs(x) for x in a if math.isfinite(x)), default=0.0)
    return all(
        abs(x - y) <= STATISTICS * scale for x, y in zip(a, b, strict=True) if math.isfinite(x)
    )


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the relative distance of two sets of parameters; NaN is equal to NaN."""
    assert one.keys() == other.keys()
    a, b = (torch.cat([x[name].flatten() for name in sorted(one)]) for x in (one, other))
    if not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    return float((a - b).nan_to_num().norm() / (1e-30 + b.nan_to_num().norm()))
