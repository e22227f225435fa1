"""What plugins of every kind owe: to say what they are, and parameters that can be trusted."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sentinel_bench.api import Plugin
from sentinel_bench.config import Component
from sentinel_bench.contract._check import Violation, require
from sentinel_bench.errors import ConfigError
from sentinel_bench.registry import Registry


def describes_itself(reg: Registry[Any], name: str, base: type[Plugin[Any]]) -> None:
    """Refuse a plugin without texts, or with another name than the one it goes by."""
    plugin = reg.get(name)
    called = name.rpartition("/")[2]
    require(
        plugin.name == called,
        f"its class is called {plugin.name!r}, and it goes by {called!r}",
        "give the entry point and the class one name",
    )
    for attribute in ("goal", "formula", "source", "version"):
        text = getattr(plugin, attribute)
        require(
            isinstance(text, str) and text.strip(),
            f"its `{attribute}` is {text!r}",
            "write a few words there: the pages and tables show them",
        )
    require(
        (plugin.__doc__ or "").strip() and plugin.__doc__ != base.__doc__,
        "its class has no docstring",
        "say in one line what it does",
    )


def has_sound_parameters(reg: Registry[Any], name: str) -> None:
    """Refuse parameters without defaults or descriptions, or that do not survive a record."""
    plugin = reg.get(name)
    params = reg.params(Component(name=name))
    require(
        type(params) is plugin.Params,
        f"its parameters are of {type(params).__name__}, not of {plugin.Params.__name__}",
        "let `Params` be the class itself",
    )
    for key, info in plugin.Params.model_fields.items():
        require(
            (info.description or "").strip(),
            f"parameter {key} has no description",
            'declare it with Field(default, description="...")',
        )
        value = getattr(params, key)
        require(
            not isinstance(value, float) or math.isfinite(value),
            f"parameter {key} is {value} by default",
            "records hold no NaN and no Inf: take None for 'no limit'",
        )
    again = Component(name=name, params=params.model_dump(mode="json", by_alias=True))
    require(
        reg.params(again) == params,
        "its parameters are others once they were written to a record and read",
        "use types that JSON has, or pydantic turns back",
    )


def refuses_unknown_parameters(reg: Registry[Any], name: str) -> None:
    """Refuse a plugin that takes a misspelt parameter without a word."""
    fields = reg.get(name).Params.model_fields
    known = [info.alias or key for key, info in fields.items()]
    wrong = known[0] + known[0][-1] if known else "strength"
    while wrong in {*known, *fields}:
        wrong += wrong[-1]
    remedy = "extend Frozen (ResponseParams, AggregatorParams) and leave its model_config alone"
    try:
        reg.params(Component(name=name, params={wrong: 1}))
    except ConfigError as error:
        message = str(error)
        told = f"{reg.kind} {name}" in message and repr(wrong) in message
        require(told, f"a misspelt parameter gives {message!r}", remedy)
        hint = message.partition("did you mean")[2]
        require(not known or known[0] in hint, f"a misspelt parameter gives {message!r}", remedy)
        return
    raise Violation(f"it takes an unknown parameter, {wrong!r}, without a word", remedy)


def draws_in_private(play: Callable[[], object], remedy: str) -> None:
    """Refuse draws from the global random numbers: cells run after each other in one process."""
    before = _global_random()
    play()
    after = _global_random()
    moved = [library for library in before if before[library] != after[library]]
    require(not moved, f"it draws from the global random numbers of {', '.join(moved)}", remedy)


def _global_random() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": pickle.dumps(np.random.get_state()),  # noqa: NPY002
        "Python": random.getstate(),
    }
