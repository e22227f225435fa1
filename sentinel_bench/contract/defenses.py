"""What every defense owes, one function for each property: see `sentinel_bench.contract`.

Signals come as the harness gives them: what was not finite or could not be read is zeros, and not
active. `signals.again` is None but where the ground truth is looked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Defense, ResponseParams, Signals
from sentinel_bench.config import Component
from sentinel_bench.contract import _common, _preview, _secrets
from sentinel_bench.contract._check import require
from sentinel_bench.contract._grid import (
    BOUNDARIES,
    SHAPE,
    Grid,
    inactive,
    outcome,
    require_sound,
    with_rows,
)

_STATE = "keep state on `self`, made in `start`; draw from a generator seeded there"


def can_be_made(name: str) -> None:
    """It can be made with its default parameters, and started."""
    Grid(name)


def says_what_it_is(name: str) -> None:
    """It has a name, a goal, a formula, a source and a docstring."""
    _common.describes_itself(registry.defenses, name, Defense)
    defense = registry.defenses.get(name)
    params = defense.Params
    require(
        isinstance(defense.across_stages, bool) and isinstance(defense.whole_batch, bool),
        f"`across_stages` is {defense.across_stages!r}, `whole_batch` {defense.whole_batch!r}",
        "say True or False: they decide how it may be spread over processes",
    )
    require(
        issubclass(params, ResponseParams),
        f"its parameters are {params.__name__}",
        "extend ResponseParams: what follows a flag is set there",
    )


def has_parameters_with_defaults_and_descriptions(name: str) -> None:
    """Its parameters have defaults and descriptions, and survive a record."""
    _common.has_sound_parameters(registry.defenses, name)


def refuses_a_misspelt_parameter(name: str) -> None:
    """A misspelt parameter is an error that names the nearest right one."""
    _common.refuses_unknown_parameters(registry.defenses, name)


def leaves_all_that_it_is_given_alone(name: str) -> None:
    """It does not change signals or masks."""
    honest: Callable[[Signals], Signals] = lambda signals: signals  # noqa: E731
    for change in (honest, inactive(1)):
        grid = Grid(name)
        for _ in range(25):
            for stage, direction in BOUNDARIES:
                _leaves_alone(grid.defense, change(grid.signals(stage, direction)))
            grid.defense.end_step(grid.now)
            grid.now += 1


def _leaves_alone(defense: Defense[ResponseParams], signals: Signals) -> None:
    clean = signals.active.clone()
    given = {"sent": signals.sent, "active": signals.active, "clean": clean}
    if signals.received is not None:
        given["received"] = signals.received
    before = {what: (t.clone(), t._version) for what, t in given.items()}
    for method, arguments in (("check", ()), ("learn", (clean,))):
        getattr(defense, method)(signals, *arguments)
        for what, tensor in given.items():
            value, version = before[what]
            require(
                torch.equal(tensor, value) and tensor._version == version,
                f"`{method}` changes `{what}` in place",
                "work on a copy: .clone(), or operations without a trailing underscore",
            )


def gives_verdicts_of_the_right_form(name: str) -> None:
    """Verdicts have the right form in float32 and bfloat16, and the reference that of a signal."""
    for dtype in (torch.float32, torch.bfloat16):
        verdicts = Grid(name, dtype=dtype).warm_up().run(10)
        require_sound(verdicts, [True] * 4, f"({dtype})")
        for reference in (v.reference for v in verdicts if v.reference is not None):
            form = (tuple(reference.shape), reference.dtype)
            require(
                form == (SHAPE, dtype),
                f"its reference is {form} for signals of {(SHAPE, dtype)}",
                "keep the reference of one replica's signal, and give it the signal's dtype",
            )


def never_takes_in_what_was_not_finite(name: str) -> None:
    """Signals that were NaN, Inf or unreadable leave no trace in its state."""
    grid = Grid(name).warm_up()
    require_sound(grid.run(12, inactive(2)), [True, True, False, True], "with one lost")
    require_sound(grid.run(12), [True] * 4, "after one was lost")


def passes_steps_in_which_nobody_is_active(name: str) -> None:
    """It flags nobody where nobody is active (all banned), and goes on after it."""
    grid = Grid(name).warm_up()
    verdicts = grid.run(5, inactive(0, 1, 2, 3))
    require_sound(verdicts, [False] * 4, "with nobody active")
    require_sound(grid.run(25), [True] * 4, "after nobody was active")


def works_with_one_replica(name: str) -> None:
    """One replica is enough."""
    grid = Grid(name, replicas=1).warm_up()
    require_sound(grid.run(25), [True], "with one replica")
    require_sound(grid.run(2, inactive(0)), [False], "with one replica, which is lost")


def flags_nobody_where_all_send_the_same(name: str) -> None:
    """It flags nobody where all replicas send the same in every step (ties)."""
    for replicas in (1, 4):
        verdicts = Grid(name, replicas=replicas, spread=0.0).warm_up().run(40)
        require_sound(verdicts, [True] * replicas, "where all send the same")
        require(
            not any(v.flagged.any() for v in verdicts),
            f"it flags honest workers where all {replicas} send the same, always",
            "give fences a least width: spreads of 0 occur",
        )


def never_flags_who_is_not_active(name: str) -> None:
    """It does not flag a replica that is not active, whatever that sends."""
    verdicts = Grid(name).warm_up().run(5, lambda s: with_rows(s, [1, 2], 1e6, active=False))
    require_sound(verdicts, [True, False, False, True], "where two that are not active send 1e6")
    require(
        not any(v.severe.any() for v in verdicts),
        "it finds the active ones severe where two that are not active send 1e6",
        "leave out who is not active, before any mean or median",
    )


def follows_the_replicas_when_these_are_permuted(name: str) -> None:
    """Its verdicts do not depend on the order of the replicas."""
    order, odd = [2, 0, 3, 1], 1
    verdicts = []
    for grid, row in ((Grid(name), odd), (Grid(name, order=order), order.index(odd))):
        grid.warm_up()
        verdicts.append(grid.run(5, lambda s, row=row: with_rows(s, [row], 30.0, active=True)))
    for straight, permuted in zip(*verdicts, strict=True):
        require(
            permuted.flagged.tolist() == straight.flagged[order].tolist()
            and permuted.severe.tolist() == straight.severe[order].tolist(),
            "its verdicts are others when the replicas come in another order",
            "let no replica's number decide",
        )


def gives_the_same_verdicts_for_the_same_signals(name: str) -> None:
    """The same signals give the same verdicts."""
    one, other = Grid(name).warm_up(), Grid(name).warm_up()
    require(
        outcome(one.run(30)) == outcome(other.run(30)),
        "two instances come to different verdicts on the same signals",
        _STATE,
    )


def does_not_touch_the_global_random_numbers(name: str) -> None:
    """It leaves the random numbers of torch, numpy and Python alone."""
    _common.draws_in_private(lambda: Grid(name).warm_up().run(10), _STATE)


def can_be_copied_with_its_state(name: str) -> None:
    """A deep copy is an equal and independent state: cells share a warm-up that way."""
    original = Grid(name).warm_up()
    fork, witness = copy.deepcopy(original), copy.deepcopy(original)
    require(fork.defense.params == original.defense.params, "a copy has other parameters", _STATE)
    fork.run(20, lambda s: with_rows(s, range(4), 7.0, active=True))
    ours, untouched = original.run(20), witness.run(20)
    equal = outcome(ours) == outcome(untouched) and all(
        _preview.spoken(a) == _preview.spoken(b) for a, b in zip(ours, untouched, strict=True)
    )
    require(equal, "what a copy of it sees changes its own verdicts", _STATE)


def states_its_memory(name: str) -> None:
    """It says how many bytes it keeps, and keeps no more with every step."""
    grid = Grid(name)
    sizes = []
    for _ in range(3):
        grid.run(5)
        sizes.append(grid.defense.state_bytes())
    require(
        sizes == [sizes[0]] * 3 and sizes[0] >= 0,
        f"`state_bytes` says {sizes} after 5, 10 and 15 steps",
        "allocate in `start`, and bound what is kept; add up `tensor.nbytes`",
    )
    if grid.defense.passive:
        require(sizes[0] == 0, f"it looks at nothing and keeps {sizes[0]} bytes", "return 0")
    elif grid.defense.redundancy() is None:
        require(
            sizes[0] > 0 or not _holds(grid.defense),
            f"`state_bytes` says 0, and it holds {_holds(grid.defense)} bytes of tensors",
            "override `state_bytes`: add up `tensor.nbytes`",
        )


def _holds(defense: Defense[ResponseParams]) -> int:
    """Return the bytes of all tensors and arrays that a defense can reach."""
    everything = _secrets.reachable(vars(defense))
    return sum(x.nbytes for x in everything if isinstance(x, Tensor | np.ndarray))


def cannot_reach_the_ground_truth(name: str) -> None:
    """Nothing that it is given, or keeps, leads to who attacks."""
    _shown(name, _secrets.truth_in_signals(name))


def cannot_reach_the_ground_truth_through_autograd(name: str) -> None:
    """No tensor that it is given leads to who attacks through the graph of autograd."""
    _shown(name, _secrets.truth_in_autograd(name))


def _shown(name: str, anything: bool) -> None:
    passive = registry.defenses.create(Component(name=name)).passive
    require(
        anything is not passive,
        f"it says `passive = {passive}`, and was{'' if anything else ' not'} shown signals",
        "`passive` is for a defense that never looks",
    )


CHECKS = (
    can_be_made,
    says_what_it_is,
    has_parameters_with_defaults_and_descriptions,
    refuses_a_misspelt_parameter,
    leaves_all_that_it_is_given_alone,
    gives_verdicts_of_the_right_form,
    never_takes_in_what_was_not_finite,
    passes_steps_in_which_nobody_is_active,
    works_with_one_replica,
    flags_nobody_where_all_send_the_same,
    never_flags_who_is_not_active,
    follows_the_replicas_when_these_are_permuted,
    gives_the_same_verdicts_for_the_same_signals,
    does_not_touch_the_global_random_numbers,
    can_be_copied_with_its_state,
    states_its_memory,
    cannot_reach_the_ground_truth,
    cannot_reach_the_ground_truth_through_autograd,
    _preview.says_in_a_preview_what_it_then_says,
    _preview.comes_to_the_same_verdicts_when_it_is_asked_all_the_time,
    _preview.previews_whatever_the_order_of_questions,
)
