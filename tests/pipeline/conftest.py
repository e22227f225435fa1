from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import scripted
import torch

from sentinel_bench.config import Scenario
from sentinel_bench.data.tokens import Tokens


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def lab(
    make_scenario: Callable[..., Scenario], tokens: Tokens, plug: Callable[..., None]
) -> Iterator[scripted.Lab]:
    """Runs cells of scripted attacks and defenses in this process."""
    plug(*scripted.PLUGINS)
    scripted.clear()
    yield scripted.Lab(make_scenario, tokens)
    scripted.clear()
