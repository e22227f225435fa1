"""An entry about a plugin of another package, checked where that package is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor

from sentinel_bench import registry, suite, tracks
from sentinel_bench.api import Attack, AttackContext
from sentinel_bench.config import Component, Frozen
from sentinel_bench.errors import ConfigError
from sentinel_bench.submit import check, pack, verify


class Halves(Attack[Frozen]):
    """Sends half of what it should."""

    name = "lab/halves"
    goal = "disrupt"
    formula = "x / 2"
    source = "a test"
    Params = Frozen

    def activation(self, x: Tensor, context: AttackContext) -> Tensor:
        return x / 2


@pytest.fixture
def theirs(
    plug: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quiet: Any,
    about: dict[str, str],
) -> Path:
    """An entry about an attack that is not installed any more."""
    plug(Halves)
    scenario, attack = tracks.scenario("smoke", {}), Component(name="lab/halves")
    plan = suite.make_plan([scenario], [attack], [Component(name="cascade")], {})
    suite.run(plan, tmp_path / "runs", quiet, threads=1)
    done = pack([tmp_path / "runs"], "smoke", "theirs", tmp_path, kind="attack", about=about)
    assert done.folder is not None, done.complaints
    monkeypatch.delitem(registry.attacks._targets, "lab/halves")
    return done.folder


def test_it_is_checked_without_the_plugin(
    theirs: Path, opened_cell: Any, tmp_path: Path, quiet: Any
) -> None:
    path = theirs / "entry.yaml"
    content = yaml.safe_load(path.read_text())
    assert content["plugin"] == {"package": "lab", "version": ""}
    assert [f.place for f in check(theirs).findings] == ["entry.yaml: plugin.version"]
    content["plugin"]["version"] = "1.2"
    path.write_text(yaml.safe_dump(content))
    report = check(theirs)
    assert report.findings == [] and len(report.records) == 3
    with pytest.raises(ConfigError, match=r"unknown attack 'lab/halves'.*plugin of entry.yaml"):
        verify(theirs, tmp_path / "new", quiet, seed=0, sample=1)
    (folder,) = theirs.glob("cells/lab-halves-vs-cascade_*")
    cell = opened_cell(folder)
    cell.events[0]["attackers"][0]["seed"] = 7
    cell.save()
    assert [f.rule for f in check(theirs).findings] == ["threat"]
