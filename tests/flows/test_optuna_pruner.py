"""OptunaPruner: a trial ends where the pruner says so, and each other one trains to the end."""

import optuna
import pytest

from dagsel.errors import SearchError
from dagsel.flow import Ask, Asked, Context, Reported, Stop
from dagsel.flows import OptunaPruner
from dagsel.testing import FlowSuite


class TestOptunaPruner(FlowSuite):
    n_concurrent = 4

    def make_flow(self) -> OptunaPruner:
        return OptunaPruner(max_epochs=4, n_trials=10, n_concurrent=4)


def test_the_pruner_has_the_word_until_the_last_epoch() -> None:
    flow = OptunaPruner(3, 5, optuna.pruners.HyperbandPruner(), n_concurrent=2)
    flow.start(Context(n_workers=1))
    flow.handle(Asked((0, 1)))
    assert flow.handle(Reported(0, 1, 0.5, {}, 1.0)) == []
    assert flow.handle(Reported(0, 2, 0.5, {}, 1.0, prune=True)) == [
        Stop(0, "the pruner ended it after epoch 2", "pruned"),
        Ask(1),
    ]
    assert flow.handle(Reported(1, 3, 0.5, {}, 1.0, prune=True)) == [
        Stop(1, "trained to the end", "complete"),
        Ask(1),
    ]


@pytest.mark.parametrize("bad", ["median", optuna.pruners.MedianPruner, 3])
def test_what_is_no_pruner_is_refused(bad: object) -> None:
    with pytest.raises(SearchError, match="pruner must be one of Optuna's"):
        OptunaPruner(3, 5, bad)
