"""Ground truth: who attacks, from when, with what. Drawn from the threat seed before the run.

Nothing here knows the defense, and no defense can reach it: the pipeline's tampering side holds it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from sentinel_bench import registry
from sentinel_bench.api import tier
from sentinel_bench.config import Component, Mode, Scenario, Verifiers
from sentinel_bench.errors import ConfigError, PluginError


@dataclass(frozen=True, slots=True)
class Attacker:
    """One malicious worker.

    Attributes:
        mode: in which direction it acts; "update" for an attack on weights.
        rate: share of the steps, from `start` on, in which it acts.
        poison_self, verifiers: see `ThreatConfig`.
    """

    stage: int
    replica: int
    start: int
    attack: Component
    mode: Mode | Literal["update"]
    seed: int
    rate: float = 1.0
    poison_self: bool = False
    verifiers: Verifiers = "cover"

    def record(self) -> dict[str, Any]:
        """Return the row of the ground truth for the record."""
        row = asdict(self)
        row["attack"], row["params"] = self.attack.name, self.attack.params
        attack = registry.attacks.create(self.attack)
        try:
            row["knowledge"] = tier(attack.needs())
        except Exception as error:  # a plugin may raise anything
            raise PluginError(
                f"attack {attack.name}: needs raised {type(error).__name__}: {error}",
                party="attack",
            ) from error
        return row


def place(scenario: Scenario, attack: Component) -> tuple[Attacker, ...]:
    """Draw the attackers of a cell from the threat seed: workers, their starts, what each does.

    The same seed gives the same workers and starts for every attack and every defense.

    Raises:
        ConfigError: the grid has no room for the threat.
    """
    if attack.name == "none":
        return ()
    scenario.check_threat()
    threat = scenario.threat
    rng = np.random.default_rng([scenario.seeds.threat, 0])
    workers = [
        (stage, int(replica))
        for stage in scenario.open_stages
        for replica in rng.permutation(scenario.grid.replicas)[
            : max(1, scenario.attackers_per_stage)
        ]
    ]
    workers = [workers[i] for i in rng.permutation(len(workers))]
    if threat.schedule == "single":
        workers = workers[:1]
    starts = _starts(scenario, len(workers), rng)
    dealer = np.random.default_rng([scenario.seeds.threat, 2])
    attackers = []
    for (stage, replica), start in sorted(zip(workers, starts, strict=True)):
        component, mode = _deal(scenario, attack, stage, dealer)
        on_weights = registry.attacks.get(component.name).axis == "weights"
        attackers.append(
            Attacker(
                stage=stage,
                replica=replica,
                start=start,
                attack=component,
                mode="update" if on_weights else mode,
                seed=_seed(scenario, stage, None if threat.collude else replica),
                rate=threat.rate if threat.schedule == "rate" else 1.0,
                poison_self=threat.poison_self,
                verifiers=threat.verifiers,
            )
        )
    return tuple(attackers)


def _deal(
    scenario: Scenario, attack: Component, stage: int, rng: np.random.Generator
) -> tuple[Component, Mode]:
    """Return what an attacker at `stage` does.

    Raises:
        PluginError: the attack deals what cannot be.
        ConfigError: unknown names or parameters, or a mode in which the stage sends nothing.
    """
    registry.attacks.params(attack)
    plugin = registry.attacks.get(attack.name)
    try:
        component, mode = plugin.deal(attack, scenario.threat.mode, rng)
        if not isinstance(component, Component) or mode not in get_args(Mode):
            raise ValueError(f"{(component, mode)!r} is no attack and mode")
        registry.attacks.params(component)
    except Exception as error:  # a plugin may raise anything
        raise PluginError(
            f"attack {attack.name}: deal failed with {type(error).__name__}: {error}",
            party="attack",
        ) from error
    silent = {"gradient": 0, "activation": scenario.grid.stages - 1}.get(mode)
    if stage == silent and registry.attacks.get(component.name).axis == "signals":
        raise ConfigError(
            f"attack {attack.name}: an attacker at stage {stage} was dealt {mode}s, and that stage "
            "sends none: keep it honest (threat.honest_first, threat.honest_last)"
        )
    return component, mode


def _starts(scenario: Scenario, n: int, rng: np.random.Generator) -> list[int]:
    """Return the first step of each of `n` attackers."""
    threat, first = scenario.threat, scenario.attack_start
    if threat.schedule == "waves":
        groups = np.array_split(np.arange(n), threat.waves)
        return [first + wave * threat.gap for wave, group in enumerate(groups) for _ in group]
    if threat.schedule == "random-start":
        left = scenario.train.steps - first
        span = min(left, threat.span or max(1, left // 2))
        return [first + int(s) for s in rng.integers(span, size=n)]
    return [first] * n


def _seed(scenario: Scenario, stage: int, replica: int | None) -> int:
    """Return the seed of a worker's random numbers; without a replica, of a stage's colluders."""
    place = [stage] if replica is None else [stage, replica]
    sequence = np.random.SeedSequence([scenario.seeds.threat, 1, *place])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
