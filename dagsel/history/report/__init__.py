"""A search as one page of HTML: `run.report("report.html")`."""

from __future__ import annotations

from dagsel.history.report.page import report_page as report_page
