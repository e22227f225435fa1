"""Runs the cells of one scenario and writes their records: reuse, errors, results.

No torch here: the pipeline is imported when the first cell starts.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from sentinel_bench import registry
from sentinel_bench.config import Cell, Scenario
from sentinel_bench.errors import FaultError, PluginError, RunError, SentinelBenchError
from sentinel_bench.models import pretrained
from sentinel_bench.placement import Placement
from sentinel_bench.provenance import differing, digest, provenance, source_digest
from sentinel_bench.record import (
    RunFolder,
    find_finished,
    find_runs,
    read_config,
    read_events,
    read_result,
    save_result,
)
from sentinel_bench.threat import place
from sentinel_bench.trace import tracing

if TYPE_CHECKING:
    from sentinel_bench.data.tokens import Tokens

ENGINE = ("api", "config", "ledger", "placement", "threat", "pipeline/*", "models/*", "data/*")
"""Modules whose code decides about the numbers of a run."""

Slot = tuple[str | int, ...]
Known = Mapping[Slot, Sequence[tuple[Path, dict[str, Any]]]]
"""Attack, defense and seeds to the finished runs of these: folder and identity."""


class Progress(Protocol):
    """Shows what is going on."""

    def say(self, text: str) -> None:
        """Show a line."""

    def start(self, label: str, total: int) -> None:
        """Begin a piece of work of `total` steps."""

    def advance(self) -> None:
        """One step is done."""

    def finish(self) -> None:
        """The piece of work is over."""


class AnySession(Protocol):
    """Cells that share a warm-up; see `pipeline.session.Session`."""

    scenario: Scenario

    @property
    def warmup(self) -> int:
        """Number of warm-up steps."""

    def warm_up(self, tick: Callable[[], None]) -> None:
        """Train the honest steps that all cells share."""

    def run(self, cell: Cell, log: Any, tick: Callable[[], None], trace: Any = None) -> str:
        """Run one cell from the end of the warm-up, and log every event."""

    def state_bytes(self, cell: Cell) -> int:
        """Return the memory that the cell's defense keeps."""

    def cost(self, cell: Cell) -> dict[str, int]:
        """Return what the cell's defense and aggregator cost a step."""


@dataclass
class Finished:
    """A cell with its folder and the content of its result."""

    cell: Cell
    folder: Path
    result: dict[str, Any]
    reused: bool = False

    @property
    def valid(self) -> bool:
        """True if the run says something."""
        return bool(self.result["scores"]["outcome"] != "invalid")


@dataclass(frozen=True)
class Job:
    """What all groups of one command share.

    Attributes:
        tokens: the corpus.
        out: folder of the run folders.
        progress: is told what happens.
        commands: what the user typed, for the record.
        execution: threads and placement, for the record.
        known: finished cells that may be reused.
        open: begins a session, in this process or in others.
        trace: also record the statistics of all tested workers.
    """

    tokens: Tokens
    out: Path
    progress: Progress
    commands: tuple[str, ...]
    execution: Mapping[str, Any]
    known: Known
    open: Callable[[Scenario, Sequence[Cell]], AnySession]
    trace: bool = False


def identity(cell: Cell, data: str) -> dict[str, Any]:
    """Return all that decides about the numbers of a cell: its digest names the cell.

    Args:
        cell: the cell.
        data: digest of the token ids.

    Raises:
        ConfigError: its pretrained weights are not there.
    """
    root = Path(__file__).parent
    engine = [p for name in ENGINE for p in sorted(root.glob(f"{name}.py"))]
    weights = pretrained.identity(cell.scenario.model)
    return {
        **({} if weights is None else {"weights": weights}),
        "scenario": settings(cell),
        "attack": registry.attacks.identity(cell.attack),
        "defense": registry.defenses.identity(cell.resolved_defense),
        "aggregator": registry.aggregators.identity(cell.aggregator),
        "data": data,
        "engine": source_digest(engine),
        "versions": {n: _version(n) for n in ("sentinel-bench", "torch", "transformers", "numpy")},
    }


_version = cache(version)  # it reads a file, and a suite asks once for each cell


def settings(cell: Cell) -> dict[str, Any]:
    """Return what the identity of a cell holds of its scenario: all that its numbers depend on."""
    scenario = cell.scenario.model_dump(mode="json", exclude={"track"})
    if cell.attack.name == "none":
        del scenario["threat"], scenario["faults"], scenario["seeds"]["threat"]
    return scenario


def known_cells(out: Path) -> Known:
    """Return the finished cells below `out`, the newest of a slot last."""
    known: dict[Slot, list[tuple[Path, dict[str, Any]]]] = {}
    for folder in sorted(find_finished(out).values()):
        config = read_config(folder)
        try:
            cell = Cell.model_validate(config.get("cell"))
        except ValidationError:  # of another version, with other settings
            continue
        known.setdefault(_slot(cell), []).append((folder, config["identity"]))
    return known


def find(known: Known, cell: Cell, key: dict[str, Any]) -> tuple[Path | None, str]:
    """Return the folder of the finished cell; if only a similar one is there, say why not.

    Args:
        known: what there is.
        cell: the cell.
        key: its identity.
    """
    similar = known.get(_slot(cell), [])
    for folder, other in similar:
        if digest(other) == digest(key):
            return folder, ""
    if not similar:
        return None, ""
    folder, other = similar[-1]
    keys = ", ".join(differing(key, other))
    return None, f"{title(cell)}: {folder} is not reused; differs in {keys}"


def run_group(job: Job, scenario: Scenario, cells: Sequence[Cell]) -> list[Finished]:
    """Run the cells that share a warm-up, the baseline first; what is known already is taken."""
    found = [find(job.known, cell, identity(cell, job.tokens.digest)) for cell in cells]
    for _, note in found:
        if note:
            job.progress.say(note)
    group = Group(job, scenario, [c for c, (f, _) in zip(cells, found, strict=True) if f is None])
    done = []
    for cell, (folder, _) in zip(cells, found, strict=True):
        if folder is None:
            finished = group.run(cell)
        else:
            finished = Finished(cell, folder, rescored(folder, read_events(folder)), reused=True)
            job.progress.say(f"{title(cell)}: reused {folder}")
        if cell.is_baseline:
            group.baseline = finished.result
        done.append(finished)
    return done


def failed_cells(out: Path) -> dict[str, str]:
    """Return digest and reason of each cell of `out` whose newest finished run is invalid."""
    failed: dict[str, str] = {}
    for folder in find_runs(out):
        try:
            key, result = read_config(folder)["digest"], read_result(folder)
        except SentinelBenchError:
            continue
        scores = (result or {}).get("scores")
        if isinstance(scores, dict):
            failed.pop(key, None)
            if scores.get("outcome") == "invalid":
                failed[key] = str(scores.get("reason"))
    return failed


def seconds_of(events: Sequence[Mapping[str, Any]]) -> float:
    """Return what a finished run took, its own warm-up included; 0 if that is not recorded."""
    last = events[-1]
    return float(last.get("seconds") or 0.0) if last["type"] == "end" else 0.0


def bury(out: Path, key: dict[str, Any], reason: str, since: float) -> Finished | None:
    """Finish the record of a cell whose process has died; None if it had none yet.

    Args:
        out: folder of the run folders.
        key: identity of the cell.
        reason: how the process came to its end.
        since: when the cell was begun, in seconds of the system's clock.

    Raises:
        RunError: the record cannot be read or written.
    """
    for path in reversed(find_runs(out)):
        if path.stat().st_mtime < since:
            continue
        config = read_config(path)
        if config["digest"] != digest(key) or read_result(path) is not None:
            continue
        with RunFolder.reopen(path) as folder:
            folder.append("error", party="host", message=reason)
            folder.append("end", status="error", time=_now(), seconds=time.time() - since)
            cell = Cell.model_validate(config["cell"])
            return Finished(cell, path, _finish(folder, config, {}))
    return None


class Group:
    """Cells that share a warm-up, run one at a time.

    Args:
        job: where and how.
        scenario: of one of them; see `config.Scenario.honest` for what they share.
        cells: all that may be run; their defenses and attackers watch the warm-up.
    """

    def __init__(self, job: Job, scenario: Scenario, cells: Sequence[Cell]) -> None:
        self._job = job
        self._scenario = scenario
        self._cells = cells
        self._session: AnySession | None = None
        self._alone = False
        self.baseline: dict[str, Any] | None = None
        """The result of the run without attack and defense, once it is known."""

    def run(self, cell: Cell) -> Finished:
        """Run a cell, and record it."""
        key = identity(cell, self._job.tokens.digest)
        config = {
            "cell": cell.model_dump(mode="json"),
            "defense": registry.defenses.params(cell.resolved_defense).model_dump(
                mode="json", by_alias=True
            ),
            "identity": key,
            "commands": list(self._job.commands),
        }
        started = time.perf_counter()
        with (
            RunFolder.create(self._job.out, cell.label, config) as folder,
            tracing(folder.path, wanted=self._job.trace) as trace,
        ):
            status = "error"
            try:
                session = self.warm_session(cell)
                self._head(folder, cell, session)
                self._job.progress.start(title(cell), session.scenario.train.steps - session.warmup)
                status = session.run(cell, folder, self._job.progress.advance, trace)
                folder.append("cost", **session.cost(cell))
            except KeyboardInterrupt:
                status = "interrupted"
                raise
            except Exception as error:  # one failing cell never stops the others
                folder.append("error", party=party_of(error), message=message(error))
                self._job.progress.say(f"{cell.label}: {message(error)}")
            finally:
                self._job.progress.finish()
                seconds = time.perf_counter() - started
                folder.append("end", status=status, time=_now(), seconds=seconds)
                result = _finish(folder, config, self._job.execution)
        return Finished(cell, folder.path, result)

    def warm_session(self, cell: Cell) -> AnySession:
        """Return a warmed-up session: a shared one, or one for this cell alone.

        A plugin that fails in the shared warm-up must not take the other cells with it.
        """
        if self._session is None and not self._alone:
            try:
                self._session = self._warm(self._cells)
            except PluginError:
                self._alone = True
        return self._session or self._warm([cell])

    def _warm(self, cells: Sequence[Cell]) -> AnySession:
        session = self._job.open(self._scenario, cells)
        self._job.progress.start(f"seed {self._scenario.seeds.model}: warm-up", session.warmup)
        session.warm_up(self._job.progress.advance)
        self._job.progress.finish()
        return session

    def _head(self, folder: RunFolder, cell: Cell, session: AnySession) -> None:
        grid, train = self._scenario.grid, self._scenario.train
        folder.append(
            "start",
            time=_now(),
            stages=grid.stages,
            replicas=grid.replicas,
            steps=train.steps,
            warmup_steps=train.warmup_steps,
            tokens_per_step=grid.replicas * train.batch_size * train.seq_len,
            attackers=[a.record() for a in place(cell.scenario, cell.attack)],
            state_bytes=session.state_bytes(cell),
        )
        if not cell.is_baseline:
            base = self.baseline or {"digest": None, "scores": {}}
            here = self._job.execution["placement"]
            alike = base.get("provenance", {}).get("placement", Placement().record()) == here
            folder.append(
                "baseline",
                digest=base["digest"],
                validation_loss=base["scores"].get("validation_loss"),
                tokens_per_second=base["scores"].get("tokens_per_second") if alike else None,
            )


def _finish(
    folder: RunFolder, config: dict[str, Any], execution: Mapping[str, Any]
) -> dict[str, Any]:
    """Score the events of a run, and write its result."""
    from sentinel_bench.score import result

    source = provenance() | dict(execution)
    content = result(config | {"digest": folder.digest}, read_events(folder.path), source)
    folder.finish(content)
    return content


def rescored(folder: Path, events: Sequence[Any]) -> dict[str, Any]:
    """Return the result of a finished cell, scored anew in case the definitions have changed."""
    from sentinel_bench.score import result

    stored = read_result(folder) or {}
    content = result(read_config(folder), events, stored.get("provenance", {}))
    if content != stored:
        save_result(folder, content)
    return content


def _slot(cell: Cell) -> Slot:
    seeds = cell.scenario.seeds
    threat = () if cell.attack.name == "none" else (cell.scenario.threat.mode, seeds.threat)
    return cell.attack.label(), cell.protection, seeds.model, seeds.data, *threat


def title(cell: Cell) -> str:
    """Name a cell for the user, with its seeds and mode."""
    seeds = cell.scenario.seeds
    numbers = dict.fromkeys([seeds.model, seeds.data, seeds.threat])
    return f"seed {'/'.join(map(str, numbers))}: {attack_of(cell)} vs {cell.protection}"


def attack_of(cell: Cell) -> str:
    """Name the attack of a cell, with its mode if it has another one than the usual."""
    mode = cell.scenario.threat.mode
    where = "" if cell.attack.name == "none" or mode == "activation" else f" ({mode})"
    return f"{cell.attack.label()}{where}"


def party_of(error: Exception) -> str:
    """Say who is at fault: a plugin, "fault", "host" or "pipeline"."""
    party = getattr(error, "party", None)
    if isinstance(party, str):
        return party
    if isinstance(error, FaultError):
        return "fault"
    if isinstance(error, OSError | MemoryError | RunError) or "out of memory" in str(error):
        return "host"
    return "pipeline"


def message(error: Exception) -> str:
    """Say in one line what went wrong; for an error that no user can mend, where."""
    if isinstance(error, SentinelBenchError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return f"{type(error).__name__} at {where}: {error}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
