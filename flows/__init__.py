"""Search procedures, one file each: which trial starts, trains on, or stops."""

from dagsel.flows.asha import ASHA
from dagsel.flows.by_convergence import ByConvergence
from dagsel.flows.early_stopping import EarlyStopping
from dagsel.flows.grid import Grid
from dagsel.flows.hermes import Hermes
from dagsel.flows.hyperband import Hyperband
from dagsel.flows.hypersched import HyperSched
from dagsel.flows.job_queue import JobQueue
from dagsel.flows.lookahead import Lookahead
from dagsel.flows.marble import Marble
from dagsel.flows.median_stopping import MedianStopping
from dagsel.flows.mo_asha import MOASHA
from dagsel.flows.optuna_pruner import OptunaPruner
from dagsel.flows.pbt import PBT, Range
from dagsel.flows.random_search import RandomSearch
from dagsel.flows.sampler_search import SamplerSearch
from dagsel.flows.seer import SEER
from dagsel.flows.successive_halving import SuccessiveHalving
from dagsel.flows.time_sharing import RoundRobin

__all__ = [
    "ASHA",
    "MOASHA",
    "PBT",
    "SEER",
    "ByConvergence",
    "EarlyStopping",
    "Grid",
    "Hermes",
    "HyperSched",
    "Hyperband",
    "JobQueue",
    "Lookahead",
    "Marble",
    "MedianStopping",
    "OptunaPruner",
    "RandomSearch",
    "Range",
    "RoundRobin",
    "SamplerSearch",
    "SuccessiveHalving",
]


def __dir__() -> list[str]:
    return [*__all__, "baselines"]
