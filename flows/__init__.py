"""Search procedures, one file each: which trial starts, trains on, or stops."""

from dagsel.flows.grid import Grid
from dagsel.flows.random_search import RandomSearch

__all__ = ["Grid", "RandomSearch"]
