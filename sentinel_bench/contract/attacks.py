"""What every attack owes, one function for each property: see `sentinel_bench.contract`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import OWN, Attack, AttackContext, Knowledge, tier
from sentinel_bench.contract import _common
from sentinel_bench.contract._check import Violation, require
from sentinel_bench.contract._worker import SHAPES, Worker, create, same, seconds, tensors
from sentinel_bench.errors import KnowledgeError

DTYPES = (torch.float32, torch.bfloat16)
_FINITE = "keep what you divide by away from 0, or say `finite = False` if that is its purpose"
_PURPOSE = "it sends NaN or Inf on purpose (`finite = False`)"
_DRAW = "draw from ctx.generator (ctx.normal, ctx.uniform, ctx.chance), from nothing else"


def _cases(name: str) -> Iterator[tuple[str, Worker]]:
    """Yield a new worker for every shape and dtype, with words for them."""
    for label, shape in SHAPES.items():
        for dtype in DTYPES:
            yield f"{label}, {dtype}", Worker(name, shape=shape, dtype=dtype)


def can_be_made(name: str) -> None:
    """It can be made with its default parameters."""
    create(name)


def changes_something(name: str) -> str | None:
    """It sends something else than the honest signal."""
    if name == "none":
        return "it is the attack that does nothing"
    for case, worker in _cases(name):
        for direction in worker.directions:
            honest = [worker.honest() for _ in range(5)]
            require(
                any(not same([worker.send(direction, x)], [x]) for x in honest),
                f"what it sends for {direction} is the honest signal, five times ({case})",
                "override `signal`; an attack on weight gradients says `axis = 'weights'` and "
                "overrides `update`",
            )
    return None


def keeps_shape_dtype_and_device_and_stays_finite(name: str) -> None:
    """What it sends has the shape, dtype and device of the signal, and is finite."""
    for case, worker in _cases(name):
        for sent in worker.run():
            late = seconds(sent)
            require(
                0 <= late < math.inf,
                f"it sends a message {late} seconds late ({case})",
                "be late by a finite time",
            )
            for x in tensors(sent):
                _has_form(x, worker, case)


def _has_form(x: Tensor, worker: Worker, case: str) -> None:
    form, honest = (tuple(x.shape), x.dtype, x.device.type), (worker.shape, worker.dtype, "cpu")
    require(
        form == honest,
        f"it sends {form} for {honest} ({case})",
        "return the form of the argument: .to(x.dtype) after float32 arithmetic",
    )
    finite = not worker.attack.finite or x.isfinite().all()
    require(finite, f"it sends NaN or Inf ({case})", _FINITE)


def stays_finite_on_a_constant_signal(name: str) -> str | None:
    """It stays finite where all elements of a signal are equal, zero among them."""
    if not registry.attacks.get(name).finite:
        return _PURPOSE
    for value in (0.0, 1.0, -1e4, 1e-8):
        worker = Worker(name)
        x = torch.full(worker.shape, value)
        require(_finite(worker, x), f"NaN or Inf for a signal of {value:g} only", _FINITE)
    return None


def stays_finite_where_everybody_is_alike(name: str) -> str | None:
    """It stays finite where all replicas send the same, or the stage received zeros."""
    if not registry.attacks.get(name).finite:
        return _PURPOSE
    for received in (0.0, 1.0):
        worker = Worker(name)
        worker.received = torch.full(worker.shape, received)
        worker.others = torch.ones(4, *worker.shape)
        x = torch.ones(worker.shape)
        for _ in range(3):
            require(
                _finite(worker, x),
                f"NaN or Inf where everybody sends 1 and received {received:g}",
                _FINITE,
            )
    return None


def _finite(worker: Worker, x: Tensor) -> bool:
    sent = [worker.send(direction, x) for direction in worker.directions]
    return all(bool(y.isfinite().all()) for message in sent for y in tensors(message))


def works_at_the_ends_of_the_pipeline_and_without_honest_company(name: str) -> None:
    """It works where nothing was received, and where no honest replica is left."""
    worker = Worker(name)
    worker.received = None
    worker.others = torch.empty(0, *worker.shape)
    for x in (x for sent in worker.run() for x in tensors(sent)):
        require(
            x.shape == worker.shape,
            f"it sends shape {list(x.shape)} for {list(worker.shape)}",
            "be honest (return x) where `ctx.received` is None or `ctx.honest` is empty",
        )


def is_silent_or_late_only_as_a_fault(name: str) -> None:
    """It leaves the signal out, or sends it late, if it is a fault, and only then."""
    odd = any(not isinstance(sent, Tensor) for sent in Worker(name).run(6))
    fault = registry.attacks.get(name).fault
    require(
        odd == fault,
        f"it says `fault = {fault}`, and {'some' if odd else 'none'} of its messages are "
        "missing or late",
        "`fault = True` is for attacks that return Silence or Late",
    )


def sees_what_it_declares_and_nothing_else(name: str) -> None:
    """It knows what its class declares, and is refused what it does not."""
    attack = create(name)
    missing = (attack.knowledge | OWN) - attack.needs()
    require(
        not missing,
        f"`needs` leaves out {tier(missing)}, which the class declares",
        "add to super().needs(), take nothing away",
    )
    context = AttackContext(0, 0, 0, "activation", None, (), torch.Generator(), name=name)
    for what in set(Knowledge) - OWN:
        try:
            getattr(context, what.value)
        except KnowledgeError as error:
            told = name in str(error) and what.value in str(error) and what.name in str(error)
            require(told, f"it is refused {what.value} without a word: {error}", "")
        else:
            raise Violation(f"it was given {what.value} that nobody granted", "")


def leaves_its_input_its_past_and_what_it_received_alone(name: str) -> None:
    """It does not change the tensors that it is given."""
    for dtype in DTYPES:
        worker = Worker(name, dtype=dtype)
        for direction in worker.directions:
            x = worker.honest()
            given = worker.given(direction, x)
            before = {what: (t.clone(), t._version) for what, t in given.items()}
            worker.send(direction, x)
            for what, tensor in given.items():
                value, version = before[what]
                require(
                    torch.equal(tensor, value) and tensor._version == version,
                    f"it changes {what} in place ({direction}, {dtype})",
                    "work on a copy: x.clone(), or operations without a trailing underscore",
                )


def does_not_change_the_signal_through_what_it_sent(name: str) -> None:
    """What it sends shares no memory with the honest signal, unless it is that signal."""
    worker = Worker(name)
    x = worker.honest()
    value = x.clone()
    for sent in tensors(worker.send(worker.directions[0], x)):
        if sent is not x:
            sent.fill_(9)
            require(
                torch.equal(x, value),
                "it sends a view of the honest signal",
                "return a new tensor (.clone()), or the argument itself",
            )


def is_the_same_run_for_the_same_seed(name: str) -> None:
    """It sends the same again for the same seed."""
    for dtype in DTYPES:
        one, other = (Worker(name, dtype=dtype).run() for _ in range(2))
        require(same(one, other), f"two runs with one seed differ ({dtype})", _DRAW)


def does_not_touch_the_global_random_numbers(name: str) -> None:
    """It leaves the random numbers of torch, numpy and Python alone."""
    _common.draws_in_private(lambda: Worker(name).run(), _DRAW)


def that_draws_sends_something_else_for_another_seed(name: str) -> None:
    """It sends something else for another seed if it draws, and the same if it does not."""
    worker = Worker(name)
    sent = worker.run()
    equal = same(sent, Worker(name, seed=4).run())
    require(not (equal and worker.drew), "it draws, and sends the same for another seed", _DRAW)
    require(equal or worker.drew, "it draws from nowhere, and sends something else", _DRAW)


def two_workers_share_no_state(name: str) -> None:
    """Two workers of one run do not influence each other."""
    alone = Worker(name).run(6)
    one, other = Worker(name), Worker(name, seed=4)
    together = []
    for _ in range(6):
        together += one.run(1)
        other.run(1)
    require(
        same(alone, together),
        "it sends something else when another worker runs beside it",
        "keep state on `self`, made in __init__: not on the class, not in the module",
    )


def says_what_it_is(name: str) -> None:
    """It has a name, a goal, a formula, a source, a docstring, and says what it knows."""
    _common.describes_itself(registry.attacks, name, Attack)
    attack = registry.attacks.get(name)
    require(
        isinstance(attack.note, str) and (attack.note.strip() or not attack.fault),
        "it is a fault, and its `note` is empty",
        "say what has to be known to read its numbers",
    )
    declared = attack.knowledge
    require(
        isinstance(declared, frozenset) and all(isinstance(k, Knowledge) for k in declared),
        f"its `knowledge` is {declared!r}",
        "declare a frozenset of Knowledge, like frozenset({Knowledge.HONEST})",
    )
    memory = create(name).memory()
    require(
        isinstance(memory, int) and memory >= 0,
        f"`memory` returns {memory!r}",
        "return how many past signals it needs",
    )


def has_parameters_with_defaults_and_descriptions(name: str) -> None:
    """Its parameters have defaults and descriptions, and survive a record."""
    _common.has_sound_parameters(registry.attacks, name)


def refuses_a_misspelt_parameter(name: str) -> None:
    """A misspelt parameter is an error that names the nearest right one."""
    _common.refuses_unknown_parameters(registry.attacks, name)


CHECKS = (
    can_be_made,
    says_what_it_is,
    has_parameters_with_defaults_and_descriptions,
    refuses_a_misspelt_parameter,
    changes_something,
    keeps_shape_dtype_and_device_and_stays_finite,
    stays_finite_on_a_constant_signal,
    stays_finite_where_everybody_is_alike,
    works_at_the_ends_of_the_pipeline_and_without_honest_company,
    is_silent_or_late_only_as_a_fault,
    sees_what_it_declares_and_nothing_else,
    leaves_its_input_its_past_and_what_it_received_alone,
    does_not_change_the_signal_through_what_it_sent,
    is_the_same_run_for_the_same_seed,
    does_not_touch_the_global_random_numbers,
    that_draws_sends_something_else_for_another_seed,
    two_workers_share_no_state,
)
