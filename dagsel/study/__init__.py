"""The only package that imports Optuna: trials are drawn, reported and told here."""

from optuna import Study
from optuna.samplers import BaseSampler

from dagsel.study.checks import Space
from dagsel.study.driver import Callback, StudyDriver
from dagsel.study.grid import GridWalk
from dagsel.study.home import guarded, home_of, open_study, opens_again
from dagsel.study.resume import Adopted, give_up

__all__ = [
    "Adopted",
    "BaseSampler",
    "Callback",
    "GridWalk",
    "Space",
    "Study",
    "StudyDriver",
    "give_up",
    "guarded",
    "home_of",
    "open_study",
    "opens_again",
]
