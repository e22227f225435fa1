"""What every attack owes, checked on every attack of the registry."""

from __future__ import annotations

import pytest

from sentinel_bench import registry
from sentinel_bench.config import Component
from sentinel_bench.contract import Check, checks_of
from sentinel_bench.errors import ConfigError

CHECKS = [check for name in registry.attacks.names() for check in checks_of(registry.attacks, name)]
NOT_ASKED = {
    ("none", "changes-something"),
    ("non-finite", "stays-finite-on-a-constant-signal"),
    ("non-finite", "stays-finite-where-everybody-is-alike"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.plugin}-{check}")
def test_every_attack_keeps_the_contract(check: Check) -> None:
    assert (check() is not None) is ((check.plugin, check.name) in NOT_ASKED)


def test_an_unknown_attack_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean .*random-sign"):
        registry.attacks.get("randomsign")


@pytest.mark.parametrize(
    "text",
    [
        "sign-flip:rate=0",
        "sign-flip:rate=1.1",
        "random-sign:p=0",
        "random-sign:p=1.01",
        "random-value:scale=0",
        "delay:steps=0",
        "delay:steps=1.5",
        "bias:sigma=0",
        "bias:kind=fixed",
        "invisible-noise:p=0.5",
        "invisible-noise:p=1",
        "invisible-noise:axis=batch",
        "scaling:alpha=.nan",
        "ones:value=.inf",
        "gaussian-noise:rate=0",
        "non-finite:p=0",
        "token-shift:by=0",
        "slow-drift:ramp=0",
        "mirror-surrogate:ridge=0",
        "mean-replay:window=0",
        "label-flip:shift=0",
        "alie:z=0",
        "on-off:burst=0",
        "on-off:period=1",
        "fence-rider:margin=0",
        "fence-rider:bisections=0",
        "mixed:pool=[]",
        "backdoor:w=0",
        "backdoor:trigger=[]",
        "crash:after=-1",
        "straggle:seconds=0",
        "straggle:seconds=.inf",
        "straggle:seconds=86401",
        "straggle:rate=0",
        "straggle:rate=1.1",
    ],
)
def test_an_impossible_parameter_is_an_error(text):
    component = Component.parse(text)
    (key,) = component.params
    with pytest.raises(ConfigError, match=f"attack {component.name}: {key}: "):
        registry.attacks.create(component)
