"""Cells that share a warm-up are the runs they would be alone; seeds change what they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted import Events, Lab, Seen, clear, equal, script, weights

from sentinel_bench import threat
from sentinel_bench.config import Component, Scenario
from sentinel_bench.data.batches import Batches
from sentinel_bench.data.tokens import Tokens
from sentinel_bench.errors import ConfigError
from sentinel_bench.models.build import build_model, model_config
from sentinel_bench.models.presets import layers_per_stage

BOTH = {"threat__mode": "both"}
CELLS: list[tuple[str, str | Component]] = [
    ("none", "none"),
    ("liar:what=spoil history,depth=3", "none"),
    ("liar:what=oldest,depth=2", "script"),
    ("liar:what=oldest,depth=4", script((5, 1, "activation", 0), quarantine=True)),
    ("liar:what=noise", script((5, 2, "gradient", 1), severe=True, on_ban="drop")),
    ("delay:steps=2", "sentinel"),
    ("scaling", "averaging"),
    ("none", "sentinel"),
]


@pytest.mark.parametrize("warmup", [0, 6])
def test_a_cell_in_a_group_is_the_cell_run_alone_bit_for_bit(lab: Lab, warmup: int) -> None:
    grid = {**BOTH, "train__warmup_steps": warmup}
    cells = [lab.cell(attack, defense, **grid) for attack, defense in CELLS]
    group = lab.session(cells)
    for cell in [*cells, *reversed(cells)]:  # each after all others
        shared, alone = Events(), Events()
        group.run(cell, shared)
        trained = weights(group)
        session = lab.session([cell])
        session.run(cell, alone)
        assert shared.timeless() == alone.timeless(), cell.label
        assert equal(trained, weights(session))


def test_cells_of_other_modes_and_schedules_share_a_warm_up_bit_for_bit(lab: Lab) -> None:
    """A suite forks all cells of a track and seed from one warm-up."""
    threats: list[dict[str, Any]] = [
        {"threat__mode": "activation"},
        {"threat__mode": "gradient"},
        {"threat__mode": "both", "threat__schedule": "at-once", "threat__fraction": 0.3},
        {"threat__mode": "gradient", "seeds__threat": 5},
    ]
    pairs = [("delay:steps=3", "none"), ("mean-replay", "averaging"), ("update-sign-flip", "none")]
    cells = [lab.cell(attack, defense, **t) for t in threats for attack, defense in pairs]
    group = lab.session(cells)
    seen = []
    for cell in cells:
        shared, alone = Events(), Events()
        group.run(cell, shared)
        trained = weights(group)
        session = lab.session([cell])
        session.run(cell, alone)
        assert shared.timeless() == alone.timeless(), (cell.label, cell.scenario.threat)
        assert equal(trained, weights(session))
        seen.append(shared.timeless())
    assert seen[0] != seen[3] != seen[9]  # the modes and seeds are not the same run


def test_a_delay_sends_what_the_worker_sent_in_the_warm_up(lab: Lab) -> None:
    from scripted import SEEN

    clear()
    events, _ = lab.run("delay:steps=3", "script", threat__honest_last=2)
    act = events.of("act")[0]
    sent: dict[int, Seen] = {s.step: s for s in SEEN if (s.stage, s.direction) == (1, "activation")}
    assert act["step"] == 4
    for step in (4, 5, 6):
        assert torch.equal(
            sent[step].sent[act["replica"]], sent[step - 3].sent[act["replica"]]
        ) == (step - 3 < 4)


def test_the_same_seeds_give_the_same_run(lab: Lab) -> None:
    one, a = lab.run("liar:what=noise", "sentinel", **BOTH)
    two, b = lab.run("liar:what=noise", "sentinel", **BOTH)
    assert one.timeless() == two.timeless()
    assert equal(weights(a), weights(b))


def drawn(scenario: Scenario, tokens: Tokens) -> dict[str, Any]:
    """All that is drawn at random, as comparable values."""
    train = scenario.train
    batches = Batches(
        tokens,
        batch_size=train.batch_size,
        seq_len=train.seq_len,
        replicas=4,
        seed=scenario.seeds.data,
    )
    model = build_model(scenario, tokens.vocab_size)
    return {
        "model": [p.flatten()[:50].tolist() for p in model.parameters()],
        "data": [batches.train(step)[0].tolist() for step in range(3)],
        "held out": [x.tolist() for x, _ in batches.held_out(8)],
        "threat": threat.place(scenario, Component(name="zeros")),
    }


@pytest.mark.parametrize("seed", ["model", "data", "threat"])
def test_a_seed_changes_what_it_names_and_nothing_else(
    make_scenario: Callable[..., Scenario], tokens: Tokens, seed: str
) -> None:
    before = drawn(make_scenario(threat__fraction=0.25), tokens)
    after = drawn(make_scenario(threat__fraction=0.25, **{f"seeds__{seed}": 3}), tokens)
    assert [key for key in before if before[key] != after[key]] == [seed]


def test_a_seed_reaches_the_run(lab: Lab) -> None:
    runs = {}
    for seed in ("none", "model", "data", "threat"):
        changes = {} if seed == "none" else {f"seeds__{seed}": 1}
        events, _ = lab.run("liar:what=noise", "none", **changes)
        runs[seed] = [row["loss"] for row in events.of("step")]
    warm = {seed: losses[:4] for seed, losses in runs.items()}
    assert warm["threat"] == warm["none"]
    assert warm["model"] != warm["none"] != warm["data"]
    assert runs["threat"] != runs["none"]


def test_the_model_does_not_depend_on_the_random_numbers_drawn_before(
    make_scenario: Callable[..., Scenario],
) -> None:
    torch.manual_seed(1)
    one = build_model(make_scenario(), 260)
    torch.rand(5)
    state = torch.get_rng_state()
    two = build_model(make_scenario(), 260)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_the_published_model_has_the_published_number_of_parameters() -> None:
    from transformers import LlamaForCausalLM

    scenario = Scenario(model={"preset": "llama-3-0.6b"}, grid={"stages": 16})
    with torch.device("meta"):
        model = LlamaForCausalLM(model_config(scenario, 128_256))
    assert sum(p.numel() for p in model.parameters()) == 574_391_296
    assert layers_per_stage(scenario) == [1] * 16


@pytest.mark.parametrize(
    "stages, layers, expected",
    [(4, 4, [1, 1, 1, 1]), (3, 5, [2, 2, 1]), (4, 10, [3, 3, 2, 2]), (2, None, [1, 1])],
)
def test_layers_are_spread_evenly(stages: int, layers: int | None, expected: list[int]) -> None:
    scenario = Scenario(model={"layers": layers}, grid={"stages": stages})
    assert layers_per_stage(scenario) == expected


@pytest.mark.parametrize(
    "model, message",
    [
        ({"preset": "lama-tiny"}, "did you mean llama-tiny"),
        ({"preset": "llama-3-0.6b"}, "more than the 16 layers"),
        ({"layers": 3}, "more than the 3 layers"),
        ({"hidden_size": 20}, "even multiple of heads"),
        ({"heads": 3}, "even multiple of heads"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_per_stage(Scenario(model=model, grid={"stages": 17}))


@pytest.mark.parametrize(
    "init, embedding, linear", [("scaled", 1, 0.08), ("huggingface", 0.02, 0.02)]
)
def test_embeddings_are_not_tied_and_first_weights_have_the_scale_of_their_setting(
    make_scenario: Callable[..., Scenario], init: str, embedding: float, linear: float
) -> None:
    model = build_model(make_scenario(model__hidden_size=64, model__init=init), 260)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(embedding, rel=0.05)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.std().item() == pytest.approx(linear, rel=0.1)
