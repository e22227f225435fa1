"""The commands: what they print, where, and with which exit status."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ABOUT = ["--what", "x", "--who", "a", "--contact", "b", "--paper", "none", "--licence", "MIT"]


def test_from_runs_to_a_verified_entry(call: Any, runs: Path) -> None:
    done = call("pack", runs, "--track", "smoke", "--name", "mine", *ABOUT)
    assert (done.status, done.out) == (0, "")
    assert "left out: 2 runs" in done.err
    folder = Path("leaderboards/smoke/mine")
    assert folder.is_dir()
    done = call("check", folder)
    assert (done.status, done.out, done.err) == (0, "", "no findings; in 4 cells\n")
    done = call("verify", folder, "--all", "--out", runs, "--threads", "1")
    assert done.status == 0 and "reproduced: 4 of 4 cells run again" in done.err
    assert done.out.count("the same") == 4
    done = call("check", folder, "--json")
    data = json.loads(done.out)
    assert data["level"] == "reproduced" and data["findings"] == [] and data["cells"] == 4
    assert call("check", folder, "--incoming").status == 1


def test_findings_are_printed_with_place_rule_and_remedy(call: Any, entry: Path) -> None:
    (entry / "plugin.py").write_text("")
    (entry / "\u202egpj.exe").write_text("")
    done = call("check", entry)
    assert done.status == 1
    head, *lines = done.out.splitlines()
    assert head.split() == ["place", "rule", "what", "is", "wrong", "remedy"]
    assert "plugin.py" in done.out and "file-name" in done.out and "take it out" in done.out
    assert "\\u202egpj.exe" in done.out and "\u202e" not in done.out
    assert done.err == "2 findings; in 4 cells\n" and len(lines) >= 2
    data = json.loads(call("check", entry, "--json").out)
    assert {f["place"] for f in data["findings"]} == {"plugin.py", "\\u202egpj.exe"}
    assert set(data["findings"][0]) == {"place", "rule", "what", "remedy"}


def test_verify_does_not_run_what_has_findings(call: Any, entry: Path, runs: Path) -> None:
    (entry / "plugin.py").write_text("")
    done = call("verify", entry, "--out", runs)
    assert done.status == 1 and done.err == "1 finding; nothing was run\n"
    data = json.loads(call("verify", entry, "--out", runs, "--json").out)
    assert [f["rule"] for f in data["findings"]] == ["file-name"]


def test_a_cell_that_differs_ends_with_1(call: Any, entry: Path, forge: Any, runs: Path) -> None:
    cell = forge("delay-vs-cascade")
    cell.of("eval")[0]["loss"] -= 0.02
    cell.save()
    done = call("verify", entry, "--all", "--out", runs, "--threads", "1", "--json")
    assert done.status == 1
    assert json.loads(done.out)["level"] == "self-reported"


def test_pack_complains_and_writes_nothing(call: Any, runs: Path, tmp_path: Path) -> None:
    some = tmp_path / "some"
    some.mkdir()
    for path in runs.iterdir():
        if "zeros" not in path.name:
            shutil.copytree(path, some / path.name)
    options = ["pack", some, "--track", "smoke", "--name", "mine"]
    done = call(*options)
    assert done.status == 1 and "zeros (activation) against cascade, seed 0" in done.out
    assert done.err.endswith("nothing was written\n") and not Path("leaderboards").exists()
    data = json.loads(call(*options, "--json").out)
    assert data["folder"] is None and [f["rule"] for f in data["findings"]] == ["cell-missing"]


def test_what_cannot_be_used_ends_with_2(call: Any, runs: Path) -> None:
    for args, text in (
        (["check", "nothing"], "error: nothing: cannot be opened as a folder"),
        (["verify", "nothing"], "error: nothing: cannot be opened as a folder"),
        (["pack", runs, "--track", "smok", "--name", "a"], "error: unknown track 'smok'; did you"),
        (["pack", runs, "--track", "smoke", "--name", "A"], "error: --name 'A': use small"),
        (["pack", runs, "--track", "smoke"], "error: Missing option '--name'"),
        (["check"], "error: Missing argument 'ENTRY_DIR'"),
    ):
        done = call(*args)
        assert done.status == 2 and done.out == "" and done.err.startswith(text), done.err


def test_no_torch_is_imported_for_a_check(entry: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom sentinel_bench.submit import check\n"
        f"check(Path({str(entry)!r}))\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
