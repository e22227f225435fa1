"""What every aggregator owes, tested on every aggregator of the registry."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Aggregator, AggregatorParams
from sentinel_bench.config import Component
from sentinel_bench.errors import ConfigError, PluginError

NAMES = registry.aggregators.names()
ROBUST = [name for name in NAMES if name != "mean"]
N, F, D = 15, 3, 40  # just enough for Bulyan

every_name = pytest.mark.parametrize("name", NAMES)
every_robust = pytest.mark.parametrize("name", ROBUST)


def create(name: str, **params: Any) -> Aggregator[Any]:
    return registry.aggregators.create(Component(name=name, params=params))


def draw(n: int = N, seed: int = 3) -> Tensor:
    """Honest rows: something shared, and noise of standard deviation 1; float64."""
    generator = torch.Generator().manual_seed(seed)
    shared = 5 * torch.randn(D, generator=generator, dtype=torch.float64)
    return shared + torch.randn(n, D, generator=generator, dtype=torch.float64)


@every_name
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_aggregate_keeps_dtype_device_and_size_of_the_rows(name, dtype):
    rows = draw().to(dtype)
    found = create(name)(rows, F)
    assert (found.shape, found.dtype, found.device) == ((D,), dtype, rows.device)
    exact = create(name)(rows.double(), F)
    tolerance = 1e-5 + 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


@every_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_aggregator_leaves_the_rows_alone_and_shares_no_memory_with_them(name, dtype):
    rows = draw().to(dtype)
    value, version = rows.clone(), rows._version
    found = create(name)(rows, F)
    assert torch.equal(rows, value)
    assert rows._version == version
    found.fill_(9)
    assert torch.equal(rows, value)


@every_name
def test_an_aggregate_is_the_same_again_and_keeps_no_state(name):
    aggregator = create(name)
    first = aggregator(draw(), F)
    aggregator(-100 * draw(seed=4), F)
    assert torch.equal(aggregator(draw(), F), first)


@every_name
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whole", [True, False])
def test_rows_that_are_not_finite_count_as_if_they_were_not_there(name, value, whole):
    rows = draw()
    rows[0, slice(None) if whole else 7] = value
    rows[6, slice(None) if whole else 3] = value
    good = [i for i in range(N) if i not in (0, 6)]
    expected = create(name)(draw()[good], F - 2)
    torch.testing.assert_close(create(name)(rows, F), expected, rtol=1e-12, atol=0)


@every_name
def test_more_rows_that_are_not_finite_than_f_are_survived_and_none_left_is_an_error(name):
    rows = draw()
    rows[1:] = math.nan
    torch.testing.assert_close(create(name)(rows, F), rows[0], rtol=1e-12, atol=0)
    rows[0, 0] = math.inf
    with pytest.raises(PluginError, match=f"aggregator {name}: none of 15 rows is finite"):
        create(name)(rows, F)


@every_name
@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_rows_does_not_matter(name, seed):
    rows = draw(seed=seed)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    aggregator = create(name)
    torch.testing.assert_close(aggregator(rows[order], F), aggregator(rows, F), rtol=1e-9, atol=0)


@every_name
def test_rows_that_agree_are_their_own_aggregate(name):
    rows = draw(1).expand(N, D)
    torch.testing.assert_close(create(name)(rows, F), rows[0], rtol=1e-12, atol=0)
    assert create(name)(torch.zeros(N, D), F).eq(0).all()


@every_name
@pytest.mark.parametrize("factor, shift", [(1e-12, 0.0), (1e12, 0.0), (-3.0, 7.0)])
def test_an_aggregate_follows_the_scale_and_the_place_of_the_rows(name, factor, shift):
    expected = create(name)(draw(), F) * factor + shift
    found = create(name)(draw() * factor + shift, F)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * abs(factor))


GARBAGE = {
    "1e6": lambda rows: rows.new_full(rows.shape, 1e6),
    "-1e6 and 1e6": lambda rows: 1e6 * rows.new_tensor([[-1], [1], [-1]]).expand(rows.shape),
    "reversed": lambda rows: -1000 * rows,
    "squares overflow": lambda rows: rows.new_full(rows.shape, 3e38),
    "one coordinate": lambda rows: rows.index_fill(1, torch.tensor([5]), 1e6),
}


@every_robust
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_f_rows_of_garbage_do_not_move_a_robust_rule_far(name, garbage, dtype):
    rows = draw().to(dtype)
    honest = rows[F:]
    rows[:F] = garbage(rows[:F])
    away = (create(name)(rows, F) - honest.mean(0)).norm()
    assert away <= (honest - honest.mean(0)).norm(dim=1).max()


@every_robust
@pytest.mark.parametrize("factor", [1e1, 1e3, 1e5, 1e9, 1e20, 1e36])
def test_an_outlier_of_any_size_costs_no_precision(name, factor):
    """In float32: what is small beside the outlier must not be lost in its rounding."""
    rows = draw().float()
    rows[:F] *= factor * torch.tensor([[1.0], [-1.0], [0.01]])
    found = create(name)(rows, F).double()
    torch.testing.assert_close(found, create(name)(rows.double(), F), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_moves_the_mean(garbage):
    rows = draw()
    honest = rows[F:].mean(0)
    rows[:F] = garbage(rows[:F])
    assert (create("mean")(rows, F) - honest).norm() > 100


@every_name
def test_relaxed_an_aggregator_makes_something_of_any_number_of_rows(name):
    aggregator = create(name, strict=False)
    for n in range(1, 9):
        rows = draw(n)
        for f in range(n + 2):
            found = aggregator(rows, f)
            assert (found >= rows.amin(0) - 1e-9).all(), (n, f)
            assert (found <= rows.amax(0) + 1e-9).all(), (n, f)


@every_name
def test_an_aggregator_says_what_it_is(name):
    aggregator = registry.aggregators.get(name)
    assert aggregator.name == name.rpartition("/")[2]
    for text in (aggregator.goal, aggregator.formula, aggregator.source, aggregator.version):
        assert text.strip()
    assert aggregator.__doc__ and aggregator.__doc__ != Aggregator.__doc__
    assert issubclass(aggregator.Params, AggregatorParams)
    assert registry.aggregators.identity(Component(name=name))["params"]["strict"] is True


@every_name
def test_parameters_have_valid_defaults_and_descriptions(name):
    params = registry.aggregators.params(Component(name=name))
    for key, info in type(params).model_fields.items():
        assert info.description, key
    again = Component(name=name, params=params.model_dump(mode="json", by_alias=True))
    assert registry.aggregators.params(again) == params


@every_name
def test_an_unknown_or_impossible_parameter_is_an_error_that_names_it(name):
    with pytest.raises(ConfigError, match=f"aggregator {name}: .*'stric'.* did you mean strict"):
        create(name, stric=False)
    with pytest.raises(ConfigError, match=f"aggregator {name}: f: .*-1"):
        create(name, f=-1)


def test_an_unknown_aggregator_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown aggregator 'krumm'; did you mean krum"):
        create("krumm")


def test_no_aggregator_imports_torch_before_it_is_used():
    code = (
        "import sys; from sentinel_bench import registry; r = registry.aggregators; "
        "[r.get(n) for n in r.names()]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
