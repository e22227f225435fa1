"""Where stages and replicas are put, and what is refused before anything starts. No processes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import pytest

from sentinel_bench import registry
from sentinel_bench.api import Attack, Defense, Knowledge, Recovery, Redundancy, ResponseParams
from sentinel_bench.config import Cell, Component, Frozen, Named, Scenario
from sentinel_bench.errors import ConfigError
from sentinel_bench.placement import Link, Placement

Make = Callable[..., Scenario]


def cell(scenario: Scenario, attack: str = "none", defense: str = "none") -> Cell:
    return Cell(scenario=scenario, attack=Component.parse(attack), defense=Component.parse(defense))


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, rate, delay",
    [
        ("80mbps,50ms", 80e6, 0.05),
        ("50ms,80mbps", 80e6, 0.05),
        ("1.5gbps", 1.5e9, 0.0),
        ("56kbps", 56e3, 0.0),
        ("250us", None, 250e-6),
        ("2s", None, 2.0),
        ("0s", None, 0.0),
        (" 80 Mbps , 50 MS ", 80e6, 0.05),
    ],
)
def test_a_link_is_a_rate_a_delay_or_both(text: str, rate: float | None, delay: float) -> None:
    link = Link.parse(text)
    assert link.rate == rate
    assert link.delay == pytest.approx(delay)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ",", "80", "mbps", "80mbps,", ",50ms", "80mbps 50ms", "80mbps,50ms,1s",
        "80mbps,1gbps", "50ms,1s", "80mbs", "50min", "-1ms", "1e3ms", "80mbps;50ms", "nanms",
        "infmbps", "٣ms", ".5ms", "1.ms", "80mbps\n50ms",
    ],
)  # fmt: skip
def test_what_is_no_link_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Link.parse(text)
    assert str(error.value) == (
        f"--link {text!r}: write a rate (kbps, mbps, gbps), a delay (us, ms, s) or both, "
        "for example 80mbps,50ms"
    )


@pytest.mark.parametrize("text", ["0mbps", "0.0gbps,1s"])
def test_a_link_without_any_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="at a rate of 0 nothing arrives"):
        Link.parse(text)


@pytest.mark.parametrize("unit", ["gbps", "s"])
def test_a_link_beyond_all_numbers_is_refused_in_one_line(unit: str) -> None:
    with pytest.raises(ConfigError, match="should be a finite number"):
        Link.parse("9" * 400 + unit)


def test_bytes_take_their_bits_over_the_rate() -> None:
    assert Link.parse("8mbps").seconds(500_000) == pytest.approx(0.5)
    assert Link.parse("50ms").seconds(10**12) == 0.0


# --- segments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "processes, groups, chunks, stages, sizes",
    [
        (1, 1, 1, 4, [4]),
        (4, 1, 1, 4, [1, 1, 1, 1]),
        (4, 2, 1, 5, [2, 3]),
        (3, 1, 1, 5, [2, 1, 2]),
        (2, 1, 2, 5, [1, 1, 2, 1]),
        (2, 2, 1, 5, [5]),
    ],
)
def test_segments_follow_one_another(
    processes: int, groups: int, chunks: int, stages: int, sizes: list[int]
) -> None:
    placement = Placement(processes=processes, groups=groups, chunks=chunks)
    assert [len(s) for s in placement.segments(stages)] == sizes


def test_every_cut_covers_all_stages_once_and_as_evenly_as_can_be() -> None:
    for stages in range(2, 40):
        for length in range(1, stages + 1):
            for chunks in range(1, stages // length + 1):
                placement = Placement(processes=length, chunks=chunks)
                segments = placement.segments(stages)
                assert [*chain(*segments)] == [*range(stages)]
                sizes = {len(s) for s in segments}
                assert 0 < min(sizes) <= max(sizes) <= min(sizes) + 1
                held = [placement.stages_of(rank, stages) for rank in range(length)]
                assert all(len(own) == chunks for own in held)
                assert [held[i % length][i // length] for i in range(len(segments))] == segments


def test_each_group_of_replicas_holds_all_stages() -> None:
    placement = Placement(processes=6, groups=2)
    held = [placement.stages_of(rank, 5) for rank in range(6)]
    assert held == [[range(2)], [range(2, 3)], [range(3, 5)]] * 2


@pytest.mark.parametrize(
    "placement, rank, words",
    [
        (Placement(processes=2), 0, "stages 0-1"),
        (Placement(processes=4), 3, "stage 3"),
        (Placement(processes=4, groups=2), 2, "stages 0-1, replica group 1"),
        (Placement(processes=4, groups=4), 3, "stages 0-3, replica group 3"),
        (Placement(processes=2, chunks=2), 1, "stages 1, 3"),
    ],
)
def test_a_rank_is_said_by_what_it_holds(placement: Placement, rank: int, words: str) -> None:
    assert placement.stages_in_words(rank, 4) == words


def test_the_record_says_all_but_how_patient_the_run_was() -> None:
    placement = Placement(processes=2, link=Link.parse("8mbps"), timeout=7)
    assert placement.record() == {
        "processes": 2,
        "groups": 1,
        "order": "gpipe",
        "chunks": 1,
        "link": {"rate": 8e6, "delay": 0.0},
        "torchrun": False,
    }


@pytest.mark.parametrize("rank, follows", [("0", False), ("1", True), (None, False)])
def test_all_ranks_of_torchrun_but_the_first_follow(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, follows: bool
) -> None:
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    assert Placement(processes=2, torchrun=True).follows is follows
    assert Placement(processes=2).follows is False


# --- what cannot be placed ------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"processes": 3, "groups": 2},
        {},
        "--processes 3 is no multiple of --replica-groups 2",
    ),
    (
        {"processes": 1, "groups": 2},
        {},
        "--processes 1 is no multiple of --replica-groups 2",
    ),
    (
        {"processes": 3, "groups": 3},
        {},
        "4 replicas cannot be shared by --replica-groups 3",
    ),
    (
        {"processes": 8, "groups": 8},
        {},
        "4 replicas cannot be shared by --replica-groups 8",
    ),
    (
        {"processes": 5},
        {},
        "5 processes with 1 segments each need as many stages, but there are 4: "
        "lower --processes or --chunks",
    ),
    (
        {"processes": 2, "chunks": 3, "order": "interleaved"},
        {"train__microbatches": 2, "train__batch_size": 2},
        "2 processes with 3 segments each need as many stages, but there are 4: "
        "lower --processes or --chunks",
    ),
    (
        {"processes": 4, "order": "1f1b"},
        {"train__microbatches": 2, "train__batch_size": 4},
        "1f1b over 4 processes needs as many microbatches, not 2: set --microbatches",
    ),
    (
        {"processes": 2, "order": "interleaved"},
        {"train__microbatches": 2, "train__batch_size": 2},
        "interleaved needs --chunks of at least 2, and only it takes several",
    ),
    (
        {"processes": 2, "chunks": 2},
        {},
        "interleaved needs --chunks of at least 2, and only it takes several",
    ),
    (
        {"processes": 1, "chunks": 2, "order": "interleaved"},
        {"train__microbatches": 2, "train__batch_size": 2},
        "interleaved needs at least 2 processes and a multiple of them in microbatches; "
        "there are 1 processes and 2 microbatches",
    ),
    (
        {"processes": 2, "chunks": 2, "order": "interleaved"},
        {"train__microbatches": 3, "train__batch_size": 3},
        "interleaved needs at least 2 processes and a multiple of them in microbatches; "
        "there are 2 processes and 3 microbatches",
    ),
]


@pytest.mark.parametrize("placement, changes, message", REFUSED)
def test_what_cannot_be_placed_is_refused_with_what_to_do(
    make_scenario: Make, placement: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Placement(**placement).check(make_scenario(**changes))
    assert str(error.value) == message


FINE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"processes": 4}, {}),
    ({"processes": 3}, {"grid__stages": 5}),
    ({"processes": 4, "groups": 4}, {}),
    ({"processes": 8, "groups": 2}, {}),
    ({"processes": 2, "order": "1f1b"}, {"train__microbatches": 2, "train__batch_size": 2}),
    ({"processes": 8, "groups": 4, "order": "1f1b"}, {"train__microbatches": 3,
                                                      "train__batch_size": 3}),
    ({"processes": 2, "chunks": 2, "order": "interleaved"},
     {"train__microbatches": 4, "train__batch_size": 4}),
    ({"processes": 4, "groups": 2, "chunks": 2, "order": "interleaved"},
     {"train__microbatches": 2, "train__batch_size": 2}),
]  # fmt: skip


@pytest.mark.parametrize("placement, changes", FINE)
def test_what_can_be_placed_is_not_refused(
    make_scenario: Make, placement: dict[str, Any], changes: dict[str, Any]
) -> None:
    Placement(**placement).check(make_scenario(**changes))


# --- cells that need all stages in one process ----------------------------------------------------

TWO = Placement(processes=2)
GROUPS = Placement(processes=2, groups=2)
ALONE = Placement()


class Copier(Defense[ResponseParams]):
    name: ClassVar[str] = "copier"
    goal = formula = source = "test"

    def redundancy(self) -> Redundancy:
        return Redundancy(resync=1, rtol=0.0)


class Repeater(Defense[ResponseParams]):
    """Has passes done again, and keeps no copies for it."""

    name: ClassVar[str] = "repeater"
    goal = formula = source = "test"

    def recover(self, suspects: frozenset[int], passes: int, last: Recovery) -> Recovery | None:
        return Recovery(skip=True)


class Comparer(Defense[ResponseParams]):
    name: ClassVar[str] = "comparer"
    goal = formula = source = "test"
    across_stages = True


class Whole(Defense[ResponseParams]):
    name: ClassVar[str] = "whole"
    goal = formula = source = "test"
    whole_batch = True


class Reader(Attack[Any]):
    """Knows the model."""

    name: ClassVar[str] = "reader"
    goal = formula = source = "test"
    knowledge = frozenset({Knowledge.OWN, Knowledge.MODEL})


class BoxParams(Frozen):
    attack: Named


class Box(Attack[BoxParams]):
    """Holds another attack."""

    name: ClassVar[str] = "box"
    goal = formula = source = "test"
    Params = BoxParams

    @classmethod
    def wraps(cls, params: BoxParams) -> tuple[Component, ...]:
        return (params.attack,)


class Dealer(Attack[Any]):
    """Every attacker gets to know the model, but only by what it is dealt."""

    name: ClassVar[str] = "dealer"
    goal = formula = source = "test"

    @classmethod
    def deal(cls, component: Component, mode: Any, rng: Any) -> tuple[Component, Any]:
        return Component(name="reader"), mode


@pytest.fixture(autouse=True)
def _plugins(plug: Callable[..., None]) -> None:
    plug(Copier, Repeater, Comparer, Whole, Reader, Box, Dealer)


@pytest.mark.parametrize("defense", ["redundant-block", "skip-layer", "copier"])
@pytest.mark.parametrize("placement", [TWO, GROUPS])
def test_copies_of_stages_stay_in_one_process(
    make_scenario: Make, defense: str, placement: Placement
) -> None:
    with pytest.raises(ConfigError) as error:
        placement.check_cell(cell(make_scenario(), defense=defense))
    assert str(error.value) == (
        f"defense {defense} keeps copies of stages at their neighbours and repeats a pass in the "
        "middle: it runs in one process, with --microbatches 1"
    )
    ALONE.check_cell(cell(make_scenario(), defense=defense))


def test_copies_of_stages_take_no_microbatches(make_scenario: Make) -> None:
    scenario = make_scenario(train__microbatches=2, train__batch_size=2)
    with pytest.raises(ConfigError, match="--microbatches 1"):
        ALONE.check_cell(cell(scenario, defense="redundant-block"))


def test_a_pass_is_done_again_in_one_process_only(make_scenario: Make) -> None:
    for placement in (TWO, GROUPS):
        with pytest.raises(ConfigError, match="repeats a pass in the middle: it runs in one"):
            placement.check_cell(cell(make_scenario(), defense="repeater"))
    ALONE.check_cell(cell(make_scenario(), defense="repeater"))


def test_a_defense_that_compares_stages_stays_in_one_process(make_scenario: Make) -> None:
    with pytest.raises(ConfigError) as error:
        TWO.check_cell(cell(make_scenario(), defense="comparer"))
    assert str(error.value) == (
        "defense comparer compares stages with each other: it runs in one process"
    )
    ALONE.check_cell(
        cell(make_scenario(train__microbatches=2, train__batch_size=2), defense="comparer")
    )


def test_a_defense_that_needs_the_batch_takes_no_microbatches(make_scenario: Make) -> None:
    scenario = make_scenario(train__microbatches=2, train__batch_size=2)
    for placement in (ALONE, TWO, GROUPS):
        with pytest.raises(ConfigError) as error:
            placement.check_cell(cell(scenario, defense="whole"))
        assert str(error.value) == (
            "defense whole needs the batch of a step in one piece: --microbatches 1"
        )
        placement.check_cell(cell(make_scenario(), defense="whole"))


@pytest.mark.parametrize(
    "attack",
    ["label-flip", "backdoor", "reader", "box:attack=reader", "dealer",
     "box:attack=label-flip", "box:attack='box:attack=backdoor'"],
)  # fmt: skip
def test_an_attack_on_the_whole_model_needs_all_stages(make_scenario: Make, attack: str) -> None:
    with pytest.raises(ConfigError) as error:
        TWO.check_cell(cell(make_scenario(), attack=attack))
    name = attack.partition(":")[0]
    assert str(error.value) == (
        f"attack {name} needs the whole model at its worker: it runs in one process, or with as "
        "many --replica-groups as --processes"
    )
    ALONE.check_cell(cell(make_scenario(), attack=attack))
    GROUPS.check_cell(cell(make_scenario(), attack=attack))


def test_all_other_built_in_cells_can_be_placed(make_scenario: Make) -> None:
    needs_it_all = {"label-flip", "backdoor"}
    for attack in registry.attacks.names():
        if "/" in attack or attack in needs_it_all | {"reader", "box", "dealer"}:
            continue
        TWO.check_cell(cell(make_scenario(), attack=attack))
