"""Crews of processes that run cells of scripted plugins too, and what their records have in common.

A crew is started once; each session that is opened in it may have a placement of its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import scripted
import torch
from torch import Tensor, nn

from sentinel_bench import registry
from sentinel_bench.config import Cell, TrainConfig
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.pipeline import train
from sentinel_bench.pipeline.crew import LocalCrew
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
COST = 0.03
"""Distance of what a step costs, as a share of it."""
TIMEOUT = 60.0


def sgd(model: nn.Module, config: TrainConfig) -> torch.optim.SGD:
    """Return an optimizer that leaves differences of rounding as small as they are."""
    return torch.optim.SGD(model.parameters(), lr=config.lr)


class Stand(Host):
    """What each worker holds: a session on any placement of as many processes as there are."""

    def __init__(self, post: Post) -> None:
        for plugin in scripted.PLUGINS:
            where: Any = registry.attacks
            if issubclass(plugin, scripted.Defense):
                where = registry.defenses
            where._targets[plugin.name] = f"{plugin.__module__}:{plugin.__qualname__}"
        super().__init__(Placement(processes=post.size, timeout=post.timeout), "cpu", post)
        self._adamw = train.make_optimizer

    def place(self, placement: Placement, plain: bool) -> None:
        """Set the placement of the next session, and whether its optimizer is a plain one."""
        self._placement = placement
        train.make_optimizer = sgd if plain else self._adamw  # type: ignore[assignment]

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters of all stages, as those have them that hold the stage."""
        told = self._session._team.share(weights(self._session))
        first = told[: len(told) // self._session._team.column[1]]
        for i, other in enumerate(told):
            assert scripted.equal(other, first[i % len(first)]), "replica groups differ"
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
        self, placement: Placement, cells: Sequence[Cell], *, plain: bool = False
    ) -> Remote:
        """Open a session on a placement, and do its warm-up."""
        placement.check(cells[0].scenario)
        for cell in cells:
            placement.check_cell(cell)
        self.crew.call("place", placement, plain)
        session = Remote(self.crew, cells[0].scenario, cells, self._digest)
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
def plain_optimizer() -> Iterator[None]:
    """Use plain gradient descent in this process."""
    before = train.make_optimizer
    train.make_optimizer = sgd  # type: ignore[assignment]
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


def played(session: Any, cell: Cell) -> list[Row]:
    """Run a cell, and return its rows: also those that come before and after."""
    events = scripted.Events()
    events.append("start", state_bytes=session.state_bytes(cell))
    events.append("ending", ending=session.run(cell, events))
    events.append("cost", **session.cost(cell))
    return events.rows


def differences(one: Sequence[Row], other: Sequence[Row]) -> list[str]:
    """Say where two records differ by more than rounding."""
    if [r["type"] for r in one] != [r["type"] for r in other]:
        short = [[f"{r['type']}@{r.get('step')}" for r in rows] for rows in (one, other)]
        return [f"other rows: {short[0]} and {short[1]}"]
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
    """Return the relative distance of two sets of parameters."""
    assert one.keys() == other.keys()
    a, b = (torch.cat([x[name].flatten() for name in sorted(one)]) for x in (one, other))
    return float((a - b).norm() / b.norm())
