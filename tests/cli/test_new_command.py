"""`new`: packages that pass their own tests at once, and a newcomer's way with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, get_args

import pytest

from sentinel_bench import registry, scaffold

Call = Callable[..., Any]
KINDS = get_args(scaffold.Kind)
TESTS = """
import sys, pytest
for folder in sys.argv[1:]:
    assert pytest.main(["-q", "-p", "no:cacheprovider", folder]) == 0, folder
"""


def test_a_new_package_passes_its_own_tests_at_once(call: Call) -> None:
    folders = [f"my-{kind}" for kind in KINDS]
    for kind, folder in zip(KINDS, folders, strict=True):
        assert call("new", kind, folder).status == 0
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", TESTS, *folders], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed") == len(KINDS)
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_makes_its_plugin_known(
    call: Call, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("new", kind, "a-quiet-1")
    project = tomllib.loads(Path("a-quiet-1/pyproject.toml").read_text())
    assert project["project"]["name"] == "a-quiet-1"
    ((group, points),) = project["project"]["entry-points"].items()
    assert group == f"sentinel_bench.{kind}s"
    assert project["tool"]["setuptools"]["py-modules"] == ["a_quiet_1"]
    monkeypatch.syspath_prepend("a-quiet-1/src")
    plugin = EntryPoint("a-quiet-1", points["a-quiet-1"], group).load()
    reg = registry.home(plugin)
    assert reg is not None
    assert (reg.kind, plugin.name, plugin.__name__) == (kind, "a-quiet-1", "AQuiet1")
    del sys.modules["a_quiet_1"]


def test_the_way_of_a_newcomer(call: Call, text_file: Path) -> None:
    """Make an attack, change a line, run it, see the change noticed, validate it."""
    made = call("new", "attack", "soft-flip")
    assert made.status == 0
    file = Path("soft-flip/src/soft_flip.py")
    assert f"written: {file}" in made.out
    plugin = ["--plugin", str(file)]
    run = ["run", "--track", "smoke", "--attack", "soft_flip/soft-flip", "--defense", "averaging",
           *plugin, "--steps", "12", "--warmup", "4", "--data", text_file, "--resume",
           "--set", "data.vocab_size=260", "--threads", "1"]  # fmt: skip
    assert " ".join([*run[:1], *run[1:5]]) in made.out.replace("\n", " ")
    first = call(*run, "--json")
    assert first.status == 0, first.err
    before = json.loads(first.out)
    line = "return (full - self.params.strength * mean).to(x.dtype)"
    text = file.read_text()
    assert text.count(line) == 1
    file.write_text(text.replace(line, "return (self.params.strength * mean - full).to(x.dtype)"))
    second = call(*run, "--json")
    assert second.status == 0, second.err
    after = json.loads(second.out)
    assert "differs in attack.source" in second.err
    assert second.err.count("reused runs") == 1  # the run without attack
    damage = [[r["scores"]["excess_loss"] for r in rows[1:]] for rows in (before, after)]
    assert damage[0] != damage[1]
    assert call("validate", "soft_flip/soft-flip", *plugin).status == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_that_are_recommended_work(call: Call, kind: str) -> None:
    made = call("new", kind, "quiet-one", "--dir", "here/some where")
    assert Path("here/some where/pyproject.toml").is_file()
    commands = [line.strip() for line in made.out.splitlines() if line.startswith("    ")]
    assert len(commands) == 3
    run = commands[2].replace("'", "").split(" --plugin ")
    done = call(*run[0].split()[1:], "--plugin", run[1], "--dry-run")
    assert done.status == 0, done.err
    readme = Path("here/some where/README.md").read_text()
    assert " --plugin src/quiet_one.py" in readme
    assert "{" not in readme


@pytest.mark.parametrize(
    "name, message",
    [
        ("Soft", "write lower-case words with hyphens"),
        ("soft_flip", "write lower-case words with hyphens"),
        ("soft flip", "write lower-case words with hyphens"),
        ("soft--flip", "write lower-case words with hyphens"),
        ("-soft", "No such option"),
        ("soft-", "write lower-case words with hyphens"),
        ("2soft", "write lower-case words with hyphens"),
        ("söft", "write lower-case words with hyphens"),
        ("soft\n", "write lower-case words with hyphens"),
        ("", "write lower-case words with hyphens"),
        ("../soft", "write lower-case words with hyphens"),
        ("soft/flip", "write lower-case words with hyphens"),
        ("/tmp/soft", "write lower-case words with hyphens"),
        ("soft.py", "write lower-case words with hyphens"),
        ("..", "write lower-case words with hyphens"),
        ("a" * 31, "at most 30 letters"),
        ("zeros", "is the name of a built-in attack"),
        ("sentinel", "is the name of a built-in defense"),
        ("krum", "is the name of a built-in aggregator"),
        ("class", "is called like a part of Python"),
        ("true", "is called like a part of Python"),
        ("attack", "is called like a part of Python or of the api"),
        ("response", "is called like a part of Python or of the api"),
        ("tensor", "is called like a part of Python or of the api"),
        ("json", "a module 'json' is installed already"),
        ("sys", "a module 'sys' is installed already"),
        ("torch", "a module 'torch' is installed already"),
        ("sentinel-bench", "a module 'sentinel_bench' is installed already"),
    ],
)
def test_a_name_that_cannot_be_used_is_one_line(call: Call, name: str, message: str) -> None:
    done = call("new", "attack", name)
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    assert [*Path().iterdir()] == []


def test_a_folder_that_is_in_use_is_refused_and_left_alone(call: Call) -> None:
    assert call("new", "attack", "soft-flip").status == 0
    file = Path("soft-flip/src/soft_flip.py")
    file.write_text("mine")
    for target in ([], ["--dir", "soft-flip"], ["--dir", str(file)], ["--dir", f"{file}/deeper"]):
        done = call("new", "defense", "soft-flip", *target)
        assert (done.status, done.out) == (2, "")
        assert "give another --dir" in done.err
    assert file.read_text() == "mine"
    Path("hidden").mkdir()
    Path("hidden/.keep").write_text("")
    assert call("new", "attack", "soft-flip", "--dir", "hidden").status == 2
    Path("link").symlink_to("nowhere")
    assert call("new", "attack", "soft-flip", "--dir", "link").status == 2


def test_an_empty_folder_is_filled(call: Call) -> None:
    Path("empty").mkdir()
    Path("link").symlink_to("empty")
    assert call("new", "attack", "soft-flip", "--dir", "link").status == 0
    assert sorted(p.name for p in Path("empty").iterdir()) == [
        "README.md",
        "pyproject.toml",
        "src",
        "tests",
    ]
