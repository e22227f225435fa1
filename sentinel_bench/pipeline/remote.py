"""A session that several processes run together, seen from the one that writes the record.

chief: runner -> `Remote` -> crew.call(...)       no tensors here
workers:         `Host`   -> `Session` on a `Mesh`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sentinel_bench import plugins
from sentinel_bench.config import Cell, Scenario
from sentinel_bench.errors import RunError
from sentinel_bench.pipeline.chief import Crew
from sentinel_bench.pipeline.worker import Post
from sentinel_bench.placement import Placement

Tick = Callable[[], None]


class Host:
    """What each worker holds: one session at a time, on a mesh with the other workers.

    Args:
        placement: which process does what.
        device: cpu or cuda.
        post: of this worker.
    """

    def __init__(self, placement: Placement, device: str, post: Post) -> None:
        from sentinel_bench.pipeline import mesh

        mesh.connect(placement, post.rank, post.init_method, device)
        self._placement = placement
        self._post = post
        self._mesh: Any = None
        self._session: Any = None

    def open(
        self, scenario: Scenario, cells: Sequence[Cell], digest: str, files: dict[Path, bytes]
    ) -> None:
        """Begin a session; all workers read the corpus, which must have this digest.

        Args:
            scenario, cells: see `Session`.
            digest: of the corpus.
            files: with plugins, and their sources.

        Raises:
            RunError: it is another corpus here.
        """
        from sentinel_bench.data.tokens import load_tokens
        from sentinel_bench.pipeline.mesh import Mesh
        from sentinel_bench.pipeline.session import Session

        plugins.use(files)
        tokens = load_tokens(scenario.data, lambda _: None)
        if tokens.digest != digest:
            raise RunError("the corpus differs from that of the first process: compare the files")
        if self._mesh is None:  # all sessions of a command have one grid
            self._mesh = Mesh(self._placement, scenario)
        self._session = Session(scenario, cells, tokens, self._mesh)

    def warm_up(self) -> None:
        """Train the honest steps; tell of each."""
        self._session.warm_up(self._tick)

    def run(self, cell: Cell) -> str:
        """Run a cell; tell every event."""
        ending: str = self._session.run(cell, _Telling(self._post), self._tick)
        return ending

    def state_bytes(self, cell: Cell) -> int:
        """See `Session`."""
        return int(self._session.state_bytes(cell))

    def cost(self, cell: Cell) -> dict[str, int]:
        """See `Session`."""
        found: dict[str, int] = self._session.cost(cell, self._tick)
        return found

    def _tick(self) -> None:
        self._post.tell("tick")


class _Telling:
    """A log whose rows the chief writes."""

    def __init__(self, post: Post) -> None:
        self._post = post

    def append(self, kind: str, /, **fields: Any) -> None:
        """Tell a row."""
        self._post.tell("event", kind=kind, fields=fields)


class Remote:
    """A session in the workers of a crew; the same methods as `Session`.

    Where the crew has ended by an error, the next call opens the session in a new one and does the
    warm-up again: a failing cell takes no other one with it.

    Args:
        crews: returns the workers; others than the last time if those have ended.
        scenario, cells, digest: see `Host.open`.
    """

    def __init__(
        self, crews: Callable[[], Crew], scenario: Scenario, cells: Sequence[Cell], digest: str
    ) -> None:
        self.scenario = scenario
        self.warmup = scenario.train.warmup_steps
        self._crews = crews
        self._opening = (scenario, cells, digest, plugins.in_use())
        self._warm = False
        self._crew: Crew | None = None
        self._living()

    def warm_up(self, tick: Tick = lambda: None) -> None:
        """Train the honest steps that all cells share."""
        self._living().call("warm_up", listen=partial(_listen, None, tick))
        self._warm = True

    def run(self, cell: Cell, log: Any, tick: Tick = lambda: None, trace: None = None) -> Any:
        """Run one cell from the end of the warm-up, and log every event; there is no trace."""
        return self._living().call("run", cell, listen=partial(_listen, log, tick))

    def state_bytes(self, cell: Cell) -> int:
        """Return the memory that the cell's defense keeps."""
        return int(self._living().call("state_bytes", cell))

    def cost(self, cell: Cell) -> dict[str, int]:
        """Return what the cell's defense and aggregator cost a step."""
        found: dict[str, int] = self._living().call("cost", cell)
        return found

    def _living(self) -> Crew:
        """Return the workers, with the session open and as far as it has come."""
        crew = self._crews()
        if crew is not self._crew:
            crew.call("open", *self._opening)
            if self._warm:
                crew.call("warm_up")
            self._crew = crew
        return crew


def _listen(log: Any, tick: Tick, kind: str, fields: dict[str, Any]) -> None:
    if kind == "tick":
        tick()
    else:
        log.append(fields["kind"], **fields["fields"])


class Crewed:
    """Opens sessions in a crew; starts a new crew where the last one has ended by an error.

    Args:
        placement: which process does what.
        scenario: the grid, for messages.
        digest: of the corpus.
        threads: of torch in each process.
    """

    def __init__(self, placement: Placement, scenario: Scenario, digest: str, threads: int) -> None:
        self._placement = placement
        self._scenario = scenario
        self._digest = digest
        self._threads = threads
        self._crew: Any = None

    def __call__(self, scenario: Scenario, cells: Sequence[Cell]) -> Remote:
        """Open a session."""
        return Remote(self._living, scenario, cells, self._digest)

    def close(self) -> None:
        """End the workers."""
        if self._crew is not None:
            self._crew.close()

    def _living(self) -> Any:
        """Return the crew; a new one if it has ended, where processes can be started."""
        if self._crew is None or (self._crew.over and not self._placement.torchrun):
            self._crew = self._start()
        return self._crew

    def _start(self) -> Any:
        build = partial(Host, self._placement, self._scenario.device)
        describe = partial(_stages_of, self._placement, self._scenario.grid.stages)
        timeout = self._placement.timeout
        if self._placement.torchrun:
            from sentinel_bench.pipeline.torchrun import TorchrunCrew

            return TorchrunCrew(build, timeout=timeout, describe=describe)
        from sentinel_bench.pipeline.crew import LocalCrew

        size = self._placement.processes
        return LocalCrew(size, build, timeout=timeout, describe=describe, threads=self._threads)


def follow(placement: Placement, scenario: Scenario) -> None:
    """Work for rank 0 until it is done; in a process of torchrun that is not rank 0."""
    from sentinel_bench.pipeline.torchrun import TorchrunCrew

    build = partial(Host, placement, scenario.device)
    TorchrunCrew(build, timeout=placement.timeout).follow()


def _stages_of(placement: Placement, stages: int, rank: int) -> str:
    return placement.stages_in_words(rank, stages)
