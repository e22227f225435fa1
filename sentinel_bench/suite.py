"""Cells to run folders: what is run, in which order, what is reused, and what becomes of errors.

No torch here: the pipeline is imported when the first cell starts.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sentinel_bench import registry
from sentinel_bench.config import Cell, Component, Scenario, Seeds
from sentinel_bench.errors import ConfigError, PluginError, RunError, SentinelBenchError
from sentinel_bench.models.presets import layers_per_stage
from sentinel_bench.provenance import digest, provenance, source_digest
from sentinel_bench.record import (
    RunFolder,
    check_writable,
    find_finished,
    read_events,
    read_result,
)
from sentinel_bench.threat import place

if TYPE_CHECKING:
    from sentinel_bench.data.tokens import Tokens
    from sentinel_bench.pipeline.session import Session

NONE = Component(name="none")
ENGINE = ("api", "config", "ledger", "threat", "pipeline/*", "models/*", "data/*")
"""Modules whose code decides about the numbers of a run."""


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


@dataclass
class Plan:
    """What is run: for each scenario (one per set of seeds) its cells, the baseline first."""

    groups: list[tuple[Scenario, list[Cell]]] = field(default_factory=list)

    @property
    def cells(self) -> list[Cell]:
        """All cells in order."""
        return [cell for _, cells in self.groups for cell in cells]


def make_plan(
    scenarios: Sequence[Scenario],
    attacks: Sequence[Component],
    defenses: Sequence[Component],
    tuned: dict[str, dict[str, Any]],
) -> Plan:
    """Return the cells of every attack against every defense, each beside its baselines.

    For each scenario: no attack and no defense; then each attack without and with the defenses.

    Raises:
        ConfigError, PluginError: names, parameters or grids that cannot be run. All are checked
            before anything starts, and all that is wrong is said at once.
    """
    checks: list[Callable[[], object]] = [partial(registry.attacks.params, a) for a in attacks]
    checks += [partial(registry.defenses.params, d) for d in defenses]
    for scenario in scenarios:
        checks += [partial(layers_per_stage, scenario)]
        checks += [partial(place, scenario, attack) for attack in attacks]
    problems: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems[str(error)] = None
    if problems:
        raise ConfigError("; ".join(problems))
    plan = Plan()
    for scenario in scenarios:
        pairs = [(NONE, NONE)] + [(a, d) for a in attacks for d in [NONE, *defenses]]
        cells = {}
        for attack, defense in pairs:
            own = tuned.get(defense.name, {})
            cell = Cell(scenario=scenario, attack=attack, defense=defense, tuned=own)
            registry.defenses.params(cell.resolved_defense)
            cells[attack.label(), defense.label()] = cell
        plan.groups.append((scenario, list(cells.values())))
    return plan


def with_seeds(scenario: Scenario, seeds: Sequence[int]) -> list[Scenario]:
    """Return the scenario once for each seed, used for model, data and threat alike."""
    return [scenario.model_copy(update={"seeds": Seeds(model=s, data=s, threat=s)}) for s in seeds]


def identity(cell: Cell, data: str) -> dict[str, Any]:
    """Return all that decides about the numbers of a cell: its digest names the cell.

    Args:
        cell: the cell.
        data: digest of the token ids.
    """
    scenario = cell.scenario.model_dump(mode="json", exclude={"track"})
    if cell.attack.name == "none":
        del scenario["threat"], scenario["seeds"]["threat"]
    root = Path(__file__).parent
    engine = [p for name in ENGINE for p in sorted(root.glob(f"{name}.py"))]
    return {
        "scenario": scenario,
        "attack": registry.attacks.identity(cell.attack),
        "defense": registry.defenses.identity(cell.resolved_defense),
        "data": data,
        "engine": source_digest(engine),
        "versions": {n: version(n) for n in ("sentinel-bench", "torch", "transformers", "numpy")},
    }


def run(
    plan: Plan,
    out: Path,
    progress: Progress,
    *,
    commands: Sequence[str] = (),
    resume: bool = False,
    threads: int | None = None,
) -> list[Finished]:
    """Run all cells of a plan, group by group, and return them in order.

    A cell that fails is recorded as `invalid`, and the others go on.

    Args:
        plan: the cells.
        out: folder of the run folders.
        progress: is told what happens.
        commands: what the user typed, for the record.
        resume: take finished cells with an equal digest from `out` instead of running them.
        threads: threads of torch in this process.

    Raises:
        ConfigError: the folder or the data cannot be used; nothing was run.
        KeyboardInterrupt: after the running cell was recorded as interrupted.
    """
    from sentinel_bench.pipeline.session import prepare

    check_writable(out)
    threads = prepare(plan.groups[0][0].device, threads)
    tokens = load_tokens(plan.groups[0][0], progress)
    known = find_finished(out) if resume else {}
    finished: list[Finished] = []
    for scenario, cells in plan.groups:
        finished += _Group(scenario, cells, tokens, out, progress, commands, known, threads).run()
    return finished


def load_tokens(scenario: Scenario, progress: Progress) -> Tokens:
    """Return the corpus of a scenario.

    Raises:
        ConfigError: it cannot be read, or is shorter than one sequence.
    """
    from sentinel_bench.data import tokens
    from sentinel_bench.data.batches import Batches

    corpus = tokens.load_tokens(scenario.data, progress.say)
    Batches(corpus, batch_size=1, seq_len=scenario.train.seq_len, replicas=1, seed=0)
    return corpus


class _Group:
    """The cells that share a warm-up."""

    def __init__(
        self,
        scenario: Scenario,
        cells: Sequence[Cell],
        tokens: Tokens,
        out: Path,
        progress: Progress,
        commands: Sequence[str],
        known: dict[str, Path],
        threads: int,
    ) -> None:
        self._scenario = scenario
        self._cells = cells
        self._tokens = tokens
        self._out = out
        self._progress = progress
        self._commands = list(commands)
        self._known = known
        self._threads = threads
        self._session: Session | None = None
        self._alone = False
        self._baseline: dict[str, Any] | None = None

    def run(self) -> list[Finished]:
        """Run what is not known yet, the baseline first."""
        done = []
        identities = [identity(cell, self._tokens.digest) for cell in self._cells]
        missing = [
            cell
            for cell, key in zip(self._cells, identities, strict=True)
            if digest(key) not in self._known
        ]
        for cell, key in zip(self._cells, identities, strict=True):
            folder = self._known.get(digest(key))
            if folder is None:
                finished = self._run_cell(cell, key, missing)
            else:
                finished = Finished(cell, folder, read_result(folder) or {}, reused=True)
                self._progress.say(f"{cell.label}: reused {folder}")
            if cell.is_baseline:
                self._baseline = finished.result
            done.append(finished)
        return done

    def _run_cell(self, cell: Cell, key: dict[str, Any], missing: Sequence[Cell]) -> Finished:
        config = {
            "cell": cell.model_dump(mode="json"),
            "defense": registry.defenses.params(cell.resolved_defense).model_dump(
                mode="json", by_alias=True
            ),
            "identity": key,
            "commands": self._commands,
        }
        started = time.perf_counter()
        with RunFolder.create(self._out, cell.label, config) as folder:
            status = "error"
            try:
                session = self._warm_session(cell, missing)
                self._head(folder, cell, session)
                self._progress.start(_title(cell), session.scenario.train.steps - session.warmup)
                status = session.run(cell, folder, self._progress.advance)
            except KeyboardInterrupt:
                status = "interrupted"
                raise
            except Exception as error:  # one failing cell never stops the others
                folder.append("error", party=_party(error), message=_message(error))
                self._progress.say(f"{cell.label}: {_message(error)}")
            finally:
                self._progress.finish()
                seconds = time.perf_counter() - started
                folder.append("end", status=status, time=_now(), seconds=seconds)
                result = self._finish(folder, config)
        return Finished(cell, folder.path, result)

    def _warm_session(self, cell: Cell, missing: Sequence[Cell]) -> Session:
        """Return a warmed-up session: a shared one, or one for this cell alone.

        A plugin that fails in the shared warm-up must not take the other cells with it.
        """
        if self._session is None and not self._alone:
            try:
                self._session = self._warm(missing)
            except PluginError:
                self._alone = True
        return self._session or self._warm([cell])

    def _warm(self, cells: Sequence[Cell]) -> Session:
        from sentinel_bench.pipeline.session import Session

        session = Session(self._scenario, cells, self._tokens)
        self._progress.start(f"seed {self._scenario.seeds.model}: warm-up", session.warmup)
        session.warm_up(self._progress.advance)
        self._progress.finish()
        return session

    def _head(self, folder: RunFolder, cell: Cell, session: Session) -> None:
        grid, train = self._scenario.grid, self._scenario.train
        folder.append(
            "start",
            time=_now(),
            stages=grid.stages,
            replicas=grid.replicas,
            steps=train.steps,
            warmup_steps=train.warmup_steps,
            tokens_per_step=grid.replicas * train.batch_size * train.seq_len,
            attackers=[a.record() for a in place(self._scenario, cell.attack)],
            state_bytes=session.state_bytes(cell),
            cost={},
        )
        if not cell.is_baseline:
            base = self._baseline or {"digest": None, "scores": {}}
            folder.append(
                "baseline",
                digest=base["digest"],
                validation_loss=base["scores"].get("validation_loss"),
                tokens_per_second=base["scores"].get("tokens_per_second"),
            )

    def _finish(self, folder: RunFolder, config: dict[str, Any]) -> dict[str, Any]:
        from sentinel_bench.score import result

        source = provenance() | {"threads": self._threads}
        content = result(config | {"digest": folder.digest}, read_events(folder.path), source)
        folder.finish(content)
        return content


def _title(cell: Cell) -> str:
    return f"seed {cell.scenario.seeds.model}: {cell.attack.label()} vs {cell.defense.label()}"


def _party(error: Exception) -> str:
    if isinstance(error, PluginError):
        return error.party
    if isinstance(error, OSError | MemoryError | RunError) or "out of memory" in str(error):
        return "host"
    return "pipeline"


def _message(error: Exception) -> str:
    if isinstance(error, SentinelBenchError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return f"{type(error).__name__} at {where}: {error}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
