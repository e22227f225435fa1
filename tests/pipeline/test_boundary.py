"""What an attacker and a defense see at a boundary, and what a flag does to the signals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import HEARD, LEARNED, REFERENCE, SEEN, Lab, Mark, Seen, script
from torch import Tensor

from sentinel_bench.data.batches import Batches
from sentinel_bench.models.build import build_model

STEP = 6


def seen(stage: int, direction: str, step: int = STEP) -> Seen:
    found = [s for s in SEEN if (s.step, s.stage, s.direction) == (step, stage, direction)]
    assert len(found) == 1
    return found[0]


def passed_on(stage: int, direction: str) -> Tensor:
    """What `stage` received: what the stage before it in this direction delivered."""
    received = seen(stage, direction).received
    assert received is not None
    return received


def test_signals_are_hidden_states_and_gradients_of_each_replicas_own_mean_loss(lab: Lab) -> None:
    grid = {"grid__stages": 3, "grid__replicas": 3, "model__layers": 5, "train__batch_size": 2}
    lab.run("none", "script", **grid)
    scenario = lab.scenario(**grid)
    model = build_model(scenario, lab.tokens.vocab_size)
    batches = Batches(
        lab.tokens, batch_size=2, seq_len=8, replicas=3, seed=scenario.seeds.data
    ).train(0)
    inputs, targets = (torch.from_numpy(a) for a in batches)
    hidden: dict[int, Tensor] = {}
    for stage, last_layer in enumerate([1, 3]):
        model.model.layers[last_layer].register_forward_hook(
            lambda _, __, out, stage=stage: hidden.update({stage: out})
        )
    logits = model(input_ids=inputs).logits
    for stage in (0, 1):
        sent = seen(stage, "activation", step=0).sent
        assert sent.shape == (3, 2, 8, 16)
        assert torch.equal(sent.flatten(0, 1), hidden[stage])
        gradient = seen(stage + 1, "gradient", step=0).sent
        assert gradient.shape == (3, 2, 8, 16)
        for replica in range(3):
            rows = slice(2 * replica, 2 * replica + 2)
            loss = F.cross_entropy(logits[rows].flatten(0, 1), targets[rows].flatten())
            (own,) = torch.autograd.grad(loss, hidden[stage], retain_graph=True)
            torch.testing.assert_close(gradient[replica], own[rows], rtol=1e-5, atol=1e-8)


def test_boundaries_are_met_in_the_order_of_the_pass(lab: Lab) -> None:
    lab.run("none", "script")
    order = [(s.stage, s.direction) for s in SEEN if s.step == STEP]
    assert order == [(s, "activation") for s in (0, 1, 2)] + [(s, "gradient") for s in (3, 2, 1)]


def test_a_worker_received_what_the_stage_before_it_delivered(lab: Lab) -> None:
    lab.run("liar:what=zeros", "script", threat__mode="both", threat__honest_last=2)
    bad = next(r for r in range(4) if not seen(1, "activation").sent[r].any())
    assert seen(0, "activation").received is None
    assert torch.equal(passed_on(1, "activation"), seen(0, "activation").sent)
    assert torch.equal(passed_on(2, "activation"), seen(1, "activation").sent)
    assert not passed_on(2, "activation")[bad].any()
    assert seen(3, "gradient").received is None
    assert torch.equal(passed_on(2, "gradient"), seen(3, "gradient").sent)
    assert torch.equal(passed_on(1, "gradient"), seen(2, "gradient").sent)
    assert not seen(1, "gradient").sent[bad].any()


def test_an_attacker_hears_its_own_signals_alone(lab: Lab) -> None:
    lab.run("liar:what=listen", "script", threat__mode="both", threat__honest_last=0)
    assert {(h.stage, h.direction) for h in HEARD} == {
        *[(1, "activation"), (2, "activation")],
        *[(1, "gradient"), (2, "gradient"), (3, "gradient")],
    }
    for heard in HEARD:
        at = seen(heard.stage, heard.direction, heard.step)
        assert heard.sent.shape == (1, 8, 16)
        assert torch.equal(heard.sent, at.sent[heard.replica])
        if at.received is None:
            assert heard.received is None
        else:
            assert heard.received is not None
            assert torch.equal(heard.received, at.received[heard.replica])


def actives(step: int = STEP) -> dict[tuple[str, int], list[bool]]:
    return {(s.direction, s.stage): s.active for s in SEEN if s.step == step}


def test_a_rank_flagged_forward_is_not_tested_again_in_the_step_and_its_gradient_replaced(
    lab: Lab,
) -> None:
    lab.run("none", script((STEP, 1, "activation", 2)))
    everybody, others = [True] * 4, [True, True, False, True]
    assert actives() == {
        ("activation", 0): everybody,
        ("activation", 1): everybody,
        ("activation", 2): others,
        **{("gradient", s): others for s in (1, 2, 3)},
    }
    assert torch.equal(passed_on(2, "activation"), seen(1, "activation").sent)
    for stage in (2, 1):
        gradient = passed_on(stage, "gradient")
        assert torch.equal(gradient[2], torch.full((1, 8, 16), REFERENCE))
        assert not torch.equal(gradient[0], gradient[2])
    assert all(all(a) for a in actives(STEP + 1).values())
    clean = {(d, s): c for t, s, d, c in LEARNED if t == STEP}
    assert clean == {**actives(), ("activation", 1): others}


def test_a_rank_flagged_backward_is_replaced_from_there_upstream_only(lab: Lab) -> None:
    lab.run("none", script((STEP, 2, "gradient", 0)))
    everybody, others = [True] * 4, [False, True, True, True]
    assert actives() == {
        **{("activation", s): everybody for s in (0, 1, 2)},
        ("gradient", 3): everybody,
        ("gradient", 2): everybody,
        ("gradient", 1): others,
    }
    assert torch.equal(passed_on(2, "gradient"), seen(3, "gradient").sent)
    delivered, sent = passed_on(1, "gradient"), seen(2, "gradient").sent
    assert torch.equal(delivered[0], torch.full((1, 8, 16), REFERENCE))
    torch.testing.assert_close(delivered[1:], sent[1:])


@pytest.mark.parametrize("flag", [(STEP, 0, "activation", 1), (STEP, 1, "gradient", 1)])
def test_the_gradient_that_reaches_the_first_stage_is_the_reference(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, flag: Mark
) -> None:
    delivered: list[Tensor] = []
    monkeypatch.setattr(
        "sentinel_bench.pipeline.inspect.Inspector.inspect", _keep_last(delivered, STEP)
    )
    lab.run("none", script(flag))
    assert torch.equal(delivered[-1][1], torch.full((1, 8, 16), REFERENCE))
    assert not torch.equal(delivered[-1][0], delivered[-1][1])


@pytest.mark.parametrize("policy", [{"substitute": "zeros"}, {"quarantine": True}])
def test_a_gradient_is_replaced_by_zeros_where_the_policy_says_so(
    lab: Lab, policy: dict[str, object]
) -> None:
    lab.run("none", script((STEP, 1, "activation", 2), **policy))
    assert not passed_on(1, "gradient")[2].any()
    assert passed_on(1, "gradient")[3].any()


def test_a_flag_is_logged_with_the_truth_beside_it_and_counted(lab: Lab) -> None:
    events, _ = lab.run("liar:what=zeros", "script", threat__honest_last=2)
    bad = events.of("act")[0]["replica"]
    good = (bad + 1) % 4
    flags = [(STEP, 1, "activation", bad), (STEP, 1, "activation", good)]
    events, _ = lab.run("liar:what=zeros", script(*flags), threat__honest_last=2)
    assert [(f["replica"], f["tampered"]) for f in events.of("flag")] == sorted(
        [(bad, True), (good, False)]
    )
    row = events.of("step")[STEP]
    # two ranks are tainted at the second of six boundaries
    assert (row["checked"], row["flagged"], row["tampered"]) == ([4 * 6 - 2 * 4 - 1, 1], [1, 1], 1)
    assert events.of("step")[3]["checked"] == [0, 0]


def _keep_last(delivered: list[Tensor], step: int) -> object:
    from sentinel_bench.pipeline.inspect import Inspector

    inspect = Inspector.inspect

    def spy(self: Inspector, *args: object) -> object:
        out = inspect(self, *args)  # type: ignore[arg-type]
        if args[:3] == (1, "gradient", step):
            delivered.append(out[0].clone())
        return out

    return spy
