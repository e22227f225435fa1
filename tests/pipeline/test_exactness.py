"""The pipeline computes what plain training of the same model computes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import SEEN, Events, Lab, equal, script, weights
from torch import Tensor, nn

from sentinel_bench.config import Scenario
from sentinel_bench.data.batches import Batches
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.models.build import build_model
from sentinel_bench.pipeline.stages import split
from sentinel_bench.pipeline.train import learning_rate, make_optimizer

SPLITS = [
    {"grid__stages": 4, "grid__replicas": 4},
    {"grid__stages": 4, "grid__replicas": 3},
    {"grid__stages": 3, "grid__replicas": 4, "model__layers": 5, "train__batch_size": 2},
]


def plain(scenario: Scenario, tokens: Tokens) -> tuple[list[float], dict[str, Tensor], float]:
    """Train the Hugging Face model by its own forward; return losses, weights, held-out loss."""
    train = scenario.train
    batches = Batches(
        tokens,
        batch_size=train.batch_size,
        seq_len=train.seq_len,
        replicas=scenario.grid.replicas,
        seed=scenario.seeds.data,
    )
    model = build_model(scenario, tokens.vocab_size)
    optimizer = make_optimizer(model, train)
    losses = []
    for step in range(train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step)
        inputs, targets = (torch.from_numpy(a) for a in batches.train(step))
        logits = model(input_ids=inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in batches.held_out(train.eval_sequences):
            logits = model(input_ids=torch.from_numpy(inputs)).logits
            labels = torch.from_numpy(targets).flatten()
            total += F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum").item()
            count += labels.numel()
    return losses, {n: p.detach() for n, p in model.named_parameters()}, total / count


def losses(events: Events) -> list[float]:
    return [row["loss"] for row in events.of("step")]


@pytest.mark.parametrize("grid", SPLITS)
def test_no_attack_and_no_defense_is_plain_training_to_the_bit(
    lab: Lab, tokens: Tokens, grid: dict[str, Any]
) -> None:
    events, session = lab.run("none", "none", **grid)
    expected, parameters, held_out = plain(lab.scenario(**grid), tokens)
    assert losses(events) == expected
    assert len(set(expected)) == 12
    assert equal(weights(session), parameters)
    assert events.of("eval")[0]["loss"] == pytest.approx(held_out, rel=1e-6)


@pytest.mark.parametrize("layers", [[1, 1, 1, 1], [2, 2, 1], [1, 3]])
def test_each_parameter_belongs_to_one_stage(lab: Lab, layers: list[int]) -> None:
    scenario = lab.scenario(grid__stages=len(layers), model__layers=sum(layers))
    model = build_model(scenario, 260)
    stages = split(model, layers)
    held = [p for stage in stages for p in stage.parameters()]
    assert [len(stage.layers) for stage in stages] == layers
    assert len(held) == len({id(p) for p in held})
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("grid", SPLITS)
@pytest.mark.parametrize(
    "attack, defense",
    [
        ("none", "script"),
        ("liar:what=same", "none"),
        ("liar:what=copy", "none"),
        ("liar:what=copy", "script"),
        ("liar:what=noise,since=99", "script:quarantine=true"),
    ],
)
def test_watching_alone_changes_nothing_to_the_bit(
    lab: Lab, grid: dict[str, Any], attack: str, defense: str
) -> None:
    grid = {**grid, "threat__mode": "both", "threat__fraction": 0.34}
    bare, one = lab.run("none", "none", **grid)
    watched, two = lab.run(attack, defense, **grid)
    assert (defense == "none") == (not SEEN)
    assert losses(watched) == losses(bare)
    assert equal(weights(one), weights(two))
    assert watched.of("eval") == bare.of("eval")
    assert not watched.of("act")


def test_an_attack_that_is_not_identical_changes_the_losses(lab: Lab) -> None:
    bare, _ = lab.run("none", "none")
    attacked, _ = lab.run("liar:what=noise", "none")
    assert losses(attacked)[:4] == losses(bare)[:4]
    assert losses(attacked)[4] != losses(bare)[4]
    assert {row["step"] for row in attacked.of("act")} == {4}


def test_the_evaluation_sees_no_attack_and_leaves_weights_and_random_numbers_alone(
    lab: Lab,
) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    events, session = lab.run("liar:what=zeros", script(), threat__mode="both")
    assert torch.equal(torch.get_rng_state(), before)
    trained, seen = weights(session), len(SEEN)
    loss, count = session._trainer.evaluate()
    assert equal(weights(session), trained)
    assert len(SEEN) == seen
    assert events.of("eval")[0] == {"type": "eval", "step": 11, "loss": loss, "tokens": count}
    session._trainer.connect(None)
    assert session._trainer.evaluate() == (loss, count)


def test_the_learning_rate_rises_stays_and_falls() -> None:
    train = Scenario(
        train={"steps": 100, "warmup_steps": 0, "lr": 1.0, "lr_warmup_steps": 10,
               "lr_decay_ratio": 0.5, "lr_min_ratio": 0.1}
    ).train  # fmt: skip
    rates = [learning_rate(train, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert set(rates[10:51]) == {1.0}
    assert all(a > b for a, b in pairwise(rates[50:]))
    assert rates[99] == pytest.approx(0.1 + 0.9 / 50)
    none = train.model_copy(update={"lr_warmup_steps": 0})
    assert learning_rate(none, 0) == 1.0
