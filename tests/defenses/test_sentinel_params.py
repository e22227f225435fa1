"""Parameters of `sentinel`: the published columns, what overrides them, and what is refused."""

from __future__ import annotations

import pytest

from sentinel_bench import registry
from sentinel_bench.api import ResponseParams
from sentinel_bench.config import Component
from sentinel_bench.defenses.sentinel import Averaging, SentinelParams
from sentinel_bench.errors import ConfigError

KEYS = ("beta", "k0", "alpha", "grow", "shrink", "lambda_", "eps")
PRINTED = {  # SENTINEL, arXiv 2603.03592, Table 14: activation, gradient
    "nanogpt-0.25b-12x8": (
        (0.90, 1.5, 0.01, 1.1, 0.9, 0.35, 0.01),
        (0.80, 3.0, 0.001, 1.01, 0.99, 0.15, 0.001),
    ),
    "llama-3-0.6b-16x8": (
        (0.90, 1.5, 0.0001, 1.1, 0.9, 0.15, 0.001),
        (0.80, 3.0, 0.001, 1.01, 0.99, 0.05, 0.00005),
    ),
    "llama-3-0.6b-16x16": (
        (0.90, 1.5, 0.01, 1.1, 0.9, 0.25, 0.0001),
        (0.80, 3.0, 0.01, 1.01, 0.99, 0.05, 0.0001),
    ),
    "llama-3-1.2b-8x8": (
        (0.99, 3.0, 0.001, 1.25, 0.95, 0.2, 0.01),
        (0.85, 3.0, 0.05, 1.01, 0.99, 0.05, 0.0001),
    ),
}


def params(text: str) -> SentinelParams:
    """The parameters that a command line like `sentinel:beta=.5` gives."""
    found = registry.defenses.params(Component.parse(text))
    assert isinstance(found, SentinelParams)
    return found


def columns(found: SentinelParams) -> tuple[tuple[float, ...], tuple[float, ...]]:
    pairs = [getattr(found, key) for key in KEYS]
    return tuple(p.activation for p in pairs), tuple(p.gradient for p in pairs)


@pytest.mark.parametrize("values", PRINTED)
@pytest.mark.parametrize("name", ["sentinel", "averaging"])
def test_values_names_a_column_of_the_published_table(name, values):
    assert columns(params(f"{name}:values={values}")) == PRINTED[values]


def test_the_default_is_the_column_of_the_0_6b_model_on_16_stages_and_8_replicas():
    assert columns(params("sentinel")) == PRINTED["llama-3-0.6b-16x8"]


def test_the_other_defaults_are_those_of_the_paper():
    found = params("sentinel")
    assert (found.violations, found.forgive_after, found.severity) == (5, 100, 100.0)
    assert (found.window, found.max_changes, found.slack) == (100, 10, 0.1)
    assert found.statistics == ("l1", "l2", "sfr", "swd")
    assert (found.projections, found.z_axis) == (32, "tensor")
    assert (found.amnesty, found.quarantine, found.substitute) == (True, False, "reference")


def test_a_single_number_stands_for_both_directions():
    found = params("sentinel:beta=0.5,lambda=0.3")
    assert (found.beta.activation, found.beta.gradient) == (0.5, 0.5)
    assert (found.lambda_.activation, found.lambda_.gradient) == (0.3, 0.3)
    assert (found.k0.activation, found.k0.gradient) == (1.5, 3.0)


def test_a_dotted_key_changes_one_direction_and_leaves_the_other_published():
    found = params("sentinel:values=llama-3-1.2b-8x8,k0.gradient=2,lambda.activation=0.4")
    assert (found.k0.activation, found.k0.gradient) == (3.0, 2.0)
    assert (found.lambda_.activation, found.lambda_.gradient) == (0.4, 0.05)
    assert (found.beta.activation, found.beta.gradient) == (0.99, 0.85)


def test_parameters_survive_a_round_trip_through_a_record():
    found = params("sentinel:values=nanogpt-0.25b-12x8,eps.gradient=0.5,statistics=[sfr]")
    assert SentinelParams.model_validate(found.model_dump(mode="json", by_alias=True)) == found
    assert SentinelParams.model_validate(found.model_dump()) == found
    assert "lambda" in found.model_dump(by_alias=True)


def test_sentinel_and_averaging_extend_the_response():
    assert issubclass(SentinelParams, ResponseParams)
    assert Averaging.Params is SentinelParams


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sentinel:lamda=0.3", "'lamda'; did you mean lambda"),
        ("sentinel:beta.activaton=0.3", "'beta.activaton'; did you mean activation"),
        ("sentinel:values=llama-3-4b", "values: .*llama-3-0.6b-16x8"),
        ("sentinel:statistics=[l3]", "statistics.0: "),
        ("sentinel:statistics=[]", "statistics: "),
        ("sentinel:beta=-0.1", "beta.activation: .*beta.gradient: "),
        ("sentinel:beta=fast", "beta.activation: "),
        ("sentinel:alpha.gradient=-1", "alpha.gradient: "),
        ("sentinel:slack=1.5", "slack: "),
        ("sentinel:window=1", "window: "),
        ("sentinel:min_steps=0", "min_steps: "),
        ("sentinel:max_changes=-1", "max_changes: "),
        ("sentinel:projections=0", "projections: "),
        ("sentinel:z_axis=batch", "z_axis: "),
        ("sentinel:severity=1", "severity: "),
        ("sentinel:violations=0", "violations: "),
        ("averaging:substitute=mean", "substitute: "),
    ],
)
def test_a_wrong_parameter_is_an_error_that_says_where(text, message):
    with pytest.raises(ConfigError, match=message) as error:
        params(text)
    assert str(error.value).startswith(f"defense {text.partition(':')[0]}: ")


def test_all_wrong_parameters_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        params("sentinel:window=0,lamda=1")
    assert "window: " in str(error.value)
    assert "'lamda'" in str(error.value)
