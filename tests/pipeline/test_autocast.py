"""bf16 autocast, as on a GPU, with statistics in fp32; played on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scripted import Lab

from sentinel_bench.config import Scenario
from sentinel_bench.pipeline.train import autocast


def test_under_bf16_autocast_statistics_stay_fp32_and_liars_are_banned(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    from sentinel_bench.defenses import sentinel

    mean = sentinel._mean

    def spy(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return mean(x, where)

    monkeypatch.setattr(sentinel, "_mean", spy)
    plain, _ = lab.run("zeros", "sentinel", train__steps=20, train__warmup_steps=12)
    mixed, _ = lab.run(
        "zeros", "sentinel", train__steps=20, train__warmup_steps=12, train__precision="bf16"
    )
    assert set(seen) == {torch.float32}
    losses = [[row["loss"] for row in events.of("step")] for events in (plain, mixed)]
    assert losses[0] != losses[1]  # bf16 was at work
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert math.isfinite(mixed.of("eval")[-1]["loss"])
    assert {(b["stage"], b["replica"]) for b in mixed.of("ban")} >= {
        (a["stage"], a["replica"]) for a in mixed.of("act")
    }


@pytest.mark.parametrize("precision, bf16", [("auto", False), ("fp32", False), ("bf16", True)])
def test_on_a_cpu_only_bf16_is_bf16(
    make_scenario: Callable[..., Scenario], precision: str, bf16: bool
) -> None:
    with autocast(make_scenario(train__precision=precision)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (
            torch.bfloat16 if bf16 else torch.float32
        )
