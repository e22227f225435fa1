"""One self-contained HTML page for a run folder, and its figures as PNG and SVG.

The record is untrusted: rows that do not fit are left out, and all text is escaped. Scores come
from `score`, so the page says what `sentinel-bench score` says.
"""

from sentinel_bench.report._read import require_run
from sentinel_bench.report._write import Written, write

__all__ = ["Written", "require_run", "write"]
