"""What every aggregator owes, checked on every aggregator of the registry."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sentinel_bench import registry
from sentinel_bench.contract import Check, checks_of
from sentinel_bench.contract.aggregators import GARBAGE, F, create, draw
from sentinel_bench.errors import ConfigError

REGISTRY = registry.aggregators
CHECKS = [check for name in REGISTRY.names() for check in checks_of(REGISTRY, name)]
NOT_ASKED = {
    ("mean", "is-not-moved-far-by-f-rows-of-garbage"),
    ("mean", "loses-no-precision-to-outliers"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.plugin}-{check}")
def test_every_aggregator_keeps_the_contract(check: Check) -> None:
    assert (check() is not None) is ((check.plugin, check.name) in NOT_ASKED)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_moves_the_mean(garbage):
    rows = draw()
    honest = rows[F:].mean(0)
    rows[:F] = garbage(rows[:F])
    assert (create("mean")(rows, F) - honest).norm() > 100


def test_an_unknown_aggregator_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown aggregator 'krumm'; did you mean krum"):
        create("krumm")


def test_no_aggregator_imports_torch_before_it_is_used():
    code = (
        "import sys; from sentinel_bench import registry; r = registry.aggregators; "
        "[r.get(n) for n in r.names()]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
