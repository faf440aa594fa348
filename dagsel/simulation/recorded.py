"""Curves that were recorded: what the trials of an earlier run did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dagsel.dispatch.units import Kind, Unit
from dagsel.errors import SearchError, TrainingError
from dagsel.history.makespans import relative_speeds
from dagsel.history.record import Record
from dagsel.history.result import Result
from dagsel.simulation.curves import Config, scalars

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the trials of an earlier run did, by configuration.

    A simulation without a space draws the recorded configurations, in their order. A space may only
    draw configurations that were recorded.

    Parameters
    ----------
    configs
        Configuration that was drawn for each trial, by its number.
    values
        By trial: the value of the metric after each epoch, from the first one on.
    epoch_s
        By trial: seconds of an epoch's training on a worker of speed 1.
    failed
        Trials that failed, and why: they fail again after their last recorded epoch.
    evaluation_share
        Time of an epoch's validation, as a share of its training's.
    adopted
        Trials that went on from another trial's state. They are looked up by their number, since
        their configuration has changed, so only the same search with the same seed repeats them.
    initial
        Value of the metric before the first epoch, such as an accuracy by chance. Without it a
        value inside the first epoch is refused.

    Examples
    --------
    >>> import pandas as pd
    >>> metrics = pd.DataFrame(
    ...     {"trial": [0, 0], "epoch": [1, 2], "split": "validation", "name": "error",
    ...      "value": [0.5, 0.25]}
    ... )
    >>> curves = Recorded.from_metrics(metrics, {0: {"lr": 0.1}}, metric="error", epoch_s=60.0)
    >>> curves.value({"lr": 0.1}, 2, trial=5)
    0.25
    >>> curves.seconds({"lr": 0.1}, trial=0)
    60.0
    """

    configs: Mapping[int, Config]
    values: Mapping[int, tuple[float, ...]]
    epoch_s: Mapping[int, float]
    failed: Mapping[int, str]
    evaluation_share: float = 0.0
    adopted: frozenset[int] = frozenset()
    initial: float | None = None

    @classmethod
    def from_run(cls, run: Result) -> Recorded:
        """Read the metrics, the configurations and the units' times of a run.

        A trial that trained only in gangs is taken to speed up linearly.

        Parameters
        ----------
        run
            A `Run`, or a `SimulatedRun`.

        Examples
        --------
        >>> import dagsel
        >>> from dagsel.flows import RandomSearch
        >>> from dagsel.simulation import PowerLaw, SimulatedCluster
        >>> search, cluster = RandomSearch(max_epochs=3, n_trials=4), SimulatedCluster(n_workers=2)
        >>> run = dagsel.simulate(
        ...     search,
        ...     PowerLaw(),
        ...     cluster,
        ...     space=lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)},
        ... )
        >>> again = dagsel.simulate(search, Recorded.from_run(run), cluster)
        >>> again.best_value == run.best_value
        True
        """
        record = run.record
        trained, scored = _work(record, "train"), _work(record, "evaluate")
        # As they were drawn: a search such as PBT changes them later.
        configs = {number: t.drawn or t.config for number, t in record.trials.items()}
        epoch_s = _epoch_s(record, trained)
        share = fmean(scored.values()) / fmean(trained.values()) if trained and scored else 0.0
        return replace(
            cls.from_metrics(run.metrics, configs, metric=run.metric, epoch_s=epoch_s),
            failed={trial.number: trial.reason for trial in record.failures},
            evaluation_share=share,
            adopted=frozenset(n for n, trial in record.trials.items() if trial.adoptions),
        )

    @classmethod
    def from_metrics(
        cls,
        metrics: pd.DataFrame,
        configs: Mapping[int, Config],
        *,
        metric: str,
        epoch_s: float | Mapping[int, float],
    ) -> Recorded:
        """Read a run's metrics.

        Parameters
        ----------
        metrics
            A frame like `Run.metrics`.
        configs
            Configuration of each trial.
        metric
            Name of the validation metric of the search.
        epoch_s
            Seconds of an epoch's training on a worker of speed 1: by trial, or one for all.

        Raises
        ------
        SearchError
            If the metric was not recorded after each epoch.
        """
        is_metric = (metrics["split"] == "validation") & (metrics["name"] == metric)
        if not is_metric.any():
            names = ", ".join(sorted(set(metrics["name"])))
            raise SearchError(f"no validation metric {metric!r} was recorded; take one of {names}")
        values = {}
        recorded = metrics[is_metric].sort_values("epoch")
        for trial in sorted(set(recorded["trial"])):
            rows = recorded[recorded["trial"] == trial]
            if list(rows["epoch"]) != list(range(1, len(rows) + 1)):
                raise SearchError(
                    f"trial {trial}: {metric!r} was not recorded after each epoch; record a run "
                    "that scores each"
                )
            values[int(trial)] = tuple(map(float, rows["value"]))
        seconds = epoch_s if isinstance(epoch_s, Mapping) else dict.fromkeys(configs, epoch_s)
        return cls({n: scalars(config) for n, config in configs.items()}, values, seconds, {})

    def value(self, config: Config, epoch: float, *, trial: int) -> float:
        """Return the metric's value after an epoch; inside one, interpolate.

        Parameters
        ----------
        config
            The configuration.
        epoch
            How far the trial has trained, from 0 on.
        trial
            Number of the trial.

        Raises
        ------
        TrainingError
            If the recorded trial failed in this epoch.
        SearchError
            If the epoch was not recorded.
        """
        number = self._find(config, trial)
        values = self.values.get(number, ())
        first, known = (1, values) if self.initial is None else (0, (self.initial, *values))
        if values and epoch < first:
            raise SearchError(
                f"trial {number} was recorded after epochs {first} to {len(values)}, and epoch "
                f"{epoch:g} is wanted; give initial=, the value before the first epoch"
            )
        if epoch <= len(values):
            whole = int(epoch)
            before, after = known[whole - first], known[math.ceil(epoch) - first]
            return before + (epoch - whole) * (after - before) if whole != epoch else before
        if number in self.failed:
            raise TrainingError(self.failed[number])
        raise SearchError(
            f"trial {number} was recorded for {len(values)} epochs, and epoch {epoch} is wanted; "
            "record a run that trains its trials as long, such as RandomSearch"
        )

    def seconds(self, config: Config, *, trial: int) -> float:
        """Return the time of an epoch's training; the mean for a trial without a finished unit.

        Parameters
        ----------
        config
            The configuration.
        trial
            Number of the trial.
        """
        known = self.epoch_s.get(self._find(config, trial))
        return fmean(self.epoch_s.values()) if known is None else known

    def space(self, trial: Any) -> dict[str, Any]:
        """Suggest the recorded configuration of a trial's number."""
        config = self.configs[sorted(self.configs)[trial.number]]
        return {key: trial.suggest_categorical(key, self._choices(key)) for key in config}

    def _choices(self, key: str) -> list[Any]:
        return list(dict.fromkeys(c[key] for c in self.configs.values() if key in c))

    def _find(self, config: Config, trial: int) -> int:
        config = scalars(config)
        if trial in self.adopted or self.configs.get(trial) == config:
            return trial
        for number, recorded in self.configs.items():
            if recorded == config:
                return number
        raise SearchError(
            f"trial {trial} has a configuration that was not recorded: {config}; leave out space= "
            "to draw the recorded ones"
        )


def _work(record: Record, kind: Kind) -> dict[Unit, float]:
    """Return the seconds that a worker of speed 1 needs for each unit, with all its pieces.

    Units of gangs are left out if the trial also trained on one worker. Else a gang counts as so
    many times as fast.
    """
    speeds = relative_speeds([done for done in record.timed() if done.gang == 1])
    ran = [done for done in (*record.units, *record.pieces) if done.unit.kind == kind]
    found = {done.unit for done in ran if done.recovered}
    ended = [done.unit for done in record.units if done.unit.kind == kind]
    work = {unit: 0.0 for unit in ended if unit not in found}
    for done in ran:
        if done.unit in work:
            speed = speeds.get(done.worker, 1.0)
            work[done.unit] += done.trains_seconds * speed * done.gang
    by_gangs = {done.unit for done in ran if done.gang > 1}
    alone = {unit.trial for unit in work.keys() - by_gangs}
    return {u: s for u, s in work.items() if u not in by_gangs or u.trial not in alone}


def _epoch_s(record: Record, trained: Mapping[Unit, float]) -> dict[int, float]:
    seconds: dict[int, list[float]] = {}
    for unit, unit_s in trained.items():
        seconds.setdefault(unit.trial, []).append(unit_s)
    return {trial: record.n_shards * fmean(times) for trial, times in seconds.items()}
