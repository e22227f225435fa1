"""What the benchmarks have in common: functions that train one step, and settings as options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from sentinel_bench import registry, tracks
from sentinel_bench.api import Setup
from sentinel_bench.config import Component, Scenario, merge, parse_value, set_dotted
from sentinel_bench.data.batches import Batches
from sentinel_bench.errors import ConfigError
from sentinel_bench.ledger import Ledger
from sentinel_bench.models.build import build_model
from sentinel_bench.pipeline.exchange import LiveExchange, WarmupExchange
from sentinel_bench.pipeline.minutes import Minutes
from sentinel_bench.pipeline.session import INSPECTORS
from sentinel_bench.pipeline.tamper import History, Tamperer
from sentinel_bench.pipeline.team import Team
from sentinel_bench.pipeline.train import Trainer, autocast, learning_rate, make_optimizer
from sentinel_bench.threat import Attacker

Step = Callable[[int], float]
"""Trains the step of that number; returns its loss."""


class Counter:
    """A log that counts: a flagged rank costs more, so flags belong to the measurement."""

    def __init__(self) -> None:
        self.flags = 0

    def append(self, kind: str, /, **fields: object) -> None:
        """Count a row."""
        self.flags += kind == "flag"


def plain(scenario: Scenario, batches: Batches, vocabulary: int) -> Step:
    """Return a function that trains one step of the whole model, without any pipeline."""
    model = build_model(scenario, vocabulary)
    optimizer = make_optimizer(model, scenario.train)

    def step(t: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(scenario.train, t)
        inputs, targets = (
            torch.from_numpy(a).to(scenario.device, non_blocking=True) for a in batches.train(t)
        )
        with autocast(scenario):
            logits = model(input_ids=inputs).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), scenario.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def piped(
    scenario: Scenario,
    batches: Batches,
    vocabulary: int,
    name: str,
    log: Counter,
    attackers: tuple[Attacker, ...] = (),
    team: Team | None = None,
) -> Step:
    """Return a function that trains one step of the pipeline, attacked, under a defense.

    It has seen the warm-up. With a `team`, in all of its processes.
    """
    trainer = Trainer(scenario, batches, vocabulary, team)
    given = Component.parse(name)
    params = tracks.tuned("core", Component(name=given.name)) | given.params
    defense = registry.defenses.create(Component(name=given.name, params=params))
    grid, train = scenario.grid, scenario.train
    if not defense.passive:
        parts = train.microbatches
        defense.start(
            Setup(grid.stages, grid.replicas, trainer.signal_shape, scenario.device, 0, parts)
        )
        warm = WarmupExchange([defense], History())
        trainer.connect(warm)
        for t in range(train.warmup_steps):
            warm.step = t
            trainer.step(t)
            trainer.inject()
            warm.end_step()
    ledger = Ledger(defense.params, grid.stages, grid.replicas)
    looks = not defense.passive or defense.needs_updates
    minutes = Minutes(log, trainer.team, silent=not (attackers or looks))
    inspector = INSPECTORS[scenario.device](defense, ledger, minutes, train.microbatches)
    tamperer = Tamperer(attackers, History(), scenario.device, ledger.banned)
    exchange = LiveExchange(tamperer, inspector)
    trainer.connect(exchange)

    def step(t: int) -> float:
        exchange.step = t
        result, tally = trainer.step(t), inspector.tally
        trainer.inject()
        trainer.resync(t)
        bans = inspector.end_step(t)
        exchange.end_step()
        minutes.close_step(bans, tally, exchange.transport.take(), ledger)
        return result.loss

    return step


def changed(changes: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return `changes` to a scenario with KEY=VALUE options laid on them.

    Raises:
        ConfigError: an option is none.
    """
    for setting in settings:
        key, _, value = setting.partition("=")
        tree: dict[str, Any] = {}
        set_dotted(tree, key, parse_value(value, f"--set {setting}"))
        changes = merge(changes, tree)
    return changes


def writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the work that it is for.

    Raises:
        ConfigError: with the reason.
    """
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error.strerror}") from None


def positive(text: str) -> int:
    """Read a number from 1 on, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number
