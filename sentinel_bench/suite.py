"""From names and settings to cells: what is run, and in which order.

No torch here: the pipeline is imported when the first cell starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentinel_bench import registry
from sentinel_bench.config import Cell, Component, Mode, Scenario, Seeds
from sentinel_bench.errors import ConfigError
from sentinel_bench.models import pretrained
from sentinel_bench.models.presets import layers_per_stage
from sentinel_bench.placement import Placement
from sentinel_bench.record import check_writable
from sentinel_bench.runner import Finished, Job, Progress, identity, known_cells, run_group, title
from sentinel_bench.threat import place

if TYPE_CHECKING:
    from sentinel_bench.data.tokens import Tokens

__all__ = [
    "MEAN",
    "NONE",
    "Finished",
    "Plan",
    "Progress",
    "identity",
    "load_tokens",
    "make_plan",
    "run",
    "title",
]

NONE = Component(name="none")
MEAN = Component(name="mean")


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
    aggregators: Sequence[Component] = (MEAN,),
    *,
    unprotected: bool = True,
) -> Plan:
    """Return the cells of every attack against every defense, each beside its baselines.

    For each scenario: no attack and no defense; then each attack without and with the defenses,
    each of these with every aggregator. The attacks without a defense are left out if they are
    not `unprotected`.

    Raises:
        ConfigError, PluginError: names, parameters or grids that cannot be run. All are checked
            before anything starts, and all that is wrong is said at once.
    """
    checks: list[Callable[[], object]] = [partial(registry.attacks.params, a) for a in attacks]
    checks += [partial(registry.defenses.params, d) for d in defenses]
    checks += [partial(registry.aggregators.params, a) for a in aggregators]
    for scenario in scenarios:
        checks += [partial(_check_aggregator, scenario, a) for a in aggregators]
        checks += [partial(layers_per_stage, scenario), partial(pretrained.check, scenario)]
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
        protections = [(d, a) for d in defenses for a in aggregators]
        if unprotected:
            protections.insert(0, (NONE, MEAN))
        cells = {}
        for attack, (defense, aggregator) in [
            (NONE, (NONE, MEAN)),
            *((a, p) for a in attacks for p in protections),
        ]:
            cell = Cell(
                scenario=scenario,
                attack=attack,
                defense=defense,
                tuned=tuned.get(defense.name, {}),
                aggregator=aggregator,
            )
            registry.defenses.params(cell.resolved_defense)
            cells[attack.label(), cell.protection] = cell
        plan.groups.append((scenario, list(cells.values())))
    return plan


def plan_track(
    scenario: Scenario,
    modes: Sequence[Mode],
    seeds: Sequence[int],
    attacks: Sequence[Component],
    defenses: Sequence[Component],
    tuned: dict[str, dict[str, Any]],
    aggregators: Sequence[Component] = (MEAN,),
    *,
    unprotected: bool = True,
) -> Plan:
    """Return the cells of a track: each attack in each mode, without and with each defense.

    Attacks on weights have no mode, and are run once.

    Args:
        scenario: of the track.
        modes: activation, gradient, both.
        seeds: each for model, data and threat alike.
        attacks, defenses, tuned, aggregators, unprotected: see `make_plan`.

    Raises:
        ConfigError, PluginError: as `make_plan` does.
    """
    plan = Plan()
    moded = [a for a in attacks if a == NONE or registry.attacks.get(a.name).axis != "weights"]
    for number, mode in enumerate(modes):
        threat = scenario.threat.model_copy(update={"mode": mode})
        scenarios = with_seeds(scenario.model_copy(update={"threat": threat}), seeds)
        chosen = moded if number else attacks
        plan.groups += make_plan(
            scenarios, chosen, defenses, tuned, aggregators, unprotected=unprotected
        ).groups
    return share_warmups(plan)


def share_warmups(plan: Plan) -> Plan:
    """Put the cells together that can fork from one warm-up; each is there once.

    Scenarios that differ in who attacks alone (mode, schedule, threat seed) share it, and the runs
    without attack.
    """
    groups: dict[str, tuple[Scenario, dict[Any, Cell]]] = {}
    for scenario, cells in plan.groups:
        _, known = groups.setdefault(scenario.honest.model_dump_json(), (scenario, {}))
        for cell in cells:
            threat = "" if cell.attack.name == "none" else cell.scenario.model_dump_json()
            known.setdefault((cell.attack.label(), cell.protection, threat), cell)
    return Plan([(scenario, list(known.values())) for scenario, known in groups.values()])


def _check_aggregator(scenario: Scenario, aggregator: Component) -> None:
    """Refuse an aggregator that needs more replicas than there are.

    Raises:
        ConfigError: the violated condition.
    """
    rule = registry.aggregators.create(aggregator)
    rule.check(scenario.grid.replicas, scenario.attackers_per_stage)


def with_seeds(scenario: Scenario, seeds: Sequence[int]) -> list[Scenario]:
    """Return the scenario once for each seed, used for model, data and threat alike."""
    return [scenario.model_copy(update={"seeds": Seeds(model=s, data=s, threat=s)}) for s in seeds]


def run(
    plan: Plan,
    out: Path,
    progress: Progress,
    *,
    commands: Sequence[str] = (),
    resume: bool = False,
    threads: int | None = None,
    placement: Placement | None = None,
    trace: bool = False,
) -> list[Finished]:
    """Run all cells of a plan, group by group, and return them in order.

    A cell that fails is recorded as `invalid`, and the others go on.

    Args:
        plan: the cells.
        out: folder of the run folders.
        progress: is told what happens.
        commands: what the user typed, for the record.
        resume: take finished cells with an equal digest from `out` instead of running them.
        threads: threads of torch in each process.
        placement: in which processes stages and replicas are; None: all in this one. In a process
            of torchrun that is not the first nothing is returned: it works for that one.
        trace: also record the statistics of all tested workers, for the report of a run.

    Raises:
        ConfigError: the folder, the data or the placement cannot be used; nothing was run.
        KeyboardInterrupt: after the running cell was recorded as interrupted.
    """
    from sentinel_bench.pipeline.session import prepare

    placement = placement or Placement()
    check_placement(plan, placement)
    if trace:
        _check_trace(plan, placement)
    first = plan.groups[0][0]
    if placement.follows:
        from sentinel_bench.pipeline.remote import follow

        follow(placement, first)
        return []
    check_writable(out)
    threads = prepare(first.device, threads or (1 if placement.several else None))
    tokens = load_tokens(first, progress)
    known = known_cells(out) if resume else {}
    execution = {"threads": threads, "placement": placement.record()}
    with opener(placement, first, tokens, threads) as opened:
        job = Job(tokens, out, progress, tuple(commands), execution, known, opened, trace)
        return [done for s, cells in plan.groups for done in run_group(job, s, cells)]


def check_placement(plan: Plan, placement: Placement) -> None:
    """Refuse, before anything starts, what cannot be placed like that.

    Raises:
        ConfigError: all that is wrong.
    """
    problems: dict[str, None] = {}
    for scenario, cells in plan.groups:
        for check in [partial(placement.check, scenario)] + [
            partial(placement.check_cell, cell) for cell in cells
        ]:
            try:
                check()
            except ConfigError as error:
                problems[str(error)] = None
    if problems:
        raise ConfigError("; ".join(problems))


def _check_trace(plan: Plan, placement: Placement) -> None:
    """Refuse a trace where there is no row for each boundary of a step in one place.

    Raises:
        ConfigError: what stands against it.
    """
    parts = max(scenario.train.microbatches for scenario, _ in plan.groups)
    if placement.several or parts > 1:
        raise ConfigError(
            "--trace records one process with one microbatch; leave --trace out, or --processes, "
            "--replica-groups and --microbatches"
        )


@contextmanager
def opener(
    placement: Placement, scenario: Scenario, tokens: Tokens, threads: int
) -> Iterator[Callable[[Scenario, Sequence[Cell]], Any]]:
    """Return what begins a session; end the processes that it has started."""
    if not placement.several:
        from sentinel_bench.pipeline.session import Session

        yield partial(Session, tokens=tokens)
        return
    from sentinel_bench.pipeline.remote import Crewed

    crewed = Crewed(placement, scenario, tokens.digest, threads)
    try:
        yield crewed
    finally:
        crewed.close()


def seconds_per_step(scenario: Scenario, tokens: Tokens) -> float:
    """Measure a few training steps without attack and defense in this process."""
    from sentinel_bench.pipeline.session import Session, prepare

    prepare(scenario.device, 1)
    few = {"warmup_steps": 4, "steps": 5}
    short = scenario.model_copy(update={"train": scenario.train.model_copy(update=few)})
    cell = Cell(scenario=short, attack=NONE, defense=NONE)
    ends: list[float] = []
    Session(short, [cell], tokens).warm_up(lambda: ends.append(time.perf_counter()))
    return min(later - one for one, later in pairwise(ends))


def load_tokens(scenario: Scenario, progress: Progress) -> Tokens:
    """Return the corpus of a scenario.

    Raises:
        ConfigError: it cannot be read, is shorter than one sequence, or does not fit the
            pretrained weights, or these are not there.
    """
    from sentinel_bench.data import tokens
    from sentinel_bench.data.batches import Batches

    pretrained.check_files(scenario)  # before the corpus is streamed
    corpus = tokens.load_tokens(scenario.data, progress.say)
    pretrained.check_files(scenario, corpus.vocab_size)
    Batches.of(corpus, scenario)  # refuses a corpus that is too short
    return corpus
