"""What every aggregator owes, one function for each property: see `sentinel_bench.contract`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Aggregator
from sentinel_bench.config import Component
from sentinel_bench.contract import _common
from sentinel_bench.contract._check import Violation, require
from sentinel_bench.errors import ConfigError, PluginError

N, F, D = 15, 3, 40  # just enough for Bulyan
GARBAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "1e6": lambda rows: rows.new_full(rows.shape, 1e6),
    "-1e6 and 1e6": lambda rows: 1e6 * rows.new_tensor([[-1], [1], [-1]]).expand(rows.shape),
    "reversed": lambda rows: -1000 * rows,
    "squares overflow": lambda rows: rows.new_full(rows.shape, 3e38),
    "one coordinate": lambda rows: rows.index_fill(1, torch.tensor([5]), 1e6),
}
"""What faulty rows hold, made of honest ones."""
_NO_PROMISE = "`requires` asks for nothing, so it promises nothing about faulty rows"
_COPY = "work on a copy: .clone(), or operations without a trailing underscore"


def create(name: str, **params: Any) -> Aggregator[Any]:
    """Make an aggregator."""
    return registry.aggregators.create(Component(name=name, params=params))


def draw(n: int = N, seed: int = 3) -> Tensor:
    """Honest rows: something shared, and noise of standard deviation 1; float64."""
    generator = torch.Generator().manual_seed(seed)
    shared = 5 * torch.randn(D, generator=generator, dtype=torch.float64)
    return shared + torch.randn(n, D, generator=generator, dtype=torch.float64)


def _promises(name: str) -> bool:
    return create(name).requires(0, F) is not None


def _same(
    found: Tensor, expected: Tensor, rtol: float, atol: float, when: str, remedy: str
) -> None:
    close = found.shape == expected.shape and torch.allclose(found, expected, rtol, atol)
    if not close:
        off = float((found - expected).abs().max()) if found.shape == expected.shape else math.nan
        raise Violation(f"the aggregate is off by {off:.3g} {when}", remedy)


def can_be_made(name: str) -> None:
    """It can be made with its default parameters."""
    create(name)


def says_what_it_is(name: str) -> None:
    """It has a name, a goal, a formula, a source and a docstring, and is strict by default."""
    _common.describes_itself(registry.aggregators, name, Aggregator)
    strict = registry.aggregators.identity(Component(name=name))["params"].get("strict")
    require(strict is True, f"`strict` is {strict} by default", "extend AggregatorParams")


def has_parameters_with_defaults_and_descriptions(name: str) -> None:
    """Its parameters have defaults and descriptions, and survive a record."""
    _common.has_sound_parameters(registry.aggregators, name)


def refuses_a_misspelt_or_impossible_parameter(name: str) -> None:
    """A misspelt or impossible parameter is an error that names it."""
    _common.refuses_unknown_parameters(registry.aggregators, name)
    try:
        create(name, f=-1)
    except ConfigError as error:
        require("-1" in str(error) and "f" in str(error), f"f=-1 gives {error}", "say so")
    else:
        raise Violation("it takes f=-1", "extend AggregatorParams, and leave its `f` alone")


def keeps_dtype_device_and_size_of_the_rows(name: str) -> None:
    """The aggregate is [d], of the dtype and device of the rows, and precise in each dtype."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        rows = draw().to(dtype)
        found = create(name)(rows, F)
        form = (tuple(found.shape), found.dtype, found.device)
        require(
            form == ((D,), dtype, rows.device),
            f"it returns {form} for rows of {D} numbers, {dtype}",
            "return one vector of the dtype of the rows",
        )
        exact = create(name)(rows.double(), F)
        tolerance = 1e-5 + 4 * torch.finfo(dtype).eps
        _same(
            found.double(), exact, tolerance, tolerance, f"in {dtype}",
            "lose no precision: subtract before squaring, sum in float32",
        )  # fmt: skip


def leaves_the_rows_alone_and_shares_no_memory_with_them(name: str) -> None:
    """It does not change the rows, and returns a new tensor."""
    for dtype in (torch.float32, torch.bfloat16):
        rows = draw().to(dtype)
        value, version = rows.clone(), rows._version
        found = create(name)(rows, F)
        unchanged = torch.equal(rows, value) and rows._version == version
        require(unchanged, f"it changes the rows in place ({dtype})", _COPY)
        found.fill_(9)
        require(torch.equal(rows, value), "it returns a view of the rows", "return a .clone()")


def keeps_no_state(name: str) -> None:
    """The same rows give the same aggregate, whatever came before."""
    aggregator = create(name)
    first = aggregator(draw(), F)
    aggregator(-100 * draw(seed=4), F)
    require(
        torch.equal(aggregator(draw(), F), first),
        "the same rows give another aggregate the second time",
        "keep nothing on `self` from call to call, and draw nothing",
    )


def does_not_touch_the_global_random_numbers(name: str) -> None:
    """It leaves the random numbers of torch, numpy and Python alone."""
    rows = draw()
    _common.draws_in_private(lambda: create(name)(rows, F), "an aggregate is not drawn")


def leaves_out_rows_that_are_not_finite(name: str) -> None:
    """Rows with NaN or Inf count as if they were not there."""
    good = [i for i in range(N) if i not in (0, 6)]
    expected = create(name)(draw()[good], F - 2)
    for value in (math.nan, math.inf, -math.inf):
        for whole in (True, False):
            rows = draw()
            rows[0, slice(None) if whole else 7] = value
            rows[6, slice(None) if whole else 3] = value
            _same(
                create(name)(rows, F), expected, 1e-12, 0,
                f"where two of {N} rows hold {value}",
                "override `aggregate`, not `__call__`; say `spreads = True` only if any NaN shows",
            )  # fmt: skip


def survives_that_hardly_a_row_is_finite(name: str) -> None:
    """One finite row is enough; where there is none, it says so."""
    rows = draw()
    rows[1:] = math.nan
    _same(
        create(name)(rows, F), rows[0], 1e-12, 0, "where one row alone is finite",
        "take any number of rows from one on: `aggregate` may get fewer than `requires` asks for",
    )  # fmt: skip
    rows[0, 0] = math.inf
    try:
        create(name)(rows, F)
    except PluginError as error:
        said = f"aggregator {registry.aggregators.get(name).name}: none of {N} rows is finite"
        require(said in str(error), f"where no row is finite, it says: {error}", "say what is so")
    else:
        raise Violation("it makes something of rows of which none is finite", "do not catch that")


def does_not_depend_on_the_order_of_the_rows(name: str) -> None:
    """The order of the rows does not matter."""
    for seed in range(5):
        rows = draw(seed=seed)
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
        aggregator = create(name)
        _same(
            aggregator(rows[order], F), aggregator(rows, F), 1e-9, 0,
            "when the rows come in another order", "let no row's number decide, but where rows tie",
        )  # fmt: skip


def agrees_where_all_rows_agree(name: str) -> None:
    """Rows that agree are their own aggregate, zeros among them."""
    for rows in (draw(1).expand(N, D), torch.zeros(N, D)):
        _same(
            create(name)(rows, F), rows[0], 1e-12, 0, "where all rows are equal",
            "keep what you divide by away from 0, and let weights sum to 1",
        )  # fmt: skip


def follows_the_scale_and_the_place_of_the_rows(name: str) -> None:
    """Rows that are scaled and moved give an aggregate that is scaled and moved."""
    for factor, shift in ((1e-12, 0.0), (1e12, 0.0), (-3.0, 7.0)):
        expected = create(name)(draw(), F) * factor + shift
        _same(
            create(name)(draw() * factor + shift, F), expected, 1e-6, 1e-6 * abs(factor),
            f"when the rows are {factor:g} times as large and moved by {shift:g}",
            "use no absolute thresholds: gradients have any size",
        )  # fmt: skip


def is_not_moved_far_by_f_rows_of_garbage(name: str) -> str | None:
    """Garbage in f rows does not move it away from the honest ones."""
    if not _promises(name):
        return _NO_PROMISE
    for label, garbage in GARBAGE.items():
        for dtype in (torch.float32, torch.float64):
            rows = draw().to(dtype)
            honest = rows[F:]
            rows[:F] = garbage(rows[:F])
            away = (create(name)(rows, F) - honest.mean(0)).norm()
            require(
                away <= (honest - honest.mean(0)).norm(dim=1).max(),
                f"{F} of {N} rows of garbage ({label}, {dtype}) move it by {away:.3g}",
                "it withstands less than `requires` promises",
            )
    return None


def loses_no_precision_to_outliers(name: str) -> str | None:
    """An outlier of any size costs no precision in float32."""
    if not _promises(name):
        return _NO_PROMISE
    for factor in (1e1, 1e3, 1e5, 1e9, 1e20, 1e36):
        rows = draw().float()
        rows[:F] *= factor * torch.tensor([[1.0], [-1.0], [0.01]])
        _same(
            create(name)(rows, F).double(), create(name)(rows.double(), F), 1e-4, 1e-3,
            f"in float32 where {F} rows are {factor:g} times as large",
            "let no sum or product mix outliers with the rest",
        )  # fmt: skip
    return None


def relaxed_makes_something_of_any_number_of_rows(name: str) -> None:
    """With `strict: false` it makes something within the rows of any number of them."""
    aggregator = create(name, strict=False)
    for n in range(1, 9):
        rows = draw(n)
        for f in range(n + 2):
            found = aggregator(rows, f)
            inside = (found >= rows.amin(0) - 1e-9) & (found <= rows.amax(0) + 1e-9)
            require(
                inside.all(),
                f"with strict=false, its aggregate of {n} rows and f = {f} lies outside of them",
                "do the nearest possible thing, for example cut f down to (n - 1) // 2",
            )


CHECKS = (
    can_be_made,
    says_what_it_is,
    has_parameters_with_defaults_and_descriptions,
    refuses_a_misspelt_or_impossible_parameter,
    keeps_dtype_device_and_size_of_the_rows,
    leaves_the_rows_alone_and_shares_no_memory_with_them,
    keeps_no_state,
    does_not_touch_the_global_random_numbers,
    leaves_out_rows_that_are_not_finite,
    survives_that_hardly_a_row_is_finite,
    does_not_depend_on_the_order_of_the_rows,
    agrees_where_all_rows_agree,
    follows_the_scale_and_the_place_of_the_rows,
    is_not_moved_far_by_f_rows_of_garbage,
    loses_no_precision_to_outliers,
    relaxed_makes_something_of_any_number_of_rows,
)
