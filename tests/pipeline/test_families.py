"""Every architecture: cut, recomputed and checked, it is the model that transformers runs whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import Lab, assert_close
from torch import Tensor, nn
from transformers import PreTrainedModel

from sentinel_bench.config import Scenario
from sentinel_bench.models import presets
from sentinel_bench.models.build import build_model, model_config
from sentinel_bench.models.families import FAMILIES
from sentinel_bench.models.presets import layers_per_stage
from sentinel_bench.pipeline.claims import Work, claims_of, cover, verify
from sentinel_bench.pipeline.cost import Meter
from sentinel_bench.pipeline.loss import rank_loss
from sentinel_bench.pipeline.stages import Stage, split
from sentinel_bench.pipeline.train import autocast
from sentinel_bench.pipeline.weights import StageWork

VOCABULARY, REPLICAS, BATCH, TOKENS = 50, 3, 2, 8
PRENORM = "opt-prenorm-tiny"
PRESETS = [
    "llama-tiny", "gpt2-tiny", "opt-tiny", PRENORM, "bloom-tiny", "deepseek-tiny", "llama4-tiny"
]  # fmt: skip
every_preset = pytest.mark.parametrize("preset", PRESETS)


@pytest.fixture(autouse=True)
def _prenorm(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT as all but its 350M model have it."""
    shape = presets.PRESETS["opt-tiny"].model_copy(update={"extra": {}})
    monkeypatch.setitem(presets.PRESETS, PRENORM, shape)


def scenario_of(preset: str, stages: int = 2, layers: int = 4, **model: Any) -> Scenario:
    return Scenario(
        model={"preset": preset, "layers": layers, **model},
        grid={"stages": stages, "replicas": REPLICAS},
        train={"seq_len": TOKENS, "batch_size": BATCH},
    )


def stages_of(preset: str, stages: int = 2) -> tuple[PreTrainedModel, list[Stage]]:
    scenario = scenario_of(preset, stages)
    model = build_model(scenario, VOCABULARY)
    return model, split(model, layers_per_stage(scenario))


def ids_of(seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (REPLICAS * BATCH, TOKENS), generator=draw)


def through(stages: list[Stage], h: Tensor) -> Tensor:
    for stage in stages:
        h = stage(h)
    return h


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("stages", [2, 4])
@every_preset
def test_a_cut_model_computes_what_transformers_computes(preset: str, stages: int) -> None:
    model, cut = stages_of(preset, stages)
    config = model_config(scenario_of(preset, stages), VOCABULARY)
    config.tie_word_embeddings = False
    config._experts_implementation = "eager"  # the plain loop over experts
    whole = FAMILIES[config.model_type].model(config)
    whole.load_state_dict(model.state_dict())
    ids = ids_of()
    expected, got = whole(input_ids=ids).logits, through(cut, ids)
    assert_close(got, expected)
    theirs = torch.autograd.grad(loss_of(expected, ids), list(whole.parameters()))
    ours = torch.autograd.grad(loss_of(got, ids), list(model.parameters()))
    for (name, _), a, b in zip(model.named_parameters(), ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-6 * max(1e-3, float(b.norm())), name
    assert {id(p) for s in cut for p in s.parameters()} == {id(p) for p in model.parameters()}


def test_a_llama_is_cut_as_it_was_before_there_were_families() -> None:
    model, cut = stages_of("llama-tiny", 4)
    inner: Any = model.model
    ids = ids_of()
    h = inner.embed_tokens(ids)
    with torch.no_grad():
        positions = inner.rotary_emb(h, position_ids=torch.arange(TOKENS)[None])
    for layer in inner.layers:
        h = layer(h, attention_mask=None, position_embeddings=positions)
    h = model.lm_head(inner.norm(h))
    got = through(cut, ids)
    assert torch.equal(got, h)
    before, after = (
        torch.autograd.grad(loss_of(x, ids), list(model.parameters())) for x in (h, got)
    )
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@every_preset
def test_a_stage_that_is_done_again_gives_the_same_to_the_bit(preset: str) -> None:
    _, cut = stages_of(preset)
    assert all(stage.training for stage in cut)
    assert torch.equal(through(cut, ids_of()), through(cut, ids_of()))


@pytest.mark.parametrize("preset", ["gpt2-tiny", "opt-tiny", "bloom-tiny"])
def test_a_head_that_was_tied_starts_as_a_copy_and_is_trained_apart(preset: str) -> None:
    model = build_model(scenario_of(preset, init="huggingface"), VOCABULARY)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert torch.equal(embedding.weight, head.weight)
    assert embedding.weight.data_ptr() != head.weight.data_ptr()
    scaled = build_model(scenario_of(preset), VOCABULARY)
    assert scaled.get_input_embeddings().weight.std().item() == pytest.approx(1, rel=0.1)
    assert scaled.get_output_embeddings().weight.std().item() == pytest.approx(0.08, rel=0.15)


@every_preset
def test_the_weight_gradients_of_a_replica_are_those_of_its_own_loss(preset: str) -> None:
    model, cut = stages_of(preset)
    ids = ids_of()
    sent = cut[0](ids).detach().requires_grad_()
    loss = rank_loss(cut[1](sent), ids, [False] * REPLICAS)
    (passed,) = torch.autograd.grad(loss, sent)
    precision = autocast(scenario_of(preset))
    for stage, fed, given in ((0, ids, passed), (1, sent.detach(), None)):
        work = StageWork(cut[stage:], fed, given, ids, REPLICAS, precision, VOCABULARY)
        for replica in range(REPLICAS):
            own = ids[replica * BATCH : (replica + 1) * BATCH]
            whole = loss_of(model(input_ids=own).logits, own)
            expected = torch.autograd.grad(whole, list(cut[stage].parameters()))
            got = work.gradient(replica)
            both = got, torch.cat([g.flatten() for g in expected])
            assert (both[0] - both[1]).norm() <= 5e-6 * both[1].norm()


def work_of(preset: str, direction: str) -> Work:
    """The work of the middle one of three stages."""
    scenario = scenario_of(preset, 3, 5)
    model = build_model(scenario, VOCABULARY)
    stage = split(model, layers_per_stage(scenario))[1]
    draw = torch.Generator().manual_seed(1)
    fed, given = (torch.randn(REPLICAS * BATCH, TOKENS, 64, generator=draw) for _ in range(2))
    backward = direction == "gradient"
    seed = (lambda out: (out, given)) if backward else None
    return Work(stage, fed.requires_grad_(backward), REPLICAS, lambda: autocast(scenario), seed)


def size(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1)


@pytest.mark.parametrize("direction", ["activation", "gradient"])
@every_preset
def test_claims_of_linear_layers_hold_for_the_honest_alone(preset: str, direction: str) -> None:
    work = work_of(preset, direction)
    claims, honest = claims_of(work)
    assert len(claims.outputs) >= 4 * len(work.stage.layers)
    checked = verify(work, claims, 4, seed=0)
    assert checked.error.max() < 1e-5
    assert (size(checked.result - honest) < 1e-5 * size(honest)).all()

    sent = honest.clone()
    sent[1] = honest[1].roll(1, dims=1)  # of another token, so that norms could have made it
    cover(work, claims, sent, honest)
    lied = verify(work, claims, 4, seed=0)
    assert lied.error[1] > 1e-2
    assert lied.error[[0, 2]].max() < 1e-5
    left = (lied.result - sent)[1]
    if direction == "gradient" and work.stage.front is not None:
        # the norm lets nothing through along its input, a layer norm neither along ones: that part
        # of the lie is left without a story
        x = work.fed.detach().view_as(honest)[1]
        if isinstance(work.stage.front, nn.LayerNorm):
            x, left = (t - t.mean(-1, keepdim=True) for t in (x, left))
        x = x / x.norm(dim=-1, keepdim=True)
        left = left - x * (x * left).sum(-1, keepdim=True)
    assert left.norm() < 1e-4 * (sent - honest)[1].norm()


@every_preset
def test_duplicated_work_bans_the_liar_alone(lab: Lab, preset: str) -> None:
    sizes = {"model__hidden_size": 64, "model__intermediate_size": None}
    grid = {"model__preset": preset, "threat__mode": "both", **sizes}
    events, _ = lab.run("zeros", "duplicate-work", **grid)
    attackers = {(row["stage"], row["replica"]) for row in events.of("act")}
    assert {(row["stage"], row["replica"]) for row in events.of("ban")} == attackers != set()


def test_products_of_experts_are_counted_forward_and_backward() -> None:
    a, b = torch.randn(10, 16, requires_grad=True), torch.randn(3, 16, 32, requires_grad=True)
    ends = torch.tensor([2, 7, 10], dtype=torch.int32)
    with Meter() as meter:
        out = nn.functional.grouped_mm(a, b, offs=ends)
    assert meter.flops == 2 * 10 * 16 * 32
    with Meter() as meter:
        out.backward(torch.ones_like(out))
    assert meter.flops >= 2 * 2 * 10 * 16 * 32
