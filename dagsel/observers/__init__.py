"""Who is told what a search does: TensorBoard, MLflow, Weights & Biases, a CSV file, a log."""

from __future__ import annotations

from dagsel.observers.base import Observer as Observer
from dagsel.observers.comma_separated import CSV as CSV
from dagsel.observers.events import EpochEnded as EpochEnded
from dagsel.observers.events import SearchBegan as SearchBegan
from dagsel.observers.events import SearchEnded as SearchEnded
from dagsel.observers.events import TrialBegan as TrialBegan
from dagsel.observers.events import TrialEnded as TrialEnded
from dagsel.observers.log import Logging as Logging
from dagsel.observers.ml_flow import MLflow as MLflow
from dagsel.observers.tensor_board import TensorBoard as TensorBoard
from dagsel.observers.wand_b import WandB as WandB

__all__ = [
    "CSV",
    "EpochEnded",
    "Logging",
    "MLflow",
    "Observer",
    "SearchBegan",
    "SearchEnded",
    "TensorBoard",
    "TrialBegan",
    "TrialEnded",
    "WandB",
]


def __dir__() -> list[str]:
    return __all__
