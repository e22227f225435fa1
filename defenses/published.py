"""Verification settings that SENTINEL prints (arXiv 2603.03592, Table 14), one column per model.

Found by hand on preliminary runs, says the paper; for another model they are a starting point, and
`sentinel-bench calibrate` finds its own.
"""

from __future__ import annotations

from typing import Any

_KEYS = ("beta", "k0", "alpha", "grow", "shrink", "lambda", "eps")


def _column(activation: tuple[float, ...], gradient: tuple[float, ...]) -> dict[str, Any]:
    return {
        key: {"activation": a, "gradient": g}
        for key, a, g in zip(_KEYS, activation, gradient, strict=True)
    }


TABLE14: dict[str, dict[str, Any]] = {
    "llama-3-0.6b-16x8": _column(
        (0.90, 1.5, 0.0001, 1.1, 0.9, 0.15, 0.001), (0.80, 3.0, 0.001, 1.01, 0.99, 0.05, 0.00005)
    ),
    "llama-3-0.6b-16x16": _column(
        (0.90, 1.5, 0.01, 1.1, 0.9, 0.25, 0.0001), (0.80, 3.0, 0.01, 1.01, 0.99, 0.05, 0.0001)
    ),
    "llama-3-1.2b-8x8": _column(
        (0.99, 3.0, 0.001, 1.25, 0.95, 0.2, 0.01), (0.85, 3.0, 0.05, 1.01, 0.99, 0.05, 0.0001)
    ),
    "nanogpt-0.25b-12x8": _column(
        (0.90, 1.5, 0.01, 1.1, 0.9, 0.35, 0.01), (0.80, 3.0, 0.001, 1.01, 0.99, 0.15, 0.001)
    ),
}
