from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from sentinel_bench import plugins
from sentinel_bench.cli import main
from sentinel_bench.config import Scenario


@dataclass
class Outcome:
    """What a command left behind."""

    status: int
    out: str
    err: str


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., Outcome]]:
    """Return a function that runs the command line in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def run(*args: object) -> Outcome:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["sentinel-bench", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, handler)
    plugins.use(())


@pytest.fixture
def tiny(make_scenario: Callable[..., Scenario], tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that writes a tiny scenario to a file and gives the options to run it."""

    def options(**changes: Any) -> list[str]:
        path = tmp_path / "tiny.yaml"
        content = make_scenario(**changes).model_dump(mode="json", exclude={"track"})
        path.write_text(yaml.safe_dump(content))
        return ["--config", str(path), "--threads", "1"]

    return options
