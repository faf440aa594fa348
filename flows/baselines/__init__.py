"""Search procedures and schedulers that papers compare theirs with."""

from dagsel.flows.baselines.elastic_grid import ElasticGrid
from dagsel.flows.baselines.elastic_hyperband import ElasticHyperband
from dagsel.flows.baselines.fifo import FIFO
from dagsel.flows.baselines.lsf import LSF
from dagsel.flows.baselines.marginal_gain import MarginalGain
from dagsel.flows.baselines.optimus import Optimus
from dagsel.flows.baselines.random_trial import RandomTrial
from dagsel.flows.baselines.slaq import SLAQ

__all__ = [
    "FIFO",
    "LSF",
    "SLAQ",
    "ElasticGrid",
    "ElasticHyperband",
    "MarginalGain",
    "Optimus",
    "RandomTrial",
]


def __dir__() -> list[str]:
    return __all__
