"""What workers hand in as a step ends: who is flagged has no part in it, and nothing else moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import (
    FROZEN,
    SEEN,
    Events,
    Grads,
    Lab,
    Plain,
    Quiet,
    Script,
    ScriptParams,
    assert_close,
    attackers,
    equal,
    only,
    spy_gradients,
    weights,
)
from torch import Tensor

from sentinel_bench import registry, suite
from sentinel_bench.api import Attack, AttackContext, Setup, Updates, Verdict
from sentinel_bench.config import Cell, Component, Frozen
from sentinel_bench.errors import PluginError
from sentinel_bench.ledger import Ledger
from sentinel_bench.pipeline.exchange import LiveExchange
from sentinel_bench.pipeline.inspect import Inspector
from sentinel_bench.pipeline.session import Session
from sentinel_bench.pipeline.tamper import History, Tamperer
from sentinel_bench.record import read_events

Drop = tuple[int, int, str, int]
"""step, stage, kind, replica"""
ONE = {**FROZEN, "train__steps": 1}
KEPT: list[Updates] = []
"""All that the weigher was shown."""
TOLD: list[dict[str, Any]] = []
"""What it learned from."""
READ: list[dict[str, Any]] = []
"""All that the reader was told, before the handle was closed."""
LOOKS: set[tuple[Any, ...]] = set()
"""What the detective saw: stage, kind, question, and what each answer looks like."""


class WeigherParams(ScriptParams):
    drop: list[Drop] = []
    wrong: str = ""
    pry: bool = False
    vandal: bool = False


class Weigher(Script):
    """Flags the updates that it is told to flag, or breaks the contract."""

    name: ClassVar[str] = "weigher"
    needs_updates = True
    Params = WeigherParams

    def check_updates(self, updates: Updates) -> Any:
        KEPT.append(updates)
        everybody = range(len(updates.active))
        if self.params.pry or self.params.vandal:
            for found in pry(updates, everybody):
                if self.params.vandal:
                    found.zero_()
        place = updates.step, updates.stage, updates.kind
        flagged = torch.tensor([(*place, r) in self.params.drop for r in everybody])
        if self.params.wrong and updates.step == self.params.at:
            return self._wrong(updates, flagged)
        return Verdict(flagged, flagged & self.params.severe)

    def _wrong(self, updates: Updates, flagged: Tensor) -> Any:
        match self.params.wrong:
            case "raises":
                raise ValueError("broken scales")
            case "exits":
                raise SystemExit(3)
            case "returns None":
                return None
            case "returns too few":
                return Verdict(flagged[:-1], flagged[:-1])
            case "returns floats":
                return Verdict(flagged, flagged.float())
            case "returns wrong statistics":
                return Verdict(~flagged, flagged, None, {"x": (flagged[:1], 0.0, 1.0)})
            case "names nobody":
                updates.work.sent([])
            case "changes active":
                updates.active.zero_()
        return Verdict(flagged, flagged)

    def learn_updates(self, updates: Updates, clean: Tensor) -> None:
        if self.params.wrong == "fails to learn" and updates.step == self.params.at:
            raise ValueError("broken memory")
        place = {"step": updates.step, "stage": updates.stage, "kind": updates.kind}
        TOLD.append({**place, "clean": clean.tolist()})


class Reader(Weigher):
    """Writes down all that it can read."""

    name: ClassVar[str] = "reader"

    def check_updates(self, updates: Updates) -> Any:
        everybody, work = range(len(updates.active)), updates.work
        given: dict[str, Any] = {"updates": updates, "sent": work.sent(everybody)}
        given |= {"recomputed": work.recompute(everybody), "losses": work.losses()}
        if updates.kind == "gradient":
            given["redone"], given["mean"] = work.redo(everybody), work.mean()
        READ.append(given)
        return super().check_updates(updates)


class Detective(Weigher):
    """Looks at each tensor from all sides but its values."""

    name: ClassVar[str] = "detective"

    def check_updates(self, updates: Updates) -> Any:
        work, everybody = updates.work, range(len(updates.active))
        asks: dict[str, Callable[[list[int]], Tensor]] = {
            "sent": work.sent,
            "recompute": work.recompute,
            "project": lambda of: work.project(of, torch.ones(1, work.sent([0]).shape[1])),
        }
        if updates.kind == "gradient":
            asks["redo"] = lambda of: work.redo(of[:1]).update[None].repeat(len(of), 1)
            LOOKS.add((updates.stage, "mean", str(looks(work.mean()[1]))))
        for name, ask in asks.items():
            one, two, three = ([ask([r] * n) for r in everybody] for n in (1, 2, 1))
            for pair in zip(one, two, strict=True):
                LOOKS.add((updates.stage, updates.kind, name, str([*map(looks, pair)])))
            places = [x.untyped_storage().data_ptr() for x in [*one, *two, *three]]
            assert len(set(places)) == len(places)
            for r, a, b, c in zip(everybody, one, two, three, strict=True):
                assert torch.equal(b[0], b[1])
                assert torch.equal(a, c)
                a.zero_()
                assert torch.equal(ask([r]), c)
        return super().check_updates(updates)


class Mute(Script):
    """Asks for updates, and has no idea what to do with them."""

    name: ClassVar[str] = "mute"
    needs_updates = True


class NudgeParams(Frozen):
    size: float = 0.1
    since: int = 0


class Nudge(Attack[NudgeParams]):
    """Holds weights that are larger by a relative size, from a step on."""

    name = "nudge"
    goal = formula = source = "test"
    axis = "weights"
    Params = NudgeParams

    def inject(self, weights: Tensor, ctx: AttackContext) -> Tensor:
        return weights if ctx.step < self.params.since else weights * (1 + self.params.size)


def pry(updates: Updates, of: Sequence[int]) -> Iterator[Tensor]:
    """Yield all tensors that can be had of some updates."""
    work = updates.work
    yield work.sent(of)
    yield work.recompute(of)
    if updates.kind == "gradient":
        yield work.mean()[1]
    yield work.project(of, torch.ones(2, work.sent([0]).shape[1]))
    losses = work.losses()
    if losses is not None:
        yield losses
    if updates.kind == "gradient":
        done = work.redo(of)
        yield done.update
        yield from (x for x in (done.activation, done.gradient) if x is not None)


def looks(x: Tensor) -> tuple[Any, ...]:
    """Return all that can be seen of a tensor but its values and where they lie."""
    hooks = x._backward_hooks, getattr(x, "_post_accumulate_grad_hooks", None)
    return (
        *(type(x), x.dtype, x.device, x.layout, tuple(x.shape), x.stride(), x.storage_offset()),
        *(x.untyped_storage().nbytes(), x._version, x._base is None, x.requires_grad, x.is_leaf),
        *(x.grad_fn, x.grad, hooks, x.is_inference(), dict(x.__dict__), x.is_conj(), x.is_neg()),
    )


@pytest.fixture(autouse=True)
def _plugins(plug: Callable[..., None]) -> Iterator[None]:
    plug(Weigher, Reader, Detective, Mute, Nudge)
    yield
    for kept in (KEPT, TOLD, READ, LOOKS):
        kept.clear()


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[Grads]:
    return spy_gradients(monkeypatch)


def weigher(*drop: Drop, **params: Any) -> Component:
    given: dict[str, Any] = {"amnesty": False, "drop": [list(d) for d in drop], **params}
    return Component(name="weigher", params=given)


def run(
    lab: Lab, attack: str, defense: str | Component, aggregator: str = "mean", **changes: Any
) -> tuple[Events, Session]:
    cell = lab.cell(attack, defense, **changes)
    cell = cell.model_copy(update={"aggregator": Component.parse(aggregator)})
    assert isinstance(cell, Cell)
    session, events = lab.session([cell]), Events()
    session.run(cell, events)
    return events, session


def where(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["stage"], row["replica"]) for row in rows]


# --- the mean -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("dropped", [[0], [3, 1], [0, 1, 2]])
@pytest.mark.parametrize("attack", ["none", "update-sign-flip:gain=2"])
def test_who_is_flagged_has_no_part_in_the_mean_of_its_stage_and_in_that_of_the_others(
    lab: Lab, gradients: list[Grads], stage: int, dropped: list[int], attack: str
) -> None:
    grid = {**ONE, "grid__replicas": 5, **only(stage, 4), "threat__fraction": 0.4}
    bad = {(a.stage, a.replica) for a in attackers(lab, attack, **grid)}
    run(lab, attack, weigher(*((0, stage, "gradient", r) for r in dropped)), **grid)

    def part(s: int, r: int) -> float:
        own = -2.0 if (s, r) in bad else 1.0
        return own if s != stage else 0.0 if r in dropped else own * 5 / (5 - len(dropped))

    assert_close(gradients[0], Plain(lab.scenario(**grid), lab.tokens).mean(range(5), part))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "marks",
    [
        [(1, "activation", 3)],
        [(3, "gradient", 3)],
        [(0, "activation", 1), (2, "gradient", 3)],
    ],
)
@pytest.mark.parametrize("aggregator", ["mean", "median"])
def test_the_mean_is_exact_too_where_ranks_are_left_out_and_where_a_rule_replaces_it(
    lab: Lab,
    gradients: list[Grads],
    stage: int,
    marks: list[tuple[int, str, int]],
    aggregator: str,
) -> None:
    grid = {**ONE, "grid__replicas": 6, **only(stage, 4)}
    attack = "update-sign-flip:gain=2"
    (bad,) = attackers(lab, attack, **grid)
    order = [bad.replica, *(r for r in range(6) if r != bad.replica)]
    flags = [[0, s, direction, order[r]] for s, direction, r in marks]
    # the attacker is flagged, and an honest one, and one that is left out anyhow
    drop = [(0, stage, "gradient", order[r]) for r in (0, 2, 3)]
    run(lab, attack, weigher(*drop, flags=flags, quarantine=True), aggregator, **grid)
    keep = sorted(set(order) - {r for *_, r in flags})
    left = [r for r in keep if r not in (order[0], order[2])]
    plain = Plain(lab.scenario(**grid), lab.tokens)

    def rows(s: int) -> Tensor:
        return torch.stack([plain.flat(plain.single(r), s) for r in (left if s == stage else keep)])

    for s in range(4):
        got = plain.flat(gradients[0], s)
        assert_close(got, rows(s).mean(0) if aggregator == "mean" else _median(rows(s)))


def _median(rows: Tensor) -> Tensor:
    ordered = rows.sort(0).values
    n = len(rows)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


@pytest.mark.parametrize("aggregator", ["mean", "median"])
@pytest.mark.parametrize("stage", [0, 3])
def test_where_all_of_a_stage_are_flagged_its_weights_stay_as_they_are(
    lab: Lab, stage: int, aggregator: str
) -> None:
    changes: dict[str, Any] = {"train__steps": 6, **only(stage, 4), "threat__mode": "both"}
    drop = [(step, stage, "gradient", r) for step in (4, 5) for r in range(4)]
    cell = lab.cell("none", weigher(*drop, bans=False), **changes)
    cell = cell.model_copy(update={"aggregator": Component.parse(aggregator)})
    session = lab.session([cell])
    before = weights(session)
    session.run(cell, Events())
    after = weights(session)
    names = {n for n, w in before.items() if torch.equal(w, after[n])}
    plain = Plain(lab.scenario(**changes), lab.tokens)
    assert names == {
        n for (n, _), s in zip(plain.model.named_parameters(), plain.stages, strict=True)
        if s == stage
    }  # fmt: skip


@pytest.mark.parametrize("aggregator", ["mean", "krum:strict=false"])
def test_a_defense_that_reads_all_updates_and_flags_nobody_changes_nothing_to_the_bit(
    lab: Lab, aggregator: str
) -> None:
    changes: dict[str, Any] = {"train__steps": 8, "threat__mode": "both"}
    for attack in ("none", "forger:what=flip"):
        bare, one = run(lab, attack, "script", aggregator, **changes)
        for pryer in (weigher(pry=True), weigher(vandal=True)):
            torch.manual_seed(3)
            state = torch.get_rng_state()
            seen, two = run(lab, attack, pryer, aggregator, **changes)
            assert torch.equal(torch.get_rng_state(), state)
            assert equal(weights(one), weights(two))
            for key in ("loss", "grad_norm"):
                assert [r[key] for r in bare.of("step")] == [r[key] for r in seen.of("step")]
    stages = [(u.step, u.stage, u.kind) for u in KEPT[: 8 * 8]]
    assert stages == [
        (step, s, kind) for step in range(8) for kind in ("gradient", "weights") for s in range(4)
    ]
    assert all(u.active.all() for u in KEPT)


def test_honest_runs_are_the_same_with_an_audit_of_all_updates_and_without(lab: Lab) -> None:
    for one, other in (("audit:q=1", "script"), ("cascade:q=1,screens=[]", "script")):
        runs = [run(lab, "none", d, train__steps=8)[1] for d in (one, other)]
        assert equal(*map(weights, runs))


# --- what can be read -----------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [3, 4])
def test_updates_and_losses_are_those_of_single_replicas(lab: Lab, replicas: int) -> None:
    grid = {**ONE, "grid__replicas": replicas, "train__batch_size": 2, **only(1, 4)}
    grid |= {"threat__fraction": 0.34}
    events, _ = run(lab, "forger:what=flip", "reader", **grid)
    plain = Plain(lab.scenario(**grid), lab.tokens)
    ((stage, bad),) = where(events.of("act"))
    for given in READ[:4]:
        updates = given["updates"]
        for r in range(replicas):
            truth = plain.flat(plain.single(r), updates.stage)
            assert_close(given["recomputed"][r], truth)
            lied = (updates.stage, r) == (stage, bad)
            assert_close(given["sent"][r], -truth if lied else truth)
        assert (given["losses"] is None) == (updates.stage < 3)
    inputs, targets = plain.batch()
    for r, loss in enumerate(READ[3]["losses"].tolist()):
        logits = plain.model(input_ids=inputs[r]).logits
        expected = F.cross_entropy(logits.flatten(0, 1), targets[r].flatten())
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    for given in READ[4:]:
        assert given["updates"].kind == "weights"
        held = plain.flat([p.detach() for p in plain.model.parameters()], given["updates"].stage)
        assert_close(given["sent"], held.expand(replicas, -1))
        assert torch.equal(given["sent"], given["recomputed"])


@pytest.mark.parametrize("attack", ["none", "liar:what=noise"])
@pytest.mark.parametrize("more", [{}, {"threat__poison_self": True}])
def test_work_redone_is_all_that_an_honest_worker_sent_and_not_what_a_liar_did(
    lab: Lab, attack: str, more: dict[str, Any]
) -> None:
    """With poison_self a lie is in what is received: all that follows from it is redone rightly."""
    grid = {**FROZEN, **only(2, 4), **more, "train__steps": 3, "grid__replicas": 3}
    grid |= {"threat__fraction": 0.34}
    bad = {(a.stage, a.replica) for a in attackers(lab, attack, **grid)}
    run(lab, attack, "reader", **grid)
    sent = {(s.step, s.stage, s.direction): s.sent for s in SEEN}
    lies = set()
    for given in READ:
        if "redone" not in given:
            continue
        updates, redone = given["updates"], given["redone"]
        step, stage = updates.step, updates.stage
        assert_close(redone.update, given["recomputed"].mean(0))
        counted, mean = given["mean"]
        assert counted == [0, 1, 2]
        assert_close(mean, given["sent"].mean(0))
        assert (redone.activation is None) == (stage == 3)
        assert (redone.gradient is None) == (stage == 0)
        pairs = {
            "activation": (redone.activation, sent.get((step, stage, "activation"))),
            "gradient": (redone.gradient, sent.get((step, stage, "gradient"))),
            "update": (given["recomputed"], given["sent"]),
        }
        for what, (truth, claim) in pairs.items():
            assert (truth is None) == (claim is None)
            if truth is None:
                continue
            for r in range(3):
                apart = (truth[r] - claim[r]).norm() / truth[r].norm()
                if apart > 1e-5:
                    lies.add((stage, r, what))
    wrong = {"activation", "gradient"} | ({"update"} if more else set())
    assert lies == {(stage, r, what) for stage, r in bad for what in wrong}


@pytest.mark.parametrize("replicas", [4, 6])
@pytest.mark.parametrize("late", [False, True])
def test_the_mean_that_is_shown_is_what_the_stage_uses(
    lab: Lab, gradients: list[Grads], replicas: int, late: bool
) -> None:
    grid = {**ONE, "grid__replicas": replicas, **only(2, 4), "threat__fraction": 0.25}
    attack = "update-sign-flip:gain=2"
    (bad,) = attackers(lab, attack, **grid)
    flags = [[0, 3, "gradient", (bad.replica + 1) % replicas]] if late else []
    flags += [[0, 0, "activation", (bad.replica + 2) % replicas]]
    reader = Component(name="reader", params={"flags": flags, "quarantine": True, "amnesty": False})
    run(lab, attack, reader, **grid)
    plain = Plain(lab.scenario(**grid), lab.tokens)
    keep = sorted(set(range(replicas)) - {f[3] for f in flags})
    for given in READ[:4]:
        counted, mean = given["mean"]
        assert counted == keep == given["updates"].active.nonzero().flatten().tolist()
        assert_close(mean, plain.flat(gradients[0], given["updates"].stage))


def test_a_handle_is_closed_once_the_check_is_over(lab: Lab) -> None:
    run(lab, "forger:what=flip", weigher(), train__steps=5)
    assert {u.kind for u in KEPT} == {"gradient", "weights"}
    for updates in KEPT:
        questions: list[Callable[[], Any]] = [
            lambda u=updates: u.work.sent([0]),  # type: ignore[misc]
            lambda u=updates: u.work.recompute([0]),  # type: ignore[misc]
            lambda u=updates: u.work.redo([0]),  # type: ignore[misc]
            lambda u=updates: u.work.mean(),  # type: ignore[misc]
            lambda u=updates: u.work.project([0], torch.ones(1, 1)),  # type: ignore[misc]
            lambda u=updates: u.work.losses(),  # type: ignore[misc]
        ]
        for ask in questions:
            with pytest.raises(RuntimeError, match="only while they are checked"):
                ask()


@pytest.mark.parametrize("attack", ["forger:what=flip", "implant:what=add", "liar:what=noise"])
def test_nothing_but_its_value_tells_who_handed_in_a_lie(lab: Lab, attack: str) -> None:
    events, _ = run(lab, attack, "detective", train__steps=5, threat__mode="both")
    assert events.of("act")
    # of each question there is one answer, whoever it is about
    assert len(LOOKS) == 4 * (4 + 3 + 1)


# --- audits ---------------------------------------------------------------------------------------

FORGERIES = [
    *("update-sign-flip", "update-ipm", "update-alie", "update-min-max", "update-min-sum"),
    *("update-mimic", "label-flip", "forger:what=flip"),
]
WIDE: dict[str, Any] = {
    "grid__replicas": 5,
    "threat__fraction": 0.4,
    "threat__honest_first": 0,
    "threat__honest_last": 0,
    "threat__waves": 2,
    "threat__gap": 2,
    "train__steps": 8,
    "threat__mode": "both",
}


def assert_all_and_only_liars_are_banned_at_once(events: Events) -> None:
    acts = {(a["stage"], a["replica"]): a["step"] for a in events.of("act")}
    bans = {(b["stage"], b["replica"]): b["step"] for b in events.of("ban")}
    assert acts
    assert acts == bans
    assert all(row["tampered"] for row in events.of("flag"))
    assert all(row["flagged"][0] == 0 for row in events.of("step"))


@pytest.mark.parametrize("attack", FORGERIES)
@pytest.mark.parametrize("defense", ["audit:q=1", "cascade:q=1,screens=[]"])
def test_an_audit_of_everything_bans_whoever_forges_an_update_in_the_step_in_which_it_does(
    lab: Lab, attack: str, defense: str
) -> None:
    events, _ = run(lab, attack, defense, **WIDE)
    assert len(events.of("ban")) == len(attackers(lab, attack, **WIDE)) == 8
    assert {b["step"] for b in events.of("ban")} == {4, 6}
    assert all(row["flagged"] == [0, row["checked"][1]] for row in events.of("step"))
    assert {row["direction"] for row in events.of("flag")} == {"update"}
    assert_all_and_only_liars_are_banned_at_once(events)


@pytest.mark.parametrize("defense", ["audit:q=1", "cascade:q=1,screens=[]"])
@pytest.mark.parametrize("response", ["on_ban=drop", "quarantine=true", "quarantine=false"])
@pytest.mark.parametrize("aggregator", ["mean", "krum:strict=false"])
def test_it_does_so_under_bans_and_quarantines_and_with_a_robust_rule(
    lab: Lab, defense: str, response: str, aggregator: str
) -> None:
    grid = {**WIDE, **only(1, 4), "threat__waves": 2}
    for attack in ("update-sign-flip", "liar:what=noise"):
        events, _ = run(lab, attack, f"{defense},{response}", aggregator, **grid)
        assert events.of("end") == []
        assert_all_and_only_liars_are_banned_at_once(events)


def test_ranks_that_are_left_out_are_not_audited_and_harm_nobody(
    lab: Lab, gradients: list[Grads]
) -> None:
    """A rank is lost in the first step; honest or not, it has no part in what follows."""
    grid = {**FROZEN, "train__steps": 3, "grid__replicas": 5, **only(1, 4)}
    (bad,) = attackers(lab, "update-sign-flip", **grid)
    flags = [[0, 2, "activation", (bad.replica + 1) % 5]]
    component = weigher(flags=flags, on_ban="drop", severe=True)
    detectors = [{"name": "weigher", "params": {"flags": flags, "severe": True}}, "audit:q=1"]
    both = Component(
        name="layered",
        params={"detectors": detectors, "on_ban": "drop", "amnesty": False},
    )
    assert component.params["flags"] == flags
    events, _ = run(lab, "update-sign-flip", both, **grid)
    assert sorted(where(events.of("ban"))) == sorted([(1, bad.replica), (2, (bad.replica + 1) % 5)])
    plain = Plain(lab.scenario(**grid), lab.tokens)
    keep = [r for r in range(5) if r not in (bad.replica, (bad.replica + 1) % 5)]
    for step in (1, 2):
        assert_close(gradients[step], plain.mean(keep, step=step))


@pytest.mark.parametrize("aggregator", ["mean", "median"])
@pytest.mark.parametrize("defense", ["audit:q=1", "cascade:q=1,screens=[]"])
def test_an_update_of_nan_is_flagged_by_an_audit_and_never_enters(
    lab: Lab, gradients: list[Grads], defense: str, aggregator: str
) -> None:
    grid = {**FROZEN, "train__steps": 2, "grid__replicas": 5, **only(1, 4)}
    events, session = run(lab, "forger:what=nan", defense, aggregator, **grid)
    assert not any(row.get("skipped") for row in events.of("step"))
    assert all(g.isfinite().all() for step in gradients for g in step)
    assert all(w.isfinite().all() for w in weights(session).values())
    ((stage, bad),) = where(events.of("ban"))
    assert events.of("ban")[0]["step"] == 0
    plain = Plain(lab.scenario(**grid), lab.tokens)
    keep = [r for r in range(5) if r != bad]
    rows = torch.stack([plain.flat(plain.single(r), stage) for r in keep])
    got = plain.flat(gradients[0], stage)
    assert_close(got, rows.mean(0) if aggregator == "mean" else _median(rows))


# --- what is recorded -----------------------------------------------------------------------------


def test_flags_of_updates_are_recorded_as_such_and_counted(lab: Lab) -> None:
    drop = [(4, 1, "gradient", 2), (5, 3, "weights", 0)]
    events, _ = run(lab, "none", weigher(*drop), train__steps=7)
    rows = [(f["step"], f["stage"], f["direction"], f["replica"]) for f in events.of("flag")]
    assert rows == [(4, 1, "update", 2), (5, 3, "update", 0)]
    plain, _ = run(lab, "none", "script", train__steps=7)
    for row, other in zip(events.of("step"), plain.of("step"), strict=True):
        more = 2 * 4 * 4 if row["step"] >= 4 else 0  # two kinds, of all workers
        assert row["checked"] == [other["checked"][0] + more, 0]
        assert row["flagged"] == [int(row["step"] in (4, 5)), 0]
    clean = [t["clean"] for t in TOLD if (t["step"], t["stage"]) in ((4, 1), (5, 3))]
    everybody = [True] * 4
    assert clean == [
        *([True, True, False, True], everybody),
        *(everybody, [False, True, True, True]),
    ]


def test_a_lie_about_a_signal_that_shows_when_the_step_ends_is_no_false_flag(lab: Lab) -> None:
    events, _ = run(lab, "liar:what=noise", "cascade:q=1,screens=[]", **WIDE)
    assert {row["direction"] for row in events.of("flag")} == {"update"}
    assert_all_and_only_liars_are_banned_at_once(events)


def test_most_of_a_stage_flagged_is_an_amnesty_if_there_is_one(
    lab: Lab, gradients: list[Grads]
) -> None:
    drop = [(0, 1, "gradient", r) for r in range(3)]
    events, _ = run(lab, "none", weigher(*drop, amnesty=True, severe=True), **ONE)
    (row,) = events.of("amnesty")
    assert (row["step"], row["stage"], row["direction"], row["replicas"]) == (0, 1, "update", 3)
    assert not events.of("ban")
    assert_close(gradients[0], Plain(lab.scenario(**ONE), lab.tokens).mean(range(4)))
    assert [t["clean"] for t in TOLD if t["stage"] == 1] == [[True] * 4] * 2


def test_a_cell_whose_updates_are_judged_is_a_valid_record(lab: Lab, tmp_path: Path) -> None:
    plan = suite.make_plan(
        [lab.scenario(**WIDE)],
        [
            Component(name="label-flip"),
            Component.parse("nudge"),
            Component.parse("liar:what=noise"),
        ],
        [Component.parse("cascade:q=1,screens=[]")],
        {},
        unprotected=False,
    )
    done = suite.run(plan, tmp_path, Quiet(), threads=1)
    assert done[0].cell.label == "none-vs-none"
    for finished in done[1:]:
        scores = finished.result["scores"]
        assert finished.valid, scores["reason"]
        assert (scores["precision"], scores["recall"]) == (100.0, 100.0)
        assert scores["flags"]["false_flag_rate"] == 0
        assert scores["detection_steps_mean"] == 1
        assert read_events(finished.folder)


# --- faults ---------------------------------------------------------------------------------------

FAULTS = [
    ("raises", "check_updates raised ValueError: broken scales"),
    ("exits", "check_updates raised SystemExit"),
    ("returns None", "check_updates must return a Verdict"),
    ("returns too few", "check_updates must return a Verdict"),
    ("returns floats", "check_updates must return a Verdict"),
    ("returns wrong statistics", "the statistics of a Verdict must be"),
    ("names nobody", "check_updates raised RuntimeError"),
    ("changes active", "check_updates changed"),
    ("fails to learn", "learn_updates raised ValueError: broken memory"),
]


@pytest.mark.parametrize(("wrong", "message"), FAULTS)
@pytest.mark.parametrize("at", [5, 2])
def test_a_defense_that_breaks_the_contract_about_updates_is_at_fault(
    lab: Lab, wrong: str, message: str, at: int
) -> None:
    if wrong == "returns wrong statistics" and at == 2:
        pytest.skip("in the warm-up no flag counts, so nobody reads why")
    with pytest.raises(PluginError) as error:
        run(lab, "none", weigher(wrong=wrong, at=at), train__steps=7)
    assert error.value.party == "defense"
    assert "defense weigher: " in str(error.value)
    assert message in str(error.value)


def test_a_defense_that_asks_for_updates_and_cannot_judge_them_is_at_fault(lab: Lab) -> None:
    with pytest.raises(
        PluginError, match="mute: check_updates raised NotImplementedError"
    ) as error:
        run(lab, "none", "mute", train__steps=5)
    assert error.value.party == "defense"


def test_who_does_not_ask_for_updates_is_shown_none(lab: Lab) -> None:
    for defense in ("script", "audit:q=1", "layered:detectors=[script]"):
        run(lab, "forger:what=flip", defense, train__steps=5)
    assert KEPT == []
    run(lab, "forger:what=flip", "layered:detectors=[script, weigher]", train__steps=5)
    assert len(KEPT) == 5 * 2 * 4
    assert len(TOLD) == len(KEPT)


# --- weights --------------------------------------------------------------------------------------

HELD = "cascade:q=0,screens=[]"
"""Compares digests of the weights, and nothing else."""
PLAIN = torch.linspace(-1, 1, 500)
"""The weights of a stage."""


def honest(lab: Lab, defense: str | Component, **changes: Any) -> dict[str, Tensor]:
    return weights(run(lab, "none", defense, **changes)[1])


@pytest.mark.parametrize("attack", ["implant:what=add", "nudge:size=0.1", "implant:what=nan"])
def test_an_injection_is_found_at_once_and_leaves_no_trace(lab: Lab, attack: str) -> None:
    events, session = run(lab, attack, HELD, **WIDE)
    assert {(b["step"], b["reason"]) for b in events.of("ban")} == {(4, "severe"), (6, "severe")}
    assert_all_and_only_liars_are_banned_at_once(events)
    assert equal(weights(session), honest(lab, HELD, **WIDE))


def test_honest_workers_are_never_flagged_for_their_weights(lab: Lab) -> None:
    events, _ = run(lab, "none", HELD, train__steps=120)
    assert not events.of("flag")


def test_a_change_of_the_weights_below_rtol_passes_and_reaches_all(lab: Lab) -> None:
    grid = {**WIDE, **only(1, 4), "threat__waves": 1, "threat__fraction": 0.2}
    events, session = run(lab, "nudge:size=1e-5", HELD, **grid)
    assert events.of("act") and not events.of("flag")
    _, other = run(lab, "nudge:size=1e-5", "none", **grid)
    assert equal(weights(session), weights(other))
    assert not equal(weights(session), honest(lab, HELD, **grid))
    strict, _ = run(lab, "nudge:size=1e-5", HELD + ",rtol=1e-7", **grid)
    assert where(strict.of("ban")) == where(events.of("act"))


def held_after(changes: dict[int, Tensor]) -> tuple[Tensor, list[bool]]:
    """Return the weights of a stage after some replicas changed them, and who was flagged."""
    defense = registry.defenses.create(Component.parse(HELD))
    defense.start(Setup(4, 4, (1, 8, 16)))
    ledger = Ledger(defense.params, 4, 4)
    tamperer = Tamperer((), History(), "cpu", ledger.banned)
    tamperer.inject = lambda *_: changes  # type: ignore[method-assign, assignment]
    exchange = LiveExchange(tamperer, Inspector(defense, ledger, Events()))
    out = exchange.hold(1, PLAIN, 4, lambda _: None)  # type: ignore[arg-type, return-value]
    return out, [v > 0 for v in ledger.violations[1]]


def test_of_several_injectors_those_are_dropped_that_are_found_in_any_order() -> None:
    plain = PLAIN
    small, more = plain * (1 + 1e-6), plain + 1e-6 * torch.ones(500)
    changes = {0: plain + 1, 1: small, 2: more, 3: -plain}
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        out, flagged = held_after({r: changes[r] for r in order})
        assert flagged == [True, False, False, True]
        torch.testing.assert_close(out, small + more - plain, rtol=0, atol=1e-7)
    out, flagged = held_after({0: plain + 1, 3: plain * 2})
    assert flagged == [True, False, False, True]
    assert torch.equal(out, plain)
    out, flagged = held_after(dict.fromkeys(range(4), plain + 1))
    assert flagged == [True] * 4
    assert torch.equal(out, plain)


def test_a_rank_that_is_tainted_in_this_step_cannot_inject_meanwhile(lab: Lab) -> None:
    """A taint is about signals: what a worker holds after the step is its own doing."""
    grid = {**WIDE, **only(1, 4), "threat__waves": 1, "threat__fraction": 0.2}
    (bad,) = attackers(lab, "nudge", **grid)
    for quarantine in (True, False):
        detectors: list[Any] = [
            {"name": "script", "params": {"flags": [[4, 2, "activation", bad.replica]]}},
            HELD,
        ]
        params = {"detectors": detectors, "amnesty": False, "quarantine": quarantine}
        defense = Component(name="layered", params=params)
        events, session = run(lab, "nudge", defense, **grid)
        assert where(events.of("ban")) == [(bad.stage, bad.replica)]
        assert events.of("ban")[0]["step"] == 4
        assert equal(weights(session), honest(lab, defense, **grid))


def test_a_rank_that_another_stage_lost_injects_nothing(lab: Lab) -> None:
    grid = {**WIDE, **only(1, 4), "threat__waves": 1, "threat__fraction": 0.2}
    (bad,) = attackers(lab, "nudge", **grid)
    detectors: list[Any] = [
        {"name": "script", "params": {"flags": [[4, 2, "activation", bad.replica]]}}
    ]
    for more in ([], [HELD]):
        params = {"detectors": detectors + more, "amnesty": False, "violations": 1}
        defense = Component(name="layered", params=params | {"on_ban": "drop"})
        events, session = run(lab, "nudge:since=5", defense, **grid)
        assert where(events.of("ban")) == [(2, bad.replica)]
        assert equal(weights(session), honest(lab, defense, **grid))
