"""A tiny corpus, tiny scenarios, and plugins that exist only in a test."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sentinel_bench import registry
from sentinel_bench.api import Aggregator, Attack
from sentinel_bench.config import Scenario, build, merge, set_dotted

if TYPE_CHECKING:
    from sentinel_bench.data.tokens import Tokens

TINY: dict[str, Any] = {
    "model": {"hidden_size": 16, "intermediate_size": 32},
    "grid": {"stages": 4, "replicas": 4},
    "train": {
        "steps": 12,
        "warmup_steps": 4,
        "batch_size": 1,
        "seq_len": 8,
        "lr_warmup_steps": 2,
        "eval_sequences": 8,
    },
    "threat": {"waves": 1, "honest_first": 1, "honest_last": 1},
}


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test touches the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SENTINEL_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of some 50 kB."""
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(300)]
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text(" ".join(draw.choices(words, k=9000)))
    return path


@pytest.fixture(scope="session")
def tokens(make_scenario: Callable[..., Scenario]) -> Tokens:
    """The corpus of `make_scenario`."""
    from sentinel_bench.data.tokens import load_tokens

    return load_tokens(make_scenario().data)


@pytest.fixture(scope="session")
def make_scenario(text_file: Path) -> Callable[..., Scenario]:
    """Return a function that builds the tiny scenario; `train__steps=3` sets `train.steps`."""

    def make(**changes: Any) -> Scenario:
        tree: dict[str, Any] = {}
        for key, value in changes.items():
            set_dotted(tree, key.replace("__", "."), value)
        data = {"data": {"path": str(text_file), "vocab_size": 260}}
        return build(Scenario, merge(merge(TINY, data), tree), "test")

    return make


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes classes of a test known to the registries by their names."""

    def add(*plugins: type[Any]) -> None:
        for plugin in plugins:
            reg: registry.Registry[Any] = registry.defenses
            if issubclass(plugin, Attack):
                reg = registry.attacks
            elif issubclass(plugin, Aggregator):
                reg = registry.aggregators
            target = f"{plugin.__module__}:{plugin.__qualname__}"
            monkeypatch.setitem(reg._targets, plugin.name, target)

    return add


@dataclass
class Outcome:
    """What a command left behind."""

    status: int
    out: str
    err: str


@pytest.fixture
def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """Return a function that runs `sentinel-bench` with some arguments in this process."""
    from sentinel_bench import plugins
    from sentinel_bench.cli import main

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
