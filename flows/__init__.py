"""Search procedures, one file each: which trial starts, trains on, or stops."""

from dagsel.flows.asha import ASHA
from dagsel.flows.grid import Grid
from dagsel.flows.hyperband import Hyperband
from dagsel.flows.hyperopt import HyperOpt
from dagsel.flows.median_stopping import MedianStopping
from dagsel.flows.optuna_pruner import OptunaPruner
from dagsel.flows.pbt import PBT, Range
from dagsel.flows.random_search import RandomSearch
from dagsel.flows.successive_halving import SuccessiveHalving

__all__ = [
    "ASHA",
    "PBT",
    "Grid",
    "HyperOpt",
    "Hyperband",
    "MedianStopping",
    "OptunaPruner",
    "RandomSearch",
    "Range",
    "SuccessiveHalving",
]
