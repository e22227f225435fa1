"""Submissions to the leaderboards: packed from runs, checked without trust, verified by new runs.

What a check protects against: files that are no part of an entry, or lead outside of it; data that
fill memory or time; numbers that do not follow from the events; attackers and settings of one's own
choice; events that contradict each other. What it does not: a record that was invented as a whole
and is free of contradiction. Only `verify` finds that, and only in the cells that it runs again.
"""

from sentinel_bench.submit._check import Report, check
from sentinel_bench.submit._entry import ABOUT, Standing, standing
from sentinel_bench.submit._pack import Packed, pack
from sentinel_bench.submit._verify import verify
from sentinel_bench.submit.rules import PROTOCOL, RULES, Finding

__all__ = [
    "ABOUT",
    "PROTOCOL",
    "RULES",
    "Finding",
    "Packed",
    "Report",
    "Standing",
    "check",
    "pack",
    "standing",
    "verify",
]
