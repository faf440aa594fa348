"""Figures of a search: `run.plot.timeline()` and the like."""

from __future__ import annotations

from dagsel.history.plots.plots import Plots as Plots
