"""The inspector for GPUs comes to the same verdicts, and does not wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted import Events, Lab
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sentinel_bench import registry
from sentinel_bench.api import ResponseParams, Setup
from sentinel_bench.config import Component
from sentinel_bench.defenses import fence, sentinel, statistics
from sentinel_bench.ledger import Ledger
from sentinel_bench.pipeline import session
from sentinel_bench.pipeline.boundary import Boundary, echo
from sentinel_bench.pipeline.deferred import DeferredInspector
from sentinel_bench.pipeline.exchange import LiveExchange, WarmupExchange
from sentinel_bench.pipeline.loss import kept_loss, rank_loss
from sentinel_bench.pipeline.tamper import History, Tamperer

FAR: dict[str, Any] = {
    "grid__stages": 4,
    "grid__replicas": 4,
    "train__steps": 24,
    "train__warmup_steps": 12,
    "threat__waves": 1,
    "threat__honest_last": 1,
}


@pytest.mark.parametrize(("mode", "parts"), [("activation", 1), ("both", 2)])
@pytest.mark.parametrize(
    "defense",
    [
        "sentinel",
        "sentinel:quarantine=true",
        "sentinel:substitute=zeros,amnesty=false,on_ban=drop",
        "layered:quarantine=true,violations=2",
        "cascade",
    ],
)
@pytest.mark.parametrize("attack", ["zeros", "non-finite", "none"])
def test_the_record_is_that_of_the_inspector_for_cpus(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, attack: str, defense: str, mode: str, parts: int
) -> None:
    grid = {**FAR, "threat__mode": mode, "train__batch_size": 2, "train__microbatches": parts}
    usual, _ = lab.run(attack, defense, **grid)
    monkeypatch.setitem(session.INSPECTORS, "cpu", DeferredInspector)
    deferred, _ = lab.run(attack, defense, **grid)
    assert same(usual) == same(deferred)
    losses = [[row["loss"] for row in run.rows if "loss" in row] for run in (usual, deferred)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("mode", ["activation", "gradient", "both"])
@pytest.mark.parametrize("defense", ["none", "sentinel:quarantine=true", "sentinel:on_ban=drop"])
def test_a_lost_message_leaves_the_same_record_too(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, defense: str, mode: str
) -> None:
    grid = {**FAR, "threat__mode": mode, "faults__on_crash": "ban"}
    usual, _ = lab.run("crash", defense, **grid)
    monkeypatch.setitem(session.INSPECTORS, "cpu", DeferredInspector)
    deferred, _ = lab.run("crash", defense, **grid)
    assert same(usual) == same(deferred)
    assert usual.of("ban")


def same(events: Events) -> list[dict[str, Any]]:
    """Return what must be equal to the letter: all but times, losses and statistics.

    Flags are told later in a step.
    """
    free = {"seconds", "loss", "grad_norm", "statistics", "size", "state_bytes"}
    rows = [{k: v for k, v in row.items() if k not in free} for row in events.rows]
    return sorted(rows, key=lambda row: (row.get("step", -1), row["type"], repr(row)))


def test_the_loss_of_the_kept_is_the_loss_without_the_others_even_if_these_are_nan() -> None:
    logits = torch.randn(6, 5, 11, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(30).view(6, 5) % 11
    expected = rank_loss(logits, targets, [False, True, False])
    logits[2:4] = torch.nan
    logits.requires_grad_()
    loss = kept_loss(logits, targets, torch.tensor([True, False, True]))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert logits.grad is not None and logits.grad[2:4].eq(0).all()
    assert logits.grad[:2].ne(0).all()


# --- no waiting -----------------------------------------------------------------------------------

SHAPE = (2, 3, 8)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel, "_is_cheap_to_read", lambda x: False)
    for module in (fence, statistics):
        monkeypatch.setattr(module, "sort_last", lambda x: x.sort(-1).values)


def crossing(defense: str, *, flushes: bool) -> None:
    """Send signals that have no numbers over a boundary; whoever looks at one raises."""
    component = Component.parse(defense)
    with FakeTensorMode():
        watcher: Any = registry.defenses.create(component)
        watcher.start(Setup(2, 4, SHAPE))
        watcher._average = {  # only the first message of all is looked at
            (0, "activation"): torch.zeros(SHAPE),
            (1, "gradient"): torch.zeros(SHAPE),
        }
        policy = registry.defenses.params(component)
        assert isinstance(policy, ResponseParams)
        ledger = Ledger(policy, 2, 4)
        inspector = DeferredInspector(watcher, ledger, _Nowhere())
        live = LiveExchange(Tamperer((), History(), "cpu", ledger.banned), inspector)
        boundary = Boundary(0, 4)
        for exchange in (WarmupExchange([watcher], History()), live):
            boundary.exchange = exchange
            for _ in range(3):
                h = torch.randn(8, *SHAPE[1:], requires_grad=True)
                out, taint = boundary(h, torch.zeros(4, requires_grad=True))
                inspector.keeps(taint)
                (out.sum() + echo(taint)).backward()
                if flushes:
                    inspector.flush()
                inspector._pending.clear()


class _Nowhere:
    def append(self, kind: str, /, **fields: Any) -> None:
        """Forget a row."""


@pytest.mark.parametrize(
    "defense",
    ["sentinel", "sentinel:quarantine=true", "averaging", "sentinel:substitute=zeros,on_ban=drop"],
)
def test_nobody_waits_for_the_device_while_signals_cross(defense: str) -> None:
    crossing(defense, flushes=False)


def test_whoever_waits_is_found() -> None:
    with pytest.raises(DataDependentOutputException):
        crossing("sentinel", flushes=True)
