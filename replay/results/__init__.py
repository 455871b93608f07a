"""What came of it: the results file, its reports and comparisons.

`Store` writes runs, `report.report` reads one as plain data, `render` shows it, `query` answers SQL,
`open_results` gives DuckDB relations and polars frames. Schema: ``schemas/results.sql``.
"""

from replay.results.opened import Results, open_results
from replay.results.report import Report
from replay.results.sql import query
from replay.results.store import Store

__all__ = ["Report", "Results", "Store", "open_results", "query"]
