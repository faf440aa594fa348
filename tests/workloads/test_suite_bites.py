"""WorkloadSuite passes a good workload, and each way to be a bad one is caught by its law."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np
import pytest
from numpy.typing import NDArray

from dagsel.errors import WorkloadError
from dagsel.flow import Direction, Losses
from dagsel.state import State, Tensor
from dagsel.testing import WorkloadSuite
from dagsel.workloads.base import Config, Evaluated, Trained, Visit, never
from dagsel.workloads.gang.gang import Gang

BATCH = 4
Shard = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass
class NoModel:
    """A line fitted by gradient descent, of which no model can be made."""

    rate: float = 0.1

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        return {"error": "minimize"}

    def validate(self, config: Config) -> None:
        pass

    def prepare(self, arrays: Mapping[str, NDArray[Any]]) -> Shard:
        return arrays["x"], arrays["y"]

    def init(self, config: Config, seed: int) -> State:
        return self.pack(np.random.default_rng(seed).normal(size=2), at=0, total=0.0)

    def pack(self, line: NDArray[np.float64], *, at: int, total: float) -> State:
        return State.pack({"line": Tensor.from_numpy(line)}, {"at": at, "total": total})

    def train(
        self,
        state: State,
        shard: Shard,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
    ) -> Trained:
        x, y = shard
        order, meta = visit.order(len(x)), state.meta
        line, at, total = state.tensors["line"].numpy().copy(), meta["at"], meta["total"]
        losses: list[float] = []
        while at < len(x) and not (losses and should_stop()):
            batch = order[at : at + BATCH]
            error = line[0] * x[batch] + line[1] - y[batch]
            losses.append(float(np.mean(error**2)))
            line -= self.rate * np.array([np.mean(error * x[batch]), np.mean(error)])
            at, total = at + len(batch), total + losses[-1] * len(batch)
        finished = at == len(x)
        after = self.pack(line, at=0 if finished else at, total=0.0 if finished else total)
        seen = Losses(len(losses), min(losses), max(losses))
        return Trained(after, at, total / at, finished, losses=seen)

    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        (x, y), line = shard, state.tensors["line"].numpy()
        return Evaluated(len(x), {"error": float(np.mean((line[0] * x + line[1] - y) ** 2))})


class Line(NoModel):
    def restore(self, state: State, config: Config) -> NDArray[np.float64]:
        line: NDArray[np.float64] = state.tensors["line"].numpy().copy()
        return line


class Together(Line):
    """Each rank of a gang trains on everything."""

    def validate_gang(self, config: Config, size: int) -> None:
        pass

    def train_gang(
        self,
        state: State | None,
        shard: Shard,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
        gang: Gang,
    ) -> Trained:
        return self.train(
            gang.broadcast(state),
            shard,
            config,
            visit=visit,
            should_stop=lambda: gang.agree(gang.rank == 0 and should_stop()),
        )


class Changeable(Line):
    def reconfigure(self, state: State, config: Config, new_config: Config) -> State:
        return state


class LineSuite(WorkloadSuite):
    def make_workload(self) -> Any:
        return Line()

    def make_arrays(self, seed: int) -> dict[str, NDArray[Any]]:
        x = np.random.default_rng(seed).normal(size=10)
        return {"x": x, "y": 2 * x + 1}


class TestLine(LineSuite):
    pass


class TestTogether(LineSuite):
    def make_workload(self) -> Any:
        return Together()


class TestChangeable(LineSuite):
    def make_workload(self) -> Any:
        return Changeable()


# ---- the bad ones


class RefusesItsConfig(Line):
    def validate(self, config: Config) -> None:
        raise WorkloadError("no")


class ForgetsItsRate(Line):
    def __reduce__(self) -> Any:
        return ForgetsItsRate, ()


class InitsByTheGlobalStream(Line):
    def init(self, config: Config, seed: int) -> State:
        return self.pack(np.random.standard_normal(2), at=0, total=0.0)


class TrainsByChance(Line):
    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        self.rate = np.random.default_rng().random()
        return super().train(state, shard, config, **how)


class TrainsNothing(Line):
    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        return replace(super().train(state, shard, config, **how), state=state)


class SaysNoLossTheSecondTime(Line):
    n_trained = 0

    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        self.n_trained += 1
        trained = super().train(state, shard, config, **how)
        return trained if self.n_trained == 1 else replace(trained, loss=None)


class ConsumesNothing(Line):
    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        return replace(super().train(state, shard, config, **how), n_samples=0)


class CountsWholeBatches(Line):
    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        trained = super().train(state, shard, config, **how)
        return replace(trained, n_samples=-(-trained.n_samples // BATCH) * BATCH)


class CentersItsArrays(Line):
    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        shard[0][:] -= shard[0].mean()
        return super().train(state, shard, config, **how)


class BeginsAnew(Line):
    """It forgets where it was stopped."""

    def pack(self, line: NDArray[np.float64], *, at: int, total: float) -> State:
        return super().pack(line, at=0, total=0.0)


class ForgetsItsLoss(Line):
    """After a stop it says the mean of the rest."""

    def pack(self, line: NDArray[np.float64], *, at: int, total: float) -> State:
        return super().pack(line, at=at, total=0.0)


class TrainsSlowerInPieces(Line):
    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        rest = Line(self.rate / (2 if state.meta["at"] else 1))
        return rest.train(state, shard, config, **how)


class TrainsHalfInAGang(Together):
    def train_gang(self, state: State | None, shard: Shard, config: Config, **how: Any) -> Trained:
        half = tuple(part[: len(part) // 2] for part in shard)
        return super().train_gang(state, half, config, **how)  # type: ignore[arg-type]


class TrainsFasterInAGang(Together):
    def train_gang(self, state: State | None, shard: Shard, config: Config, **how: Any) -> Trained:
        return Together(2 * self.rate).train_gang(state, shard, config, **how)


class TrainsOnHalf(Line):
    """Short of memory, it takes half of its samples and not half at once."""

    is_short = False

    def forget(self) -> None:
        pass

    def at_once(self, config: Config, kind: Any) -> int:
        return BATCH

    def halved(self, times: int) -> TrainsOnHalf:
        half = TrainsOnHalf(self.rate)
        half.is_short = True
        return half

    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        x, y = (part[: len(part) // 2] if self.is_short else part for part in shard)
        return super().train(state, (x, y), config, **how)


class KnowsItsStatesByTheirPlace(Line):
    """What is not in the state does not hop."""

    rates: ClassVar[dict[int, float]] = {}

    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        trained = Line(self.rates.get(id(state), self.rate)).train(state, shard, config, **how)
        self.rates[id(trained.state)] = 2 * self.rate
        return trained


class GoesByWhatItHasLetGo(Line):
    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        whole = State(bytes(state.buffer))
        state.let_go()
        return Line(self.rate * state.nbytes / whole.nbytes).train(whole, shard, config, **how)


class ChangesWhatIsTheSame(Changeable):
    def reconfigure(self, state: State, config: Config, new_config: Config) -> State:
        return self.pack(np.zeros(2), at=0, total=0.0)


class ScoresSomethingElse(Line):
    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        scores = super().evaluate(state, shard, config)
        return replace(scores, metrics={"loss": scores.metrics["error"]})


class ScoresInNumpy(Line):
    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        scores = super().evaluate(state, shard, config)
        return replace(scores, metrics={"error": np.float64(scores.metrics["error"])})


class ScoresByChance(Line):
    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        return Evaluated(len(shard[0]), {"error": float(np.random.default_rng().random())})


class CountsBatches(Line):
    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        return replace(super().evaluate(state, shard, config), n_samples=1)


class LearnsFromScoring(Line):
    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        scores = super().evaluate(state, shard, config)
        self.rate /= 1 + scores.metrics["error"]
        return scores


class GoesOnWithTheLastState(Line):
    """It takes what it has trained last for the trial that comes next."""

    last: ClassVar[dict[int, State]] = {}

    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        trained = super().train(self.last.get(id(self), state), shard, config, **how)
        self.last[id(self)] = trained.state
        return trained


class CountsItsUnits(Line):
    """What it counts would be a part of what it is."""

    def train(self, state: State, shard: Shard, config: Config, **how: Any) -> Trained:
        vars(self)["n_units"] = vars(self).get("n_units", 0) + 1
        return super().train(state, shard, config, **how)


class PicklesIntoItsState(Line):
    def pack(self, line: NDArray[np.float64], *, at: int, total: float) -> State:
        pickled = Tensor.from_numpy(np.frombuffer(pickle.dumps(line), np.uint8))
        tensors = {"line": Tensor.from_numpy(line), "pickled": pickled}
        return State.pack(tensors, {"at": at, "total": total})


class DrawsAsItScores(Line):
    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        random.random()
        return super().evaluate(state, shard, config)


class DrawsAsItMakesAModel(Line):
    def restore(self, state: State, config: Config) -> NDArray[np.float64]:
        np.random.standard_normal()
        return super().restore(state, config)


IS_ONE = "test_is_a_workload_and_accepts_its_config"
SAME = "test_training_is_deterministic_and_trains"
SHARD = "test_a_unit_trains_on_its_shard"
CUT = "test_cut_into_pieces_equals_uncut"
HALF = "test_half_the_samples_at_once_are_the_same_samples"
GANG = "test_a_gang_goes_through_the_same_samples"
SCORES = "test_evaluation_gives_the_metrics_and_changes_nothing"
STREAMS = "test_the_random_streams_of_the_process_are_left_alone"
BAD: list[tuple[type[NoModel], str]] = [
    (NoModel, IS_ONE),
    (RefusesItsConfig, IS_ONE),
    (ForgetsItsRate, "test_survives_the_way_to_a_worker"),
    (InitsByTheGlobalStream, "test_init_is_deterministic"),
    (TrainsByChance, SAME),
    (TrainsNothing, SAME),
    (SaysNoLossTheSecondTime, SAME),
    (ConsumesNothing, SHARD),
    (CountsWholeBatches, SHARD),
    (CentersItsArrays, "test_nothing_that_goes_in_is_changed"),
    (BeginsAnew, CUT),
    (ForgetsItsLoss, CUT),
    (TrainsSlowerInPieces, CUT),
    (TrainsHalfInAGang, GANG),
    (TrainsFasterInAGang, GANG),
    (TrainsOnHalf, HALF),
    (KnowsItsStatesByTheirPlace, "test_a_state_hops_and_is_stored"),
    (GoesByWhatItHasLetGo, "test_a_spare_state_trains_and_is_scored_as_any_other"),
    (ChangesWhatIsTheSame, "test_a_state_goes_on_with_its_own_configuration"),
    (ScoresSomethingElse, SCORES),
    (ScoresInNumpy, SCORES),
    (ScoresByChance, SCORES),
    (CountsBatches, SCORES),
    (LearnsFromScoring, SCORES),
    (GoesOnWithTheLastState, "test_what_is_kept_of_a_trial_changes_nothing"),
    (CountsItsUnits, "test_a_workload_that_was_used_is_the_same"),
    (PicklesIntoItsState, "test_a_state_is_safetensors_and_json"),
    (InitsByTheGlobalStream, STREAMS),
    (DrawsAsItScores, STREAMS),
    (DrawsAsItMakesAModel, STREAMS),
]


@pytest.mark.parametrize(("bad", "law"), BAD)
def test_a_bad_workload_is_caught(bad: type[NoModel], law: str) -> None:
    class Suite(LineSuite):
        def make_workload(self) -> Any:
            return bad(rate=0.05)

    with pytest.raises((AssertionError, WorkloadError)):
        getattr(Suite(), law)()


def test_each_law_is_shown_to_bite() -> None:
    assert {law for _, law in BAD} == {name for name in dir(WorkloadSuite) if name[:5] == "test_"}


@pytest.mark.parametrize("law", [GANG, HALF, "test_a_state_goes_on_with_its_own_configuration"])
def test_a_law_of_what_a_workload_cannot_do_is_skipped_and_does_not_pass(law: str) -> None:
    with pytest.raises(SkipTest):
        getattr(TestLine(), law)()
