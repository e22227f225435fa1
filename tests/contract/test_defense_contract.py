"""What every defense owes, checked on every defense of the registry."""

from __future__ import annotations

import copy
from collections import deque

import pytest
import torch

from sentinel_bench import registry
from sentinel_bench.api import Defense
from sentinel_bench.config import Component
from sentinel_bench.contract import Check, checks_of
from sentinel_bench.contract._grid import Grid
from sentinel_bench.contract._preview import state
from sentinel_bench.defenses import DEFENSES
from sentinel_bench.errors import ConfigError
from sentinel_bench.leaderboard import escape
from sentinel_bench.reference import pages

REGISTRY = registry.defenses
CHECKS = [check for name in REGISTRY.names() for check in checks_of(REGISTRY, name)]
PREVIEWS = {
    "says-in-a-preview-what-it-then-says",
    "comes-to-the-same-verdicts-when-it-is-asked-all-the-time",
    "previews-whatever-the-order-of-questions",
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.plugin}-{check}")
def test_every_defense_keeps_the_contract(check: Check) -> None:
    offers = REGISTRY.get(check.plugin).preview is not Defense.preview
    assert (check() is not None) is (check.name in PREVIEWS and not offers)


@pytest.mark.parametrize("name", DEFENSES)
def test_a_built_in_defense_that_looks_keeps_something_and_says_how_much(name):
    grid = Grid(name)
    grid.run(5)
    keeps = grid.defense.state_bytes() > 0 or grid.defense.redundancy() is not None
    assert keeps is not grid.defense.passive


def test_the_state_of_an_object_shows_every_change_in_it():
    class Deep:
        __slots__ = ("x",)

        def __init__(self) -> None:
            self.x = {"a": [deque([torch.zeros(2, dtype=torch.bfloat16)])], "g": torch.Generator()}

    thing = Deep()
    first = state(thing)
    assert state(thing) == state(copy.deepcopy(thing)) == first
    thing.x["a"][0][0][1] = 1
    second = state(thing)
    torch.rand(1, generator=thing.x["g"])
    assert len({str(s) for s in (first, second, state(thing))}) == 3


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The pages of the reference, without results."""
    return pages(tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("name", DEFENSES)
def test_a_built_in_defense_says_on_its_page_what_it_is_blind_to(name, generated):
    blind_to = registry.defenses.get(name).blind_to
    assert len(blind_to.split()) > 3
    assert blind_to == " ".join(blind_to.split())
    assert not blind_to.endswith(".")
    title, text = "## Does not protect against", escape(blind_to, longest=None)
    assert f"\n\n{title}\n\n{text}\n\n" in generated[f"defenses/{name}.md"]


def test_a_misspelt_response_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match="'violation'; did you mean violations"):
        registry.defenses.create(Component(name="sentinel", params={"violation": 3}))
