"""The only place that knows Optuna: the driver draws, reports and tells trials here, and alone."""

from dagsel.study.checks import Space
from dagsel.study.driver import Callback, StudyDriver
from dagsel.study.grid import GridWalk
from dagsel.study.home import home_of, open_study
from dagsel.study.resume import Adopted

__all__ = ["Adopted", "Callback", "GridWalk", "Space", "StudyDriver", "home_of", "open_study"]
