"""What a defense costs is counted as by hand, in nobody's run, and off the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import Events, Lab, Quiet, equal, script, weights

from sentinel_bench import suite
from sentinel_bench.api import Defense, ResponseParams, Signals, Updates, Verdict
from sentinel_bench.cli.run import _print_table
from sentinel_bench.config import Cell, Component
from sentinel_bench.pipeline import cost
from sentinel_bench.pipeline.cost import FlopCounter, Meter
from sentinel_bench.pipeline.weights import StageWork
from sentinel_bench.record import read_events

X = torch.ones(3, 4)
LAST = 3
"""The last of the stages of the tiny scenario."""


def counted(work: Callable[[], Any]) -> int:
    with FlopCounter() as counter:
        work()
    return int(counter.flops)


# --- operations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "work, flops",
    [
        (lambda: X @ torch.ones(4, 5), 2 * 3 * 4 * 5),
        (lambda: F.linear(X, torch.ones(5, 4), torch.ones(5)), 2 * 3 * 4 * 5),
        (lambda: torch.ones(2, 3, 4) @ torch.ones(2, 4, 5), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.einsum("ab,cb->ac", X, torch.ones(6, 4)), 2 * 3 * 4 * 6),
        (lambda: X + 1, 12),
        (lambda: X.clone().mul_(2), 12),
        (lambda: torch.ones(3, 1) * torch.ones(1, 4), 12),
        (lambda: X > 0, 12),
        (lambda: X.double().square().sum(), 12 + 12),
        (lambda: X.sum(0), 12),
        (lambda: X.sort(), 12),
        (lambda: X.topk(2), 12),
        (lambda: X.isfinite(), 12 + 12 + 12),  # abs, unlike infinity, equal to itself
        (lambda: torch._foreach_add([torch.ones(3), torch.ones(4)], 1), 7),
        (lambda: torch.arange(12) * 2, 0),
        (lambda: X.bool() & X.bool(), 0),
    ],
)  # fmt: skip
def test_operations_by_hand(work: Callable[[], Any], flops: int) -> None:
    assert counted(work) == flops


@pytest.mark.parametrize(
    "work",
    [
        lambda: X.view(4, 3), lambda: X.t(), lambda: X[1:, 2], lambda: X.expand(2, 3, 4),
        lambda: X.unsqueeze(0), lambda: X.chunk(2, 1), lambda: X.detach(), lambda: X.clone(),
        lambda: torch.cat([X, X]), lambda: torch.stack([X, X]), lambda: X[[0, 2]],
        lambda: X.bfloat16(), lambda: X.new_zeros(9), lambda: X.masked_fill(X.bool(), 0)[X.bool()],
        lambda: F.embedding(torch.tensor([1, 2]), X),
    ],
)  # fmt: skip
def test_what_only_moves_numbers_is_free(work: Callable[[], Any]) -> None:
    assert counted(work) == 0


def test_a_backward_pass_is_counted_by_hand() -> None:
    w, v = torch.ones(4, 5, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    out = v @ w
    # Two products as large as the one before, one for each factor.
    assert counted(lambda: out.backward(torch.ones(3, 5))) == 2 * (2 * 3 * 4 * 5)


def test_attention_is_two_products_and_five_backward() -> None:
    q, k, v = (torch.ones(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    product = 2 * 2 * 3 * 3 * 4  # 2 heads of [3, 4] x [4, 3]
    with torch.no_grad():
        assert counted(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)) == (
            2 * product
        )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert counted(lambda: out.backward(torch.ones_like(out))) == 5 * product


def test_what_is_done_aside_is_not_counted_and_nothing_is_outside_of_a_meter() -> None:
    meter = Meter([8])
    with meter:
        X + 1
        with cost.aside():
            X + 1
            with cost.aside():
                X + 1
            X + 1
        X + 1
    X + 1
    cost.travelled(3)
    cost.recomputed(0)
    cost.asked(0, "activation", X.view(1, 1, 3, 4), copied=False)
    with cost.aside():
        X + 1
    assert (meter.flops, meter.bytes) == (24, 0)


def test_a_meter_that_an_error_left_does_not_go_on() -> None:
    meter = Meter([8])
    with pytest.raises(ValueError, match="no"), meter:
        raise ValueError("no")
    X + 1
    cost.travelled(3)
    assert (meter.flops, meter.bytes) == (0, 0)


# --- the clock ------------------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is, to be set."""
    at = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: at[0])
    return at


def test_the_clock_stands_still_while_work_is_aside_and_goes_on_after_it(now: list[float]) -> None:
    started = cost.clock()
    now[0] += 1
    with cost.aside():
        now[0] += 10
        with cost.aside():  # counted once
            now[0] += 20
        now[0] += 40
    assert cost.clock() - started == 1
    now[0] += 2
    assert cost.clock() - started == 3
    slow = cost.aside()(lambda: now.__setitem__(0, now[0] + 50))
    slow()
    slow()
    assert cost.clock() - started == 3


def test_the_clock_goes_on_after_an_error_aside(now: list[float]) -> None:
    started = cost.clock()
    with pytest.raises(ValueError, match="no"), cost.aside():
        now[0] += 5
        raise ValueError("no")
    assert cost.clock() == started
    now[0] += 3
    with cost.aside():
        now[0] += 7
    assert cost.clock() - started == 3


def test_what_a_defense_reads_of_updates_takes_no_time_and_what_it_computes_does(
    lab: Lab, plug: Callable[..., None], now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker has its own gradient anyhow; a verifier has to compute it."""
    plug(Weigher)
    once = StageWork.redo

    def slow(self: StageWork, of: Any, received: Any = None) -> Any:
        now[0] += len(of)
        return once(self, of, received)

    monkeypatch.setattr(StageWork, "redo", slow)
    seconds = {}
    for how in ("look", "compute"):
        monkeypatch.setattr(Weigher, "how", how)
        events, _ = lab.run("none", "weighing", train__steps=6)
        seconds[how] = [row["seconds"] for row in events.of("step")]
    assert seconds["look"] == [0.0] * 6
    assert seconds["compute"] == [4.0 * 4] * 6  # of each of 4 workers at 4 stages


# --- bytes ----------------------------------------------------------------------------------------

ANSWERS = torch.zeros(2, 1, 8, 16)
ONE = 2 * 8 * 16 * 4
IDS = 2 * 8 * 8
"""Of two replicas: their signals, and their token ids."""


@pytest.mark.parametrize(
    "stage, direction, copied, size",
    [
        (0, "activation", False, IDS + ONE),
        (1, "activation", False, ONE + ONE),
        (1, "gradient", False, ONE + ONE + ONE),
        (LAST, "gradient", False, ONE + IDS + ONE),
        (0, "activation", True, IDS),
        (1, "gradient", True, ONE),
    ],
)
def test_what_travels_to_whoever_is_asked(
    stage: int, direction: Literal["activation", "gradient"], copied: bool, size: int
) -> None:
    meter = Meter([1] * (LAST + 1))
    for _ in range(2):
        with meter:
            cost.asked(stage, direction, ANSWERS, copied=copied)
    assert meter.bytes == 2 * size


def test_a_jump_and_the_weights_travel_once_in_a_step() -> None:
    meter = Meter([5, 7])
    for _ in range(2):
        with meter:
            for _ in range(3):
                cost.recomputed(1)
                cost.asked(1, "gradient", ANSWERS, copied=True)
            cost.recomputed(0)
    assert meter.bytes == 2 * (7 + 5 + ONE)


# --- whole steps ----------------------------------------------------------------------------------

WIDE = {"model__hidden_size": 64, "model__intermediate_size": 128, "train__seq_len": 16}
"""Products of matrices are most of the work."""


class Redoer(Defense[ResponseParams]):
    """Has the work of all done a second time, and trusts everybody."""

    goal = formula = source = "test"
    needs_again = True
    by: ClassVar[str]

    def check(self, signals: Signals) -> Verdict:
        everybody = range(len(signals.sent))
        assert signals.again is not None and signals.active.all()
        if self.by == "verifier":
            signals.again.recompute(everybody)
        else:
            signals.again.ask(everybody, everybody)
        nobody = torch.zeros_like(signals.active)
        return Verdict(nobody, nobody)


class Verifier(Redoer):
    name: ClassVar[str] = "verifier"
    by = "verifier"


class Peer(Redoer):
    name: ClassVar[str] = "peer"
    by = "peer"


class Coin(Redoer):
    """Does work again in the first of the steps alone, and adds nothing but the verifiers' look."""

    name: ClassVar[str] = "coin"
    by = "verifier"

    def check(self, signals: Signals) -> Verdict:
        if signals.step == 4:
            return super().check(signals)
        nobody = torch.zeros_like(signals.active)
        return Verdict(nobody, nobody)


class Accuser(Defense[ResponseParams]):
    """Flags one replica, severely, and refuses to work once that has a consequence."""

    name: ClassVar[str] = "accuser"
    goal = formula = source = "test"

    def check(self, signals: Signals) -> Verdict:
        assert signals.active.all()
        first = torch.arange(len(signals.active)) == 0  # most at once would be an amnesty
        return Verdict(first, first)


class Weigher(Defense[ResponseParams]):
    """Has all weight gradients shown, or computes them."""

    name: ClassVar[str] = "weighing"
    goal = formula = source = "test"
    needs_updates = True
    how: ClassVar[str] = "look"

    def check(self, signals: Signals) -> Verdict:
        nobody = torch.zeros_like(signals.active)
        return Verdict(nobody, nobody)

    def check_updates(self, updates: Updates) -> Verdict:
        everybody = range(len(updates.active))
        nobody = torch.zeros_like(updates.active)
        if self.how == "look":
            size = updates.work.sent(everybody).shape[1]
            updates.work.project(everybody, torch.ones(1, size))
            updates.work.losses()
            if updates.kind == "gradient":
                updates.work.mean()
        elif updates.kind == "gradient":
            updates.work.recompute(everybody)
        return Verdict(nobody, nobody)


@pytest.fixture
def wide(lab: Lab, plug: Callable[..., None]) -> Lab:
    plug(Verifier, Peer, Coin, Accuser)
    return lab


def price(lab: Lab, defense: str, aggregator: str = "mean", **changes: Any) -> dict[str, int]:
    cell = Cell(
        scenario=lab.scenario(**changes),
        attack=Component(name="none"),
        defense=Component.parse(defense),
        aggregator=Component.parse(aggregator),
    )
    return lab.session([cell]).cost(cell)


def test_no_defense_costs_nothing(lab: Lab) -> None:
    found = price(lab, "none")
    assert (found["flops"], found["bytes"]) == (0, 0) and found["step_flops"] > 0


def products(lab: Lab, **changes: Any) -> tuple[list[int], int]:
    """Return the multiplications and additions of each stage's linear layers, forward, by hand."""
    session = lab.session([lab.cell("none", "none", **changes)])
    train, replicas = session.scenario.train, session.scenario.grid.replicas
    tokens = train.batch_size * train.seq_len * replicas
    stages = [
        2 * tokens * sum(
            m.weight.numel() for m in stage.modules() if isinstance(m, torch.nn.Linear)
        )
        for stage in session._trainer._stages.values()
    ]  # fmt: skip
    return stages, tokens


def test_a_plain_step_is_three_forward_passes(lab: Lab) -> None:
    stages, _ = products(lab, **WIDE)
    step = price(lab, "none", **WIDE)["step_flops"]
    assert 3 * sum(stages) < step < 1.25 * 3 * sum(stages)


def test_doing_all_work_again_costs_a_forward_pass_and_one_with_gradients_of_the_input(
    wide: Lab,
) -> None:
    stages, _ = products(wide, **WIDE)
    # Activations are sent by all but the last, gradients by all but the first: these are computed
    # from another forward pass, by as many products as that has.
    expected = sum(stages[:-1]) + 2 * sum(stages[1:])
    for defense in ("verifier", "peer"):
        flops = price(wide, defense, **WIDE)["flops"]
        assert expected < flops < 1.25 * expected


def test_an_audit_of_everything_costs_between_one_and_two_steps_and_one_of_little_costs_little(
    lab: Lab,
) -> None:
    everything, little = (price(lab, f"audit:q={q}", **WIDE) for q in (1, 0.05))
    step = everything["step_flops"]
    assert 0.8 * step < everything["flops"] < 2.1 * step
    assert 0 < little["flops"] < 0.15 * step


def test_the_bytes_of_whole_steps_by_hand(wide: Lab) -> None:
    scenario = wide.scenario()
    signal = scenario.train.batch_size * scenario.train.seq_len * 16 * 4
    ids = scenario.train.batch_size * scenario.train.seq_len * 8
    model = sum(p.nbytes for p in weights(wide.session([wide.cell("none", "none")])).values())
    # Forward: stages 0 1 2 are redone from ids, one signal, one signal; each answers. Backward:
    # stages 1 2 3 from one signal each and two gradients and target ids; each answers.
    forward, backward = ids + 2 * signal + 3 * signal, 3 * signal + 2 * signal + ids + 3 * signal
    assert price(wide, "peer")["bytes"] == 4 * (forward + backward)
    assert price(wide, "duplicate-work")["bytes"] == 4 * (forward + backward)
    assert price(wide, "verifier")["bytes"] == model
    assert price(wide, "redundant-block")["bytes"] == 4 * (ids + 3 * signal)
    assert price(wide, "sentinel")["bytes"] == 0


def test_copies_that_train_in_step_cost_another_step(lab: Lab) -> None:
    found = price(lab, "redundant-block", **WIDE)
    assert 0.95 * found["step_flops"] < found["flops"] < 1.1 * found["step_flops"]


def test_what_differs_from_step_to_step_is_a_mean(wide: Lab) -> None:
    once, always = price(wide, "coin"), price(wide, "verifier")
    assert once["steps"] == always["steps"] == 12 - 4
    assert once["bytes"] == round(always["bytes"] / 8)
    assert once["flops"] < always["flops"] / 6
    assert price(wide, "coin", train__steps=5)["bytes"] == always["bytes"]
    assert price(wide, "coin", train__steps=40)["steps"] == cost.STEPS


def test_a_robust_rule_costs_its_own_work_not_the_gradients_of_single_replicas(lab: Lab) -> None:
    found = price(lab, "none", "krum:strict=false", **WIDE)
    model = sum(
        w.numel() for w in weights(lab.session([lab.cell("none", "none", **WIDE)])).values()
    )
    # A few operations for each number of the four rows; computing these takes another step.
    assert 4 * model < found["flops"] < 100 * model
    assert found["flops"] < 0.5 * found["step_flops"]
    both = price(lab, "sentinel", "krum:strict=false", **WIDE)["flops"]
    assert both == pytest.approx(found["flops"] + price(lab, "sentinel", **WIDE)["flops"], rel=0.01)


def test_flags_have_no_consequence_while_a_cost_is_counted(wide: Lab) -> None:
    found = price(wide, "accuser", **WIDE)
    assert 0 < found["flops"] < 0.1 * found["step_flops"]


def test_a_cost_is_the_same_whatever_else_was_run_or_counted(lab: Lab) -> None:
    changes: dict[str, Any] = {"threat__mode": "both"}
    names = ("sentinel", "audit:q=0.3", "redundant-block")
    cells = [lab.cell("scaling", name, **changes) for name in names]
    alone = [lab.session([cell]).cost(cell) for cell in cells]
    group = lab.session(cells)
    for cell in cells:
        group.run(cell, Events())
    assert [group.cost(cell) for cell in reversed(cells)] == alone[::-1]


@pytest.mark.parametrize(
    "defense", ["sentinel", "audit:q=0.3", "redundant-block", "surrogate", "script"]
)
def test_counting_changes_no_run(lab: Lab, defense: str) -> None:
    given: Any = script((5, 1, "activation", 0)) if defense == "script" else defense
    cell = lab.cell("liar:what=noise", given, threat__mode="both")
    other = lab.cell("none", "none", threat__mode="both")
    one, two = lab.session([cell, other]), lab.session([cell, other])
    plain, after = Events(), Events()
    one.run(cell, plain)
    two.cost(other)
    two.cost(cell)
    two.run(cell, after)
    assert plain.timeless() == after.timeless()
    assert equal(weights(one), weights(two))


# --- records --------------------------------------------------------------------------------------


def recorded(lab: Lab, out: Path) -> list[suite.Finished]:
    plan = suite.make_plan(
        [lab.scenario()], [Component(name="zeros")], [Component(name="sentinel")], {}
    )
    return suite.run(plan, out, Quiet(), threads=1)


def test_a_record_says_what_its_defense_costs(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = {f.cell.label: f for f in recorded(lab, tmp_path)}
    for finished in done.values():
        events = read_events(finished.folder)
        (row,) = (e for e in events if e["type"] == "cost")
        scores = finished.result["scores"]
        assert row["steps"] > 0 and row["step_flops"] > 0
        assert scores["extra_flops"] == row["flops"] / row["step_flops"]
        assert (scores["extra_flops"] > 0) == (finished.cell.defense.name == "sentinel")
        assert scores["extra_bytes"] == row["bytes"] == 0
    _print_table(list(done.values()))
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("cost of "))
    assert line.startswith("cost of sentinel: +") and ", 0 bytes a step, " in line


def test_the_time_in_which_a_cost_is_counted_is_no_part_of_the_speed(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    dispatch = FlopCounter.__torch_dispatch__

    def slow(*args: Any, **kwargs: Any) -> Any:
        now[0] += 1000
        return dispatch(*args, **kwargs)

    def clock() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(FlopCounter, "__torch_dispatch__", slow)
    monkeypatch.setattr(time, "perf_counter", clock)
    finished = recorded(lab, tmp_path)
    assert now[0] > 1000  # something was counted
    for one in finished:
        steps = [e["seconds"] for e in read_events(one.folder) if e["type"] == "step"]
        assert len(steps) == 12 and max(steps) < 1000
        # 4 replicas x 1 x 8 tokens a step of one second
        assert one.result["scores"]["tokens_per_second"] == 32
