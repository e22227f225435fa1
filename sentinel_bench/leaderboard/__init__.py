"""Leaderboards: Markdown tables made of `result.json` files, and the data behind them.

Nothing is taken from a result but numbers and escaped names; the same results give the same bytes.
"""

from sentinel_bench.leaderboard._build import build
from sentinel_bench.leaderboard._cost import price
from sentinel_bench.leaderboard._markdown import escape
from sentinel_bench.leaderboard._read import read
from sentinel_bench.leaderboard._sentences import measured
from sentinel_bench.leaderboard._summary import interval, summarize

__all__ = ["build", "escape", "interval", "measured", "price", "read", "summarize"]
