"""Finds fences that leave the honest alone: no-attack runs, measured, then a proposal, then a test.

Per seed a run without attack is watched by the defense in warm-up mode throughout, so that no flag
changes anything. For every deviation outside of `k * IQR` the least `lambda` is noted that would
have let it pass. The ledger is then replayed for a grid of lambdas: how many workers would have
been banned, had the fence been `max(k * IQR, lambda * abs(median))`? The least lambda of each
direction without a ban, and with few flags, is proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Direction, Setup
from sentinel_bench.config import Component, Scenario, merge
from sentinel_bench.data.batches import Batches
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.defenses.sentinel import DIRECTIONS, Sentinel
from sentinel_bench.errors import ConfigError
from sentinel_bench.ledger import Ledger
from sentinel_bench.pipeline.exchange import WarmupExchange
from sentinel_bench.pipeline.tamper import History
from sentinel_bench.pipeline.train import Trainer
from sentinel_bench.suite import Progress

GRID = tuple(round(0.05 * i, 2) for i in range(1, 41))
"""Candidates for lambda."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One no-attack run.

    Attributes:
        needed: `[steps, channels, replicas]`, the least lambda that lets a deviation pass; 0 if it
            lies within `k * IQR`, NaN if there was no signal. Steps after warm-up.
        channels: (stage, direction, statistic) of each channel.
    """

    seed: int
    needed: Tensor
    channels: list[tuple[int, Direction, str]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one lambda would have done in one direction, over all seeds."""

    direction: Direction
    value: float
    flags_per_1000: float
    false_bans: int


def fenced(component: Component) -> Sentinel:
    """Return a new defense with fences.

    Raises:
        ConfigError: the defense has none.
    """
    defense = registry.defenses.create(component)
    if not isinstance(defense, Sentinel):
        raise ConfigError(
            f"{component.name} has no fences to calibrate; sentinel and averaging have"
        )
    return defense


def observe(
    scenario: Scenario, component: Component, tokens: Tokens, progress: Progress
) -> Observation:
    """Run one seed without attack and note how wide the fences would have to be.

    Raises:
        ConfigError: the defense has no fences to calibrate.
    """
    defense = fenced(component)
    train, grid = scenario.train, scenario.grid
    trainer = Trainer(scenario, Batches.of(tokens, scenario), tokens.vocab_size)
    defense.start(Setup(grid.stages, grid.replicas, trainer.signal_shape, scenario.device))
    exchange = WarmupExchange([defense], History())
    trainer.connect(exchange)
    progress.start(f"seed {scenario.seeds.model}: no attack", train.steps)
    needed = []
    for step in range(train.steps):
        exchange.step = step
        trainer.step(step)
        if step >= train.warmup_steps:
            needed.append(defense.needed_lambda().cpu())
        exchange.end_step()
        progress.advance()
    progress.finish()
    return Observation(
        scenario.seeds.model, torch.stack(needed), defense.channel_names(grid.stages)
    )


def candidates(
    observations: Sequence[Observation], component: Component, stages: int, replicas: int
) -> list[Candidate]:
    """Return what each lambda of the grid would have done in each direction."""
    rows = []
    for direction in DIRECTIONS:
        for value in GRID:
            flags, signals, bans = 0, 0, 0
            for o in observations:
                flagged, seen = _flags(o, direction, value, stages)
                flags += int(flagged.sum())
                signals += int(seen.sum())
                bans += _replay(component, direction, flagged, seen)
            rows.append(Candidate(direction, value, 1000 * flags / max(1, signals), bans))
    return rows


def propose(rows: Sequence[Candidate], component: Component, flags_per_1000: float) -> Component:
    """Return the defense with the least lambdas that ban nobody and flag no more than asked.

    Raises:
        ConfigError: no lambda of the grid does.
    """
    chosen = {}
    for direction in DIRECTIONS:
        fitting = [
            r.value
            for r in rows
            if r.direction == direction and r.false_bans == 0 and r.flags_per_1000 <= flags_per_1000
        ]
        if not fitting:
            raise ConfigError(
                f"no lambda up to {GRID[-1]} keeps honest {direction}s inside: the model moves too "
                "fast; train longer before verification (--warmup) or lower --lr"
            )
        chosen[direction] = min(fitting)
    return Component(name=component.name, params=merge(component.params, {"lambda": chosen}))


def _flags(
    observation: Observation, direction: Direction, value: float, stages: int
) -> tuple[Tensor, Tensor]:
    """Return `[steps, stages, replicas]`: flagged, and tested at all."""
    flagged, seen = [], []
    for stage in range(stages):
        mine = [
            i for i, c in enumerate(observation.channels) if c[0] == stage and c[1] == direction
        ]
        needed = observation.needed[:, mine]
        flagged.append((needed >= value).any(1))
        seen.append((~needed.isnan()).any(1))
    return torch.stack(flagged, 1), torch.stack(seen, 1)


def _replay(component: Component, direction: Direction, flagged: Tensor, seen: Tensor) -> int:
    """Return how many workers the ledger would have banned for the flags of one direction."""
    policy = registry.defenses.create(component).params
    _, stages, replicas = flagged.shape
    ledger = Ledger(policy, stages, replicas)
    for now, there in zip(flagged.tolist(), seen.tolist(), strict=True):
        tainted = [False] * replicas
        order = range(stages) if direction == "activation" else reversed(range(stages))
        for stage in order:
            tested = [
                t and not bad and not ledger.banned(stage, r)
                for r, (t, bad) in enumerate(zip(there[stage], tainted, strict=True))
            ]
            ruling = ledger.judge(stage, now[stage], [False] * replicas, tested)
            tainted = [a or b for a, b in zip(tainted, ruling.flagged, strict=True)]
        ledger.end_step()
    return stages * replicas - sum(ledger.capacity())
