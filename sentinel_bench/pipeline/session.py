"""Cells of one scenario: an honest warm-up that is trained once, and a run forked from it for each.

All defenses watch the warm-up; the fork copies weights, optimizer, the defenses' state and the
attackers' memories, so that a cell is the same run whether it shares its warm-up or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from sentinel_bench import registry
from sentinel_bench.api import Defense, Place, ResponseParams, Setup
from sentinel_bench.config import Cell, Component, Scenario
from sentinel_bench.data.batches import Batches
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.errors import ConfigError
from sentinel_bench.ledger import Ledger, Ruling
from sentinel_bench.pipeline.copies import bytes_of_copies
from sentinel_bench.pipeline.cost import STEPS, Meter, clock
from sentinel_bench.pipeline.deferred import DeferredInspector
from sentinel_bench.pipeline.exchange import LiveExchange, WarmupExchange
from sentinel_bench.pipeline.inspect import (
    Inspector,
    Log,
    Tally,
    Tracer,
    fork,
    redundancy,
    start,
    state_bytes,
)
from sentinel_bench.pipeline.minutes import Minutes
from sentinel_bench.pipeline.tamper import Harm, History, OnAct, Tamperer, watch
from sentinel_bench.pipeline.team import Team
from sentinel_bench.pipeline.train import StepResult, Trainer
from sentinel_bench.threat import place

Ending = Literal["complete", "exhausted"]
Tick = Callable[[], None]


INSPECTORS: dict[str, type[Inspector]] = {"cpu": Inspector, "cuda": DeferredInspector}
"""Which side of a boundary is faster on a device; both come to the same verdicts."""


class Session:
    """Runs cells that share a warm-up.

    Args:
        scenario: what the cells share, which is all but who attacks (`config.Scenario.honest`).
        cells: all that may be run; their defenses and attackers watch the warm-up.
        tokens: the corpus.
        team: the processes that run it together; None: this one alone.
    """

    def __init__(
        self, scenario: Scenario, cells: Sequence[Cell], tokens: Tokens, team: Team | None = None
    ) -> None:
        grid = scenario.grid
        self.scenario = scenario
        batches = Batches.of(tokens, scenario)
        self._trainer = Trainer(scenario, batches, tokens.vocab_size, team)
        self._team = self._trainer.team
        self._setup = Setup(
            grid.stages,
            grid.replicas,
            self._trainer.signal_shape,
            scenario.device,
            _seed(scenario),
            scenario.train.microbatches,
        )
        self._defenses: dict[str, Defense[Any]] = {}
        self._history = History(scenario.train.microbatches)
        for cell in cells:
            key = cell.resolved_defense.label()
            if key not in self._defenses:
                self._defenses[key] = self._start(cell.resolved_defense)
            attackers = place(cell.scenario, cell.attack)
            watch([(a, registry.attacks.create(a.attack)) for a in attackers], self._history)
        self._rows: list[dict[str, Any]] = []
        self._snapshot: dict[str, Any] | None = None
        self._costs: dict[str, dict[str, int]] = {}
        self._plain_flops: int | None = None

    @property
    def warmup(self) -> int:
        """Number of warm-up steps."""
        return self.scenario.train.warmup_steps

    def warm_up(self, tick: Tick = lambda: None) -> None:
        """Train the honest steps that all cells share. `tick` is called after each."""
        exchange = WarmupExchange(list(self._defenses.values()), self._history)
        self._trainer.connect(exchange)
        for step in range(self.scenario.train.warmup_steps):
            started = clock()
            exchange.step = step
            result = self._trainer.step(step)
            self._trainer.inject()
            exchange.end_step()
            self._rows.append(_step_row(step, result, Tally(), clock() - started))
            tick()
        self._snapshot = self._trainer.snapshot()

    def run(
        self, cell: Cell, log: Log, tick: Tick = lambda: None, trace: Tracer | None = None
    ) -> Ending:
        """Run one cell from the end of the warm-up, and log every event but `start` and `end`."""
        if self._snapshot is None:
            raise RuntimeError("warm_up comes first")
        self._trainer.restore(self._snapshot)
        grid, train = self.scenario.grid, self.scenario.train
        defense = fork(self._defenses[cell.resolved_defense.label()])
        policy = registry.defenses.params(cell.resolved_defense)  # not what the plugin holds
        assert isinstance(policy, ResponseParams)
        ledger = Ledger(policy, grid.stages, grid.replicas)
        attackers = place(cell.scenario, cell.attack)
        looks = not type(defense).passive or defense.needs_updates
        minutes = Minutes(log, self._team, silent=not (attackers or looks))
        inspect = INSPECTORS[self.scenario.device]
        inspector = inspect(defense, ledger, minutes, train.microbatches, trace)
        tamperer = Tamperer(
            attackers,
            self._history,
            cell.scenario.device,
            ledger.banned,
            _first_acts(minutes),
            cell.scenario.faults.deadline,
        )
        exchange = LiveExchange(tamperer, inspector, cell.scenario.faults)
        triggers = tamperer.triggers(self._trainer.vocabulary)
        before = [self._trainer.success(*trigger) for trigger in triggers]
        self._trainer.connect(exchange)
        self._aggregate(cell)
        for row in self._rows:
            log.append("step", **row)
        before_run = dict(self._team.traffic)
        ending: Ending = "complete"
        for step in range(train.warmup_steps, train.steps):
            started = clock()
            exchange.step = step
            result, tally = self._trainer.step(step), inspector.tally
            minutes.begin_part()
            self._trainer.inject()
            for drifted, distance in self._trainer.resync(step):
                minutes.append("resync", step=step, stage=drifted, distance=distance)
            bans = inspector.end_step(step)
            exchange.end_step()
            waited = exchange.transport.take()
            tally, waited = minutes.close_step(bans, tally, waited, ledger)
            seconds = clock() - started + waited
            log.append("step", **_step_row(step, result, tally, seconds, waited))
            tick()
            empty = _exhausted(ledger)
            if empty is not None:
                log.append("exhausted", step=step, stage=empty)
                ending = "exhausted"
                break
        self._trainer.connect(None)
        traffic = self._traffic(before_run, step + 1 - train.warmup_steps)
        if traffic:
            log.append("traffic", sent=traffic)
        for (worker_stage, replica), harm in self._harms(tamperer).items():
            if harm.signals:
                log.append(
                    "tamper",
                    stage=worker_stage,
                    replica=replica,
                    signals=harm.signals,
                    size=harm.size / harm.signals,
                )
        for trigger, base in zip(triggers, before, strict=True):
            log.append("trigger", step=step, rate=self._trainer.success(*trigger), base=base)
        loss, tokens = self._trainer.evaluate()
        log.append("eval", step=step, loss=loss, tokens=tokens)
        return ending

    def _traffic(self, before: dict[str, int], steps: int) -> dict[str, int]:
        """Return the bytes per step that all processes have sent, by kind; none if one is alone."""
        sent = {kind: total - before[kind] for kind, total in self._team.traffic.items()}
        everybody = self._team.share(sent)
        return {kind: round(sum(one[kind] for one in everybody) / steps) for kind in sent}

    def _harms(self, tamperer: Tamperer) -> dict[tuple[int, int], Harm]:
        """Return what each attacker has done, wherever it is."""
        found: dict[tuple[int, int], Harm] = {}
        for told in self._team.share(tamperer.harms()):
            found |= {worker: harm for worker, harm in told.items() if harm.signals}
        return dict(sorted(found.items()))

    def state_bytes(self, cell: Cell) -> int:
        """Return the memory that the cell's defense keeps, measured at the end of the warm-up.

        The same over several processes: what a defense makes for the whole grid when it starts is
        in each of them, and counts once.
        """
        defense = self._defenses[cell.resolved_defense.label()]
        copies = 0 if redundancy(defense) is None else bytes_of_copies(self._trainer.model)
        told = [int(size) for size in self._pipeline(state_bytes(defense))]
        if len(told) > 1:
            copies -= (len(told) - 1) * state_bytes(self._start(cell.resolved_defense))
        return sum(told) + copies

    def _pipeline(self, what: Any) -> list[Any]:
        """Return what the processes of the first replica group say."""
        told = self._team.share(what)
        return told[: len(told) // self._team.column[1]]

    def cost(self, cell: Cell, tick: Tick = lambda: None) -> dict[str, int]:
        """Return what the cell's defense and aggregator cost a step (see `pipeline.cost`).

        Counted once for all cells that have them, from the end of the warm-up on. What is trained
        meanwhile is nobody's run. `tick` is called after each step.
        """
        key = f"{cell.resolved_defense.label()} + {cell.aggregator.label()}"
        if key not in self._costs:
            self._costs[key] = self._counted(cell, tick)
        return self._costs[key]

    def _counted(self, cell: Cell, tick: Tick) -> dict[str, int]:
        train, plain = self.scenario.train, self._plain()
        steps = range(train.warmup_steps, min(train.steps, train.warmup_steps + STEPS))
        meter = Meter(self._trainer.bytes_of_stages)
        whole = sum(self._team.share(plain))
        exchange = self._restored(cell)
        if exchange.idle and not exchange.weighs:
            return {"flops": 0, "step_flops": whole, "bytes": 0, "steps": 1}
        for step in steps:
            exchange.step = step
            with meter:
                self._trainer.step(step)
                self._trainer.inject()
                self._trainer.resync(step)
                exchange.inspector.end_step(step)
            exchange.end_step()
            tick()
        self._trainer.connect(None)
        extra = round(meter.flops / len(steps)) - plain
        told = self._pipeline((extra, meter.bytes))  # each replica group does it all
        return {
            "flops": max(0, sum(extra for extra, _ in told)),  # a skipped step has fewer
            "step_flops": whole,
            "bytes": round(sum(size for _, size in told) / len(steps)),
            "steps": len(steps),
        }

    def _plain(self) -> int:
        """Return the operations of a step without any defense; all steps have the same number.

        Those that are done in this process.
        """
        if self._plain_flops is None:
            assert self._snapshot is not None
            self._trainer.restore(self._snapshot)
            self._trainer.connect(None)
            self._trainer.aggregate_with(None)
            with Meter() as meter:
                self._trainer.step(self.warmup)
            self._plain_flops = meter.flops
        return self._plain_flops

    def _restored(self, cell: Cell) -> LiveExchange:
        """Go back to the end of the warm-up, and let the cell's defense watch honest workers."""
        assert self._snapshot is not None
        self._trainer.restore(self._snapshot)
        grid = self.scenario.grid
        ledger = _Lenient(ResponseParams(), grid.stages, grid.replicas)
        nobody = Tamperer((), History(), self.scenario.device, ledger.banned)
        watching = fork(self._defenses[cell.resolved_defense.label()])
        kind, parts = INSPECTORS[self.scenario.device], self.scenario.train.microbatches
        exchange = LiveExchange(nobody, kind(watching, ledger, _Nowhere(), parts))
        self._trainer.connect(exchange)
        self._aggregate(cell)
        return exchange

    def _aggregate(self, cell: Cell) -> None:
        if cell.aggregator.name == "mean":
            self._trainer.aggregate_with(None)
            return
        rule, f = registry.aggregators.create(cell.aggregator), cell.scenario.attackers_per_stage
        self._trainer.aggregate_with(partial(rule, f=f))

    def _start(self, component: Component) -> Defense[Any]:
        defense = registry.defenses.create(component)
        if not defense.passive:
            start(defense, self._setup)
        return defense


def _seed(scenario: Scenario) -> int:
    """Return the seed of what defenses draw."""
    seeds = scenario.seeds
    sequence = np.random.SeedSequence([seeds.model, seeds.data, 2])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


class _Lenient(Ledger):
    """Holds nothing against anybody."""

    lenient = True

    def judge(
        self, stage: int, flagged: Sequence[bool], severe: Sequence[bool], tested: Sequence[bool]
    ) -> Ruling:
        """Rule that nobody is flagged."""
        nobody = [False] * len(flagged)
        return super().judge(stage, nobody, nobody, tested)


class _Nowhere:
    """A log that keeps nothing."""

    def append(self, kind: str, /, **fields: Any) -> None:
        """Forget a row."""


def prepare(device: str, threads: int | None) -> int:
    """Set the threads of torch in this process (None leaves torch's choice); return their number.

    Raises:
        ConfigError: there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no GPU here; leave --device out to use the CPU")
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _first_acts(log: Log) -> OnAct:
    """Return a function that logs the first corrupted signal of each attacker."""
    seen: set[tuple[int, int]] = set()

    def on_act(step: int, stage: int, replica: int, direction: Place) -> None:
        if (stage, replica) not in seen:
            seen.add((stage, replica))
            log.append("act", step=step, stage=stage, replica=replica, direction=direction)

    return on_act


def _step_row(
    step: int, result: StepResult, tally: Tally, seconds: float, waited: float = 0.0
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "seconds": seconds,
        "checked": tally.checked,
        "flagged": tally.flagged,
        "tampered": tally.tampered,
        "excluded": result.excluded,
    }
    if result.skipped:
        row["skipped"] = True
    if waited:
        row["waited"] = waited
    return row


def _exhausted(ledger: Ledger) -> int | None:
    """Return a stage without workers, or None; lost ranks count for every stage."""
    lost = [ledger.lost(r) for r in range(ledger.replicas)]
    if all(lost):
        return min(range(ledger.stages), key=lambda s: ledger.capacity()[s])
    return next((s for s, left in enumerate(ledger.capacity()) if left == 0), None)
