"""`validate`: verdicts, exit status, JSON; `--plugin` on all commands that look names up."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
TWIST = '''
from sentinel_bench.api import Attack
from sentinel_bench.config import Frozen

print("words of the plugin")

class TwistParams(Frozen):
    factor: float = 2.0

class Twist(Attack[TwistParams]):
    """Multiplies."""
    name = "twist"
    goal = formula = source = "test"
    Params = TwistParams
    def signal(self, x, ctx):
        print("more words of the plugin")
        return x.mul_(self.params.factor)
'''


@pytest.fixture
def twist(tmp_path: Path) -> list[str]:
    """A file with an attack that keeps little of what it owes, and the option to load it."""
    (tmp_path / "my.py").write_text(TWIST)
    return ["--plugin", "my.py"]


def test_a_good_plugin_passes_line_by_line_and_is_timed(call: Call) -> None:
    done = call("validate", "scaling")
    assert done.status == 0
    lines = done.out.splitlines()
    assert lines[0] == "attack scaling"
    assert lines[1] == "  passed     It can be made with its default parameters"
    assert "17 passed" in lines
    timed = lines[lines.index("17 passed") + 3 :]
    assert [re.split(r"  +", line.strip())[0] for line in timed] == [
        "attack scaling",
        "attack none",
        "defense sentinel",
    ]
    assert "for information only" in done.out


def test_a_bad_plugin_gives_status_1_reasons_and_what_to_do(call: Call, twist: list[str]) -> None:
    done = call("validate", "my/twist", *twist)
    assert done.status == 1
    lines = done.out.splitlines()
    at = lines.index("  FAILED     It does not change the tensors that it is given")
    assert lines[at + 1].strip() == "it changes its input in place (activation, torch.float32)"
    assert lines[at + 2].strip().startswith("what to do: work on a copy")
    parameters = "Its parameters have defaults and descriptions, and survive a record"
    assert f"  FAILED     {parameters}" in lines
    assert re.search(r"^\d+ passed, \d+ failed$", done.out, re.MULTILINE)
    assert "words of the plugin" not in done.out


def test_json_holds_the_same_and_nothing_else_is_on_stdout(call: Call, twist: list[str]) -> None:
    done = call("validate", "my/twist", "--json", *twist)
    data = json.loads(done.out)
    assert (done.status, data["passed"], data["kind"], data["name"]) == (
        *(1, False, "attack", "my/twist"),
    )
    by_name = {check["name"]: check for check in data["checks"]}
    found = by_name["leaves-its-input-its-past-and-what-it-received-alone"]
    assert found["status"] == "failed"
    assert found["reason"] and found["remedy"]
    assert by_name["can-be-made"] == {
        "name": "can-be-made",
        "text": "It can be made with its default parameters",
        "status": "passed",
        "reason": "",
        "remedy": "",
    }
    assert data["timing"]["informative"] is True
    assert data["timing"]["calls"][0]["name"] == "attack my/twist"
    assert all(c["microseconds"] > 0 for c in data["timing"]["calls"])


def test_what_is_not_asked_of_a_plugin_is_said_with_the_reason(call: Call) -> None:
    done = call("validate", "non-finite")
    assert done.status == 0
    assert "15 passed, 2 not asked" in done.out
    assert "(it sends NaN or Inf on purpose (`finite = False`))" in done.out


def test_a_plugin_that_cannot_be_made_is_not_tried_further(call: Call, tmp_path: Path) -> None:
    text = TWIST.replace("factor: float = 2.0", "factor: float")
    (tmp_path / "my.py").write_text(text)
    done = call("validate", "my/twist", "--plugin", "my.py", "--json")
    data = json.loads(done.out)
    assert done.status == 1
    assert [c["status"] for c in data["checks"]][:2] == ["failed", "not asked"]
    assert "factor: Field required" in data["checks"][0]["reason"]
    assert data["timing"] == {"informative": True, "reason": "it cannot be made", "calls": []}


def test_a_plugin_that_fails_only_where_it_is_timed_is_not_timed(
    call: Call, tmp_path: Path
) -> None:
    (tmp_path / "my.py").write_text(
        TWIST.replace("x.mul_(self", "1 / 0 if x.shape[-1] > 8 else x.clone().mul_(self")
    )
    done = call("validate", "my/twist", "--plugin", "my.py")
    assert "not timed: it raised ZeroDivisionError: division by zero" in done.out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["zeroes"], "unknown plugin 'zeroes'; did you mean zeros"),
        (["zeroes"], "for a plugin in a file add --plugin FILE.py"),
        (["my/twist"], "unknown plugin 'my/twist'"),
        (["none"], "'none' is of several kinds: add --kind attack or --kind defense"),
        (["zeros", "--kind", "defense"], "unknown defense 'zeros'"),
        (["zeros", "--kind", "nonsense"], "'nonsense' is not one of"),
        ([], "Missing argument 'NAME'"),
        (["zeros", "--plugin", "gone.py"], "gone.py: cannot be read: no such file"),
    ],
)
def test_an_unknown_name_is_one_line_and_status_2(
    call: Call, arguments: list[str], message: str
) -> None:
    done = call("validate", *arguments)
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_plugins_of_files_are_known_to_every_command_that_looks_names_up(
    call: Call, twist: list[str]
) -> None:
    names = [row["name"] for row in json.loads(call("list", "attacks", "--json", *twist).out)]
    assert names[-1] == "my/twist"
    assert (
        json.loads(call("show", "attack", "my/twist", "--json", *twist).out)["name"] == "my/twist"
    )
    planned = call("run", *twist, "--attack", "my/twist:factor=3", "--dry-run", "--json")
    cells = json.loads(planned.out)["cells"]
    assert cells[1]["attack"] == {"name": "my/twist", "factor": 3.0}
    swept = call("sweep", "--attack", "my/twist:factor=1..3", "--defense", "none", *twist,
                 "--dry-run", "--json")  # fmt: skip
    assert len(json.loads(swept.out)["cells"]) > 5
    inside = call("run", "--attack", "on-off:attack=my/twist", "--dry-run", *twist)
    assert inside.status == 0
    for command in (["list", "attacks"], ["run", "--attack", "zeros"], ["calibrate"], ["sweep"]):
        done = call(*command, "--plugin", "gone.py")
        assert (done.status, len(done.err.splitlines())) == (2, 1)
        assert "gone.py: cannot be read" in done.err


def test_a_plugin_is_known_to_the_command_that_names_its_file_alone(
    call: Call, twist: list[str]
) -> None:
    assert call("show", "attack", "my/twist", *twist).status == 0
    done = call("show", "attack", "my/twist")
    assert done.status == 2
    assert "nothing is known of 'my': install it, or give --plugin my.py" in done.err
