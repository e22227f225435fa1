"""Plugins of installed packages: listed, shown, run and validated; broken ones break nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench import registry

Call = Callable[..., Any]
DUMMY = Path(__file__).parents[1] / "dummy"
MISSING = "ModuleNotFoundError: No module named 'a_library_that_is_not_there'"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the dummy package is installed: by pip, or as pip would do it."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(DUMMY, folder / "source")
    site = folder / "site"
    if find_spec("pip") and find_spec("setuptools"):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        command += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(site)]
        subprocess.run([*command, str(source)], check=True, capture_output=True)
    else:
        shutil.copytree(source / "src", site)
        add(
            site, "sentinel-dummy", "[sentinel_bench.attacks]\nhalve = sentinel_dummy.plugins:Halve"
        )
    return site


def add(site: Path, package: str, points: dict[str, dict[str, str]]) -> None:
    """Write what is known of an installed package."""
    folder = site / f"{package.replace('-', '_')}-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    lines = []
    for group, named in points.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in named.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def installed(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same folder, copied and on the path; what is imported from it is forgotten."""
    site = shutil.copytree(target, tmp_path / "site")
    monkeypatch.syspath_prepend(str(site))
    for reg in (registry.attacks, registry.defenses, registry.aggregators):
        monkeypatch.delitem(vars(reg), "_targets", raising=False)
        monkeypatch.setattr(reg, "_broken", {})
    yield site
    for module in [m for m in sys.modules if m.partition(".")[0] in ("sentinel_dummy", "other")]:
        del sys.modules[module]


def listed(call: Call, what: str) -> dict[str, str]:
    done = call("list", what, "--json")
    assert done.status == 0, done.err
    return {row["name"]: row["does"] for row in json.loads(done.out) if "/" in row["name"]}


def test_plugins_of_a_package_are_listed_with_the_errors_of_the_broken_ones(
    call: Call, installed: Path
) -> None:
    assert listed(call, "attacks") == {
        "sentinel-dummy/halve": "Sends half of the signal.",
        "sentinel-dummy/broken": f"attack 'sentinel-dummy/broken' cannot be loaded: {MISSING}",
        "sentinel-dummy/gone": "attack 'sentinel-dummy/gone' cannot be loaded: AttributeError: "
        "module 'sentinel_dummy.plugins' has no attribute 'Gone'",
        "sentinel-dummy/leaving": "attack 'sentinel-dummy/leaving' cannot be loaded: SystemExit: 0",
        "sentinel-dummy/odd": "attack 'sentinel-dummy/odd' cannot be described: TypeError: "
        "'NoneType' object is not iterable",
    }
    assert listed(call, "defenses") == {"sentinel-dummy/still": "Flags nobody."}
    assert listed(call, "aggregators") == {
        "sentinel-dummy/first": "Takes the first row, which is wrong.",
        "sentinel-dummy/halve": "aggregator 'sentinel-dummy/halve' is not a subclass of Aggregator",
    }
    table = call("list", "attacks")
    assert (table.status, "zeros" in table.out, "sentinel-dummy/halve" in table.out) == (
        0,
        True,
        True,
    )


@pytest.mark.parametrize(
    "name, reason",
    [
        ("broken", f"cannot be loaded: {MISSING}"),
        ("gone", "cannot be loaded: AttributeError"),
        ("leaving", "cannot be loaded: SystemExit: 0"),
    ],
)
def test_a_broken_plugin_shows_its_error_wherever_it_is_used(
    call: Call, installed: Path, name: str, reason: str
) -> None:
    plugin = f"sentinel-dummy/{name}"
    for command in (
        ["run", "--attack", plugin, "--defense", "none"],
        ["sweep", "--attack", plugin, "--defense", "none"],
        ["show", "attack", plugin],
        ["validate", plugin],
    ):
        done = call(*command)
        assert (done.status, done.out) == (1, "")
        last = done.err.splitlines()[-1]
        assert last.startswith(f"error: attack {plugin!r} {reason}")
        assert "Traceback" not in done.err


def test_an_error_is_kept_as_it_was_the_first_time(installed: Path) -> None:
    errors = []
    for _ in range(2):
        with pytest.raises(Exception, match="cannot be loaded") as error:
            registry.attacks.get("sentinel-dummy/broken")
        errors.append(str(error.value))
        (installed / "sentinel_dummy" / "broken.py").write_text("x = 1\n")
    assert errors[0] == errors[1]
    assert MISSING in errors[0]


def test_a_plugin_of_a_package_is_run_and_its_changes_are_noticed(
    call: Call, installed: Path, tiny: Callable[..., list[str]]
) -> None:
    command = ["run", "--attack", "sentinel-dummy/halve", "--defense", "sentinel-dummy/still",
               "--no-unprotected", "--aggregator", "sentinel-dummy/first", *tiny()]  # fmt: skip
    done = call(*command, "--json")
    assert done.status == 0, done.err
    result = json.loads(done.out)[1]
    assert result["cell"]["attack"] == "sentinel-dummy/halve"
    assert result["scores"]["acted"] > 0
    assert call(*command, "--resume").err.count("reused") == 2
    (installed / "sentinel_dummy" / "helper.py").write_text("FACTOR = 0.25\n")
    again = call(*command, "--resume")
    assert again.err.count("reused runs") == 1  # the baseline
    assert "is not reused; differs in aggregator.source, attack.source, defense.source" in again.err


def test_plugins_of_a_package_are_validated(call: Call, installed: Path) -> None:
    assert call("validate", "sentinel-dummy/halve", "--kind", "attack").status == 0
    assert call("validate", "sentinel-dummy/still").status == 0
    done = call("validate", "sentinel-dummy/first")
    assert done.status == 1
    assert "FAILED     The order of the rows does not matter" in done.out


def test_two_packages_with_one_name_are_told_apart(call: Call, installed: Path) -> None:
    shutil.copytree(installed / "sentinel_dummy", installed / "other")
    text = (installed / "other" / "plugins.py").read_text().replace("sentinel_dummy", "other")
    (installed / "other" / "plugins.py").write_text(text.replace("Sends half", "Sends the half"))
    add(installed, "other-dummy", {"sentinel_bench.attacks": {"halve": "other.plugins:Halve"}})
    found = listed(call, "attacks")
    assert found["sentinel-dummy/halve"] == "Sends half of the signal."
    assert found["other-dummy/halve"] == "Sends the half of the signal."
    done = call("show", "attack", "halve")
    assert done.status == 2
    asked = done.err.partition("did you mean ")[2].strip().removesuffix("?")
    assert set(asked.split(", ")) == {"other-dummy/halve", "sentinel-dummy/halve"}
