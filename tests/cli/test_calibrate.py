"""Fences are proposed from runs without attack, and the proposal is tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sentinel_bench import calibrate
from sentinel_bench.calibrate import Candidate, Observation
from sentinel_bench.config import Component
from sentinel_bench.errors import ConfigError

Call = Callable[..., Any]
SENTINEL = Component(name="sentinel")
CHANNELS: Any = [
    (stage, direction, "l1") for stage in range(2) for direction in ("activation", "gradient")
]


def observation(steps: int, replicas: int = 4) -> torch.Tensor:
    """Nothing needs any lambda, in 2 stages x 2 directions x 1 statistic."""
    return torch.zeros(steps, len(CHANNELS), replicas)


def found(needed: torch.Tensor, direction: str, value: float) -> Candidate:
    seen = [Observation(0, needed, CHANNELS)]
    rows = calibrate.candidates(seen, SENTINEL, 2, needed.shape[2])
    return next(r for r in rows if r.direction == direction and r.value == value)


def test_a_lambda_lets_pass_what_needs_less_and_flags_what_needs_as_much() -> None:
    needed = observation(10)
    needed[3, 0, 1] = 0.2  # stage 0, activation, one step, one replica: 1 of 80 signals
    assert found(needed, "activation", 0.25).flags_per_1000 == 0
    assert found(needed, "activation", 0.15).flags_per_1000 == pytest.approx(1000 / 80)
    assert found(needed, "gradient", 0.05).flags_per_1000 == 0


def test_five_flags_ban_and_four_do_not() -> None:
    needed = observation(10)
    needed[:4, 2, 0] = 0.3
    assert found(needed, "activation", 0.2).false_bans == 0
    needed[:5, 2, 0] = 0.3
    assert found(needed, "activation", 0.2).false_bans == 1
    assert found(needed, "activation", 0.35).false_bans == 0


def test_more_than_half_at_once_is_an_amnesty_not_a_ban() -> None:
    needed = observation(10)
    needed[:, 0, :3] = 0.3
    assert found(needed, "activation", 0.2).false_bans == 0


def test_a_flag_upstream_shields_the_rank_downstream() -> None:
    needed = observation(10)
    needed[:5, [0, 2], 0] = 0.3  # both stages' activations of rank 0: only stage 0 is blamed
    assert found(needed, "activation", 0.2).false_bans == 1


def test_the_least_lambdas_without_ban_and_with_few_flags_are_proposed() -> None:
    def row(direction: Any, value: float, flags: float, bans: int) -> Candidate:
        return Candidate(direction, value, flags, bans)

    rows = [
        *(row("activation", 0.05, 0.5, 1), row("activation", 0.1, 0.4, 0)),
        *(row("activation", 0.15, 0.0, 0), row("gradient", 0.05, 2.0, 0)),
        row("gradient", 0.1, 1.0, 0),
    ]
    proposal = calibrate.propose(rows, Component.parse("sentinel:quarantine=true"), 1.0)
    assert proposal.params == {
        "quarantine": True,
        "lambda": {"activation": 0.1, "gradient": 0.1},
    }
    with pytest.raises(ConfigError, match=r"no lambda .* keeps honest gradients inside"):
        calibrate.propose(rows, SENTINEL, 0.5)


def test_the_command_proposes_and_tests(call: Call, tiny: Callable[..., list[str]]) -> None:
    options = tiny(train__steps=24, train__warmup_steps=12)
    done = call("calibrate", "--seeds", "5-6", *options, "--flags", "1000", "--json")
    data = json.loads(done.out)
    chosen = data["proposal"]["lambda"]
    assert {row["seed"] for row in data["tested"]} == {5, 6}
    bans = {row["false_bans"] for row in data["tested"]}
    assert done.status == (0 if bans == {0} else 1)
    for row in data["candidates"]:
        if row["lambda"] == chosen[row["direction"]]:
            assert row["false_bans"] == 0
    assert len(list(Path("runs").iterdir())) == 4  # baseline and proposal, of two seeds

    text = call("calibrate", "--seeds", "5", *options, "--flags", "1000")
    assert "<- proposed" in text.out
    assert "lambda: {activation:" in text.out


def test_a_defense_without_fences_is_refused_before_any_work(call: Call) -> None:
    done = call("calibrate", "--defense", "none")
    assert done.status == 2
    assert done.err == ("error: none has no fences to calibrate; sentinel and averaging have\n")
    assert not Path("runs").exists()
