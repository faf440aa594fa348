"""`simulate`: a search in virtual time."""

from __future__ import annotations

import copy
import gc
import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args, overload

from dagsel.arguments import check_several, checked, limits_of
from dagsel.checks import choice, named_arguments, short_traceback, shown
from dagsel.driver.idle_workers import IdleWorkers
from dagsel.driver.runner import Runner
from dagsel.errors import CheckpointNotFoundError, SearchError
from dagsel.flow import Direction, Flow, Goal, Sampling
from dagsel.garbage import is_ours_to_freeze
from dagsel.history.record import Record
from dagsel.history.result import Result
from dagsel.messages import ENTRIES, Entry, FlowState, UnitRecord
from dagsel.planning.bill import Bill
from dagsel.planning.budget import Budget, price_for
from dagsel.planning.prices import Price
from dagsel.planning.small_population import Policy
from dagsel.simulation.cluster import SimulatedCluster
from dagsel.simulation.curves import Curves
from dagsel.simulation.engine import VirtualEngine
from dagsel.simulation.order import read_order
from dagsel.simulation.recorded import Recorded
from dagsel.study import Space, StudyDriver, open_study
from dagsel.study.sampler import quiet

if TYPE_CHECKING:
    from dagsel.study import BaseSampler


_CURVES = "write curves=dagsel.simulation.PowerLaw(epoch_s=60.0)"
_CLUSTER = "write cluster=dagsel.simulation.SimulatedCluster(n_workers=4)"
NOT_TRAINED = "nothing is trained; leave it out"
#: Arguments of a search that one in virtual time does not take.
OF_TRAINING = dict.fromkeys(
    ("callbacks", "client", "data", "observers", "progress", "run_dir", "study", "workload"),
    NOT_TRAINED,
)
_ELSEWHERE = {
    **OF_TRAINING,
    **dict.fromkeys(("epoch_s", "epoch_seconds", "seconds_per_epoch"), _CURVES),
    **dict.fromkeys(("max_cluster_workers", "n_workers", "num_workers", "workers"), _CLUSTER),
}
#: Units after which what a search in virtual time remembers is put out of the garbage collector's
#: sight. What becomes garbage in between is collected as ever.
FREEZE_EACH = 4096


@dataclass(frozen=True, repr=False)
class SimulatedRun(Result):
    """The result of a search in virtual time.

    Parameters
    ----------
    study
        The study, in memory.
    metric
        Name of the metric; of several the first one.
    record
        All that was done; times are virtual.
    cluster
        The cluster.
    journal
        All events and decisions, as a run on a cluster writes them.
    bill
        When workers were requested, joined and left.
    price
        What an hour of a worker costs, of pools of the dearest; None if it is not known.
    deadline_s, budget
        The limits that it had; None for no limit.

    Examples
    --------
    >>> import dagsel
    >>> from dagsel.flows import RandomSearch
    >>> from dagsel.simulation import PowerLaw, SimulatedCluster
    >>> run = dagsel.simulate(
    ...     RandomSearch(max_epochs=3, n_trials=8),
    ...     PowerLaw(epoch_s=60.0),
    ...     SimulatedCluster(n_workers=4),
    ...     space=lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)},
    ... )
    >>> run.seconds, run.cost, run.money
    (360.0, 1440.0, None)
    >>> list(run.leaderboard(n=3)["state"])
    ['complete', 'complete', 'complete']
    """

    cluster: SimulatedCluster
    journal: Sequence[Mapping[str, Any]]
    bill: Bill
    price: Price | None = None
    deadline_s: float | None = None
    budget: Budget | None = None

    @property
    def cost(self) -> float:
        """Worker-seconds that are billed, from request to release."""
        return self.bill.worker_seconds(self._end)

    @property
    def money(self) -> float | None:
        """What that costs, each worker at its own price; None if no price is known."""
        if self.bill.prices:
            return self.bill.money(self._end)
        return None if self.price is None else self.price.of(self.cost)

    @property
    def _end(self) -> float:
        # By the clock of the workers; by rounding it may lie before the bill's last event.
        return max(self.bill.at, self.seconds - self.cluster.startup_s)

    @property
    def _limits(self) -> tuple[float | None, Budget | None]:
        return self.deadline_s, self.budget


@named_arguments("dagsel.simulate", _ELSEWHERE, error=SearchError)
def simulate(
    flow: Flow,
    curves: Curves | Mapping[str, Curves],
    cluster: SimulatedCluster,
    *,
    seed: int = 0,
    space: Space | None = None,
    sampler: BaseSampler | None = None,
    direction: Direction | Sequence[Direction] = "minimize",
    metric: str | Sequence[str] = "value",
    deadline: float | str | None = None,
    budget: float | str | None = None,
    price_per_worker_hour: float | str | None = None,
    small_population: Policy = "auto",
    order: Sequence[Mapping[str, Any]] = (),
) -> SimulatedRun:
    """Search in virtual time: see what a flow would find on a cluster, when and at what cost.

    Flow, runner and dispatcher are the same as in a run on a cluster; the workers are a model. The
    same arguments give the same journal.

    Parameters
    ----------
    flow
        The search procedure, from `dagsel.flows` or your own; left as it is.
    curves
        What trials do and what they cost: a `PowerLaw`, a `Recorded` run or your own. For a search
        for several metrics those of each by its name; the first says what trials cost.
    cluster
        What the workers are like.
    seed
        Seeds the flow and the draws of configurations.
    space
        Optuna's define-by-run function. Without one the configurations of a `Recorded` run are
        drawn, in their order.
    sampler
        Sampler of the study, left as it is; by default Optuna's own.
    direction
        Whether smaller or larger values are better; of several metrics a list.
    metric
        Name of the metric, or a list of names.
    deadline, budget, price_per_worker_hour
        As for `dagsel.optimize`, in virtual time; by default the flow's own, if it has any. Pools
        of the cluster have prices of their own.
    small_population
        As for `dagsel.optimize`: by default workers that are idle are released if there is a
        budget, and the cluster can change its size (`SimulatedCluster.max_workers`). There are no
        profiles, so only ``"gang"`` makes gangs. Take ``"hop"`` for a deterministic run.
    order
        Journal of another run of the flow. Trials report in its order: an epoch is reported only
        when those before it are.

    Returns
    -------
    SimulatedRun
        A result with the tables of `dagsel.optimize`.

    Raises
    ------
    SearchError
        If flow, curves, space and order do not fit together.
    ClusterError
        If the cluster cannot run the search.

    Examples
    --------
    >>> from dagsel.flows import RandomSearch
    >>> from dagsel.simulation import PowerLaw, SimulatedCluster, simulate
    >>> run = simulate(
    ...     RandomSearch(max_epochs=3, n_trials=8),
    ...     PowerLaw(epoch_s=60.0),
    ...     SimulatedCluster(n_workers=4),
    ...     space=lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)},
    ... )
    >>> run.seconds, run.cost  # 8 trials of 3 epochs of a minute, on 4 workers
    (360.0, 1440.0)
    """
    given = checked(
        "space",
        "sampler",
        flow=flow,
        seed=seed,
        space=space,
        sampler=sampler,
    )
    seed = given.seed
    goals, metrics = _goals(metric, direction, curves)
    curves = metrics[goals[0].metric]
    keep = check_several(goals, flow, None, 1)
    check_simulated(cluster)
    flow = flow.fresh()
    limits = (flow.traits, deadline, budget, price_per_worker_hour, cluster.workers)
    deadline_s, cost = limits_of(*limits)
    price = cost.price if cost else price_for(price_per_worker_hour, cluster.workers)
    name = f"simulated-{seed}"
    driver = _driver(name, flow, curves, seed, space, copy.deepcopy(sampler), goals)
    metric, several = goals[0].metric, goals if len(goals) > 1 else ()
    record = Record(name, cluster.n_shards, goals[0].direction, keep, goals=several)
    journal = _Journal(record)
    engine = VirtualEngine(curves, cluster, metrics, order=read_order(order), seed=seed)
    in_money = cost is not None and cost.is_money_for(cluster.workers)
    runner = Runner(
        flow,
        driver,
        engine,
        _NoStates(),
        journal,
        record,
        metric,
        seed=seed,
        deadline_s=deadline_s,
        budget_s=None if cost is None or in_money else cost.worker_seconds,
        budget_money=cost.amount if cost is not None and in_money else None,
        idle_workers=_idle_workers(small_population, cost, engine.why_fixed),
        lead_s=cluster.startup_s,
    )
    with journal.unwalked():
        runner.run()
    if cost is not None and in_money:
        cost = replace(cost, worker_seconds=math.inf)
    told = (driver.study, metric, record, cluster, journal, engine.bill, price)
    return SimulatedRun(*told, deadline_s, cost)


@short_traceback
def _idle_workers(policy: Policy, cost: Budget | None, why_fixed: str) -> IdleWorkers:
    """Return what becomes of idle workers, as in a run on a cluster without profiles."""
    choice("small_population", policy, get_args(Policy))
    costs = policy == "auto" and cost is not None and not why_fixed
    return IdleWorkers(policy, costs=costs, why_no_release=why_fixed)


def check_curves(curves: Any) -> None:
    """Raise a `SearchError` unless curves say what trials do and cost."""
    if isinstance(curves, type) or not isinstance(curves, Curves):
        raise SearchError(
            f"curves must say what trials cost, got {shown(curves)}; write "
            "curves=dagsel.simulation.PowerLaw(epoch_s=60.0)"
        )


@short_traceback
def _goals(
    metric: Any, direction: Any, curves: Any
) -> tuple[tuple[Goal, ...], Mapping[str, Curves]]:
    """Return the metrics of a search, and the curves of each by its name."""
    names = [metric] if isinstance(metric, str) else list(metric)
    directions: list[Any] = [direction] if isinstance(direction, str) else list(direction)
    for one in directions:
        choice("direction", one, get_args(Direction))
    given = curves if isinstance(curves, Mapping) else dict.fromkeys(names[:1], curves)
    for one in given.values():
        check_curves(one)
    if not names or len(names) != len(directions) or names != list(given):
        raise SearchError(
            f"metric names {', '.join(names)}, direction has {len(directions)}, and the curves are "
            f"of {', '.join(given)}: give each metric a direction and curves, in one order"
        )
    return tuple(map(Goal, names, directions)), given


def check_simulated(cluster: Any) -> None:
    """Raise a `SearchError` unless a cluster is one in virtual time."""
    if not isinstance(cluster, SimulatedCluster):
        n_workers = cluster if isinstance(cluster, int) else 4
        raise SearchError(
            f"cluster must be a SimulatedCluster, got {shown(cluster)}; write "
            f"cluster=dagsel.simulation.SimulatedCluster(n_workers={n_workers})"
        )


def _driver(
    name: str,
    flow: Flow,
    curves: Curves,
    seed: int,
    space: Space | None,
    sampler: BaseSampler | None,
    goals: Sequence[Goal],
) -> StudyDriver:
    recorded = curves if space is None and isinstance(curves, Recorded) else None
    if recorded is not None:
        space = recorded.space
    if space is None:
        raise SearchError(
            "space is missing; only Recorded curves bring configurations of their own"
        )
    with quiet():
        study = open_study(name, [goal.direction for goal in goals], None)
    if sampler is not None:
        study.sampler = sampler
    driver = (StudyDriver if recorded is None else _Walk)(
        study,
        space,
        goals[0].metric,
        seed,
        run=name,
        sampler_seed=seed if sampler is None else None,
        traits=flow.traits,
    )
    if recorded is None:
        grid = flow.traits.sampling == "grid"
        driver.validate(grid=grid, check=flow.check_config)
    else:
        for number in sorted(recorded.configs):
            study.enqueue_trial(dict(recorded.configs[number]))
    return driver


class _Walk(StudyDriver):
    """Draws the enqueued trials in their order, and no others."""

    __slots__ = ()

    def ask(self, n: int, sampling: Sampling) -> tuple[dict[int, dict[str, Any]], bool]:
        """Draw trials; fewer than asked for if no more are enqueued."""
        n_left = len(self._follow())
        configs, _ = StudyDriver.ask(self, min(n, n_left), "random")
        return configs, n > n_left or (sampling == "grid" and n == n_left)


@dataclass(frozen=True, slots=True)
class _NoStates:
    """A store without states: in virtual time nothing is trained."""

    def load_latest(
        self, trial: int, at_most: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], bytes, dict[str, Any]] | None:
        return None if at_most is None else (at_most, b"", {})

    def load(
        self, trial: int, epoch: int, position: int, *, partial: bool = False
    ) -> tuple[bytes, dict[str, Any]]:
        if partial:
            raise CheckpointNotFoundError("a simulated search trains nothing, so it has no models")
        return b"", {}

    def trials(self) -> tuple[int, ...]:
        return ()

    def list(self, trial: int, *, partial: bool = False) -> tuple[tuple[int, int], ...]:
        return ()

    def save(self, *args: Any, **options: Any) -> None:
        pass

    def load_check(self, trial: int, number: int) -> tuple[bytes, dict[str, Any]]:
        return b"", {}

    def load_scores(self, *args: Any) -> bytes:
        return b""

    keep_check = delete = drop = drop_scores = save


class _Journal(Sequence[Mapping[str, Any]]):
    """A journal in memory; an entry is written out when it is looked at.

    The units are in the record, which takes in each entry before it comes here. The states of the
    flow, which are many small lists, are kept as text.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._at = array("q")  # of each entry: the number of its unit, or -1 - its place in `_rest`
        self._rest: list[Entry | str] = []
        self._n_units = self._n_frozen = len(record.units)
        self._may_freeze = False

    @contextmanager
    def unwalked(self) -> Iterator[None]:
        """Keep the garbage collector from walking all that a search remembers, time and again.

        What is there when it has grown by `FREEZE_EACH` units is looked at again after the search.
        Nothing is done if the user's program has frozen objects itself.
        """
        self._may_freeze = is_ours_to_freeze()
        try:
            yield
        finally:
            if self._may_freeze:
                gc.unfreeze()
                self._may_freeze = False

    def append(self, entries: Sequence[Entry]) -> None:
        """Add entries to the journal."""
        for entry in entries:
            if isinstance(entry, UnitRecord):
                self._at.append(self._n_units)
                self._n_units += 1
                continue
            self._at.append(-1 - len(self._rest))
            kept = json.dumps(entry.state) if isinstance(entry, FlowState) else entry
            self._rest.append(kept)
        if self._may_freeze and self._n_units - self._n_frozen >= FREEZE_EACH:
            self._n_frozen = self._n_units
            gc.freeze()

    def __len__(self) -> int:
        return len(self._at)

    @overload
    def __getitem__(self, at: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, at: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        if isinstance(at, slice):
            return [self._read(place) for place in self._at[at]]
        return self._read(self._at[at])

    def _read(self, place: int) -> Mapping[str, Any]:
        entry = self._record.units[place] if place >= 0 else self._rest[-1 - place]
        return ENTRIES.encode(FlowState(json.loads(entry)) if isinstance(entry, str) else entry)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
