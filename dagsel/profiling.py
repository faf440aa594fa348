"""Scaling profiles of an architecture: measured, learnt from runs, or given by hand."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from dagsel.arguments import checked
from dagsel.checks import short_traceback, shown
from dagsel.codec import from_json, to_json
from dagsel.console import Waiting, html_table, readable_size, text_table
from dagsel.errors import DatasetFormatError, SearchError
from dagsel.execution.cluster import check_cluster, connect, workers_of
from dagsel.execution.timing import Timing as Timing
from dagsel.execution.timing import TimingPlan, time_gangs
from dagsel.history.result import Run
from dagsel.planning.scaling import Fit, Scaling, learn
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets.profiles import profile_names, read_profile, write_profile
from dagsel.storage.files import Url
from dagsel.workloads.base import Config, Workload, checks, outline
from dagsel.workloads.memory import NeedsMemory, with_halved

if TYPE_CHECKING:
    from dagsel.execution.cluster import Client

logger = logging.getLogger("dagsel")

_VERSION = 1
_TITLES = ("workers", "speedup", "efficiency", "samples/s", "ms a batch", "memory a worker")


@dataclass(frozen=True, slots=True, repr=False)
class Profile:
    """How one architecture scales.

    Parameters
    ----------
    architecture
        Its name.
    scaling
        The speedup λ by number of workers.
    within
        Share of the top speed that may be given up for fewer workers.
    timings
        The measurements, if it was measured.
    device
        What it was measured on.
    fit
        The law that `scaling` was taken from, and its error, if it was learnt.

    Examples
    --------
    >>> profile = Profile.given({1: 1, 2: 1.85, 4: 1.9})
    >>> profile.best, profile.scaling.speedup(3)
    (2, 1.875)
    >>> profile
    <Profile given: best on 2 workers
     workers  speedup  efficiency
           1     1.00        100%
           2     1.85         92%
           4     1.90         48%>
    >>> from dagsel.storage import ShardedDataset
    >>> data = ShardedDataset.write("memory://profiled", {"x": [[0.0]] * 20}, n_shards=1)
    >>> profile.save(data)
    >>> Profile.load(data, "given").best
    2
    """

    architecture: str
    scaling: Scaling
    within: float = 0.03
    timings: tuple[Timing, ...] = ()
    device: str = ""
    fit: Fit | None = None

    def __post_init__(self) -> None:
        self.scaling.best(1, within=self.within)  # raises if within is out of range

    @classmethod
    def given(
        cls, speedups: Mapping[int, float], *, architecture: str = "given", within: float = 0.03
    ) -> Profile:
        """Return a profile of known speedups.

        Parameters
        ----------
        speedups
            The speedup λ by number of workers.
        architecture
            Name to store it under.
        within
            As for `dagsel.profile`.
        """
        return cls(architecture, Scaling(speedups), within)

    @classmethod
    def learnt(cls, *runs: Run, by: str | None = None, within: float = 0.03) -> dict[str, Profile]:
        """Learn how architectures scale from runs: from the times of their units.

        A unit is one pass of a trial over one shard. The universal scalability law is fitted to the
        times (`dagsel.planning.scaling.fit`). Unlike those of `dagsel.profile`, they contain the
        overhead of a unit. The first gang of each worker is left out. Beyond the largest observed
        number of workers λ is constant.

        Parameters
        ----------
        *runs
            Runs on the same data set.
        by
            The name in the configurations that tells the architecture; by default
            `architecture_of` the workload with each configuration.
        within
            As for `dagsel.profile`.

        Returns
        -------
        profiles
            By architecture; ``profile.fit.error`` is the error of each. An architecture that was
            trained on only one number of workers is left out.

        Raises
        ------
        SearchError
            If no architecture was trained on two numbers of workers, or the data sets differ.

        Examples
        --------
        >>> Profile.learnt(run, by="width")  # doctest: +SKIP
        {'64': <Profile 64: best on 2 workers, learnt from 96 units, 4% off ...>}
        """
        if len({run.run_dir.about()["data_digest"] for run in runs}) > 1:
            raise SearchError(
                "the runs are of several data sets, whose units are of different length: learn "
                "from those of one at a time"
            )
        units = [unit for run in runs for unit in _units(run, by)]
        fits = {name: fit for name, fit in learn(units).items() if len(fit.gangs) > 1}
        if not fits:
            raise SearchError(
                f"of {len(units)} units no architecture was trained on two numbers of workers: "
                "there is nothing to learn; measure with dagsel.profile(...)"
            )
        return {
            name: cls(
                name,
                Scaling({n: fit.model.speedup(n) for n in range(1, fit.gangs[-1] + 1)}),
                within,
                fit=fit,
            )
            for name, fit in fits.items()
        }

    @classmethod
    def load(cls, data: ShardedDataset | Url, architecture: str) -> Profile:
        """Read the profile of an architecture.

        Parameters
        ----------
        data
            A data set, or its URL.
        architecture
            Its name.

        Raises
        ------
        SearchError
            If none is kept with the data.
        DatasetFormatError
            If it is damaged or of a newer version.
        """
        data = _open(data)
        found = _find(data, architecture)
        if found is None:
            known = ", ".join(profile_names(data)) or "none"
            raise SearchError(
                f"no profile of {architecture!r} is kept with {data.url} (there: {known}); measure "
                "it with dagsel.profile(...) or give it with Profile.given({1: 1, 2: ...})"
            )
        return found

    def save(self, data: ShardedDataset | Url) -> None:
        """Store it with the data; an earlier one of this architecture is replaced.

        Parameters
        ----------
        data
            A data set, or its URL.
        """
        body = {"format": "dagsel.profile", "version": _VERSION, "profile": to_json(self)}
        write_profile(_open(data), self.architecture, json.dumps(body, indent=1).encode())

    @property
    def best(self) -> int:
        """The smallest number of workers whose speed is within `within` of the top one."""
        return self.scaling.best(max(self.scaling.speedups), within=self.within)

    def _rows(self) -> list[tuple[str, ...]]:
        timings = {timing.n_workers: timing for timing in self.timings}
        rows: list[tuple[str, ...]] = [_TITLES if timings else _TITLES[:3]]
        for n, speedup in self.scaling.speedups.items():
            row: tuple[str, ...] = (str(n), f"{speedup:.2f}", f"{self.scaling.efficiency(n):.0%}")
            if n in timings:
                timing = timings[n]
                rate, batch = f"{timing.samples_per_s:,.0f}", f"{1e3 * timing.batch_s:,.2f}"
                row = (*row, rate, batch, readable_size(timing.memory_bytes))
            rows.append(row)
        return rows

    def _title(self) -> str:
        on = f", measured on {self.device}" if self.device else ""
        if self.fit is not None:
            on = f", learnt from {self.fit.n} units, {self.fit.error:.0%} off"
        plural = "s" if self.best > 1 else ""
        return f"Profile {self.architecture}: best on {self.best} worker{plural}{on}"

    def __repr__(self) -> str:
        return "\n".join([f"<{self._title()}", *text_table(self._rows())]) + ">"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._title())}</p>{html_table(self._rows())}"


def profile(
    workload: Workload,
    config: Config,
    data: ShardedDataset | Url,
    gangs: Iterable[int] | None = None,
    *,
    client: Client | str | None = None,
    cluster: Any = None,
    n_batches: int = 20,
    warmup: int = 3,
    within: float = 0.03,
    remeasure: bool = False,
    architecture: str | None = None,
) -> Profile:
    """Measure how training scales with the number of workers, or read what was measured before.

    A few batches of the data set's first shard are trained and timed on each number of workers. The
    result is stored with the data set under the architecture's name. It is measured again only if a
    number of workers is missing in it. Its other numbers stay, if they were given by hand or
    measured on the same device.

    Parameters
    ----------
    workload
        What to train.
    config
        The configuration to train it with.
    data
        A data set, or its URL.
    gangs
        Numbers of workers; 1 is always added. By default 1, 2, 4 and so on, up to the cluster's
        workers; without a cluster those of the stored profile.
    client, cluster
        As for `dagsel.optimize`.
    n_batches
        Batches that are timed on each number of workers.
    warmup
        Batches before these.
    within
        The best number of workers is the smallest within this share of the top speed.
    remeasure
        Measure in any case and discard the stored profile, as needed on other hardware.
    architecture
        Name to store it under; by default `architecture_of` the workload with this configuration.

    Returns
    -------
    Profile
        The table; flows take ``profile.best`` or ``profile.scaling``.

    Raises
    ------
    SearchError
        If an argument is out of range.
    WorkloadError
        If the workload cannot train on several workers, or not with so small a batch.
    ClusterError
        If the cluster has too few workers.

    Examples
    --------
    >>> from dagsel.storage import ShardedDataset
    >>> from dagsel.testing.synthetic import SyntheticWorkload
    >>> from dagsel.profiling import Profile, profile
    >>> data = ShardedDataset.write("profiled.zarr", {"x": [[0.0]] * 20}, n_shards=1)
    >>> known = Profile.given({1: 1, 2: 1.8}, architecture="small")
    >>> known.save(data)
    >>> profile(SyntheticWorkload(), {}, data, architecture="small").best  # as it was stored
    2
    """
    given = checked(workload=workload, data=data, remeasure=remeasure, within=within)
    dataset, within = given.data, given.within
    if not isinstance(config, Mapping):
        raise SearchError(
            f'config must be a configuration, got {shown(config)}; write config={{"lr": 0.1}}'
        )
    if gangs is not None and not isinstance(gangs, Iterable):
        raise SearchError(f"gangs must be numbers of workers, got {gangs!r}; write gangs=[{gangs}]")
    plan = TimingPlan(None if gangs is None else (1, *gangs), n_batches, warmup)
    checks(workload, dataset.manifest)(config)
    architecture = architecture or architecture_of(workload, config)
    kept = None if remeasure else _find(dataset, architecture)
    needs_no_cluster = plan.gangs is not None or (client is None and cluster is None)
    if kept is not None and needs_no_cluster and _has(kept, plan.gangs or ()):
        return replace(kept, within=within)
    check_cluster(client, cluster)
    with Waiting(f"profiling {architecture}") as waiting, connect(client, cluster) as here:
        n_workers = len(workers_of(here))
        if kept is not None and plan.gangs is None and _has(kept, plan.on(n_workers)):
            return replace(kept, within=within)

        def on_begin(n: int, most: int) -> None:
            waiting.say(f"profiling {architecture} on {n} of {most} workers")

        timings, device = time_gangs(here, workload, config, dataset, plan, on_begin)
    speedups = {timing.n_workers: timings[0].batch_s / timing.batch_s for timing in timings}
    if kept is not None and kept.device in ("", device):
        older = [timing for timing in kept.timings if timing.n_workers not in speedups]
        timings = tuple(sorted((*older, *timings), key=lambda timing: timing.n_workers))
        speedups = {**kept.scaling.speedups, **speedups}
    result = Profile(architecture, Scaling(speedups), within, timings, device)
    try:
        result.save(dataset)
    except OSError as error:
        logger.warning("the profile could not be kept with %s: %s", dataset.url, error)
    return result


def architecture_of(workload: Workload, config: Config) -> str:
    """Return the name of an architecture: a checksum, and the batch size if the workload has one.

    Two configurations are of one architecture if their initial states hold tensors of the same
    names, types and shapes. The batch size is part of the name as scaling depends on it.

    Parameters
    ----------
    workload
        What is trained.
    config
        The configuration.

    Examples
    --------
    >>> from dagsel.testing.synthetic import SyntheticWorkload
    >>> architecture_of(SyntheticWorkload(), {}) == architecture_of(SyntheticWorkload(), {"lr": 1})
    True
    """
    tensors = workload.init(config, seed=0).tensors
    shapes = [[name, tensor.dtype, list(tensor.shape)] for name, tensor in sorted(tensors.items())]
    text = json.dumps([type(workload).__qualname__, shapes])
    name = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    batch: Any = getattr(workload, "batch_size", None)
    batch = batch(config) if callable(batch) else batch
    return name if batch is None else f"{name}-batch{batch}"


def stored_scaling(data: ShardedDataset, workload: Workload, config: Config) -> Scaling | None:
    """Return how a configuration scales by the profiles stored with a data set; None if unknown."""
    try:
        if not profile_names(data):
            return None
        found = _find(data, architecture_of(workload, config))
    except (OSError, DatasetFormatError) as error:
        logger.warning("profiles beside %s are not used: %s", data.url, error)
        return None
    return None if found is None else found.scaling


class MemoryNeeds:
    """Knows what a unit takes: as the workload says, as was measured, or as the workload counts.

    Parameters
    ----------
    workload
        What is trained.
    data
        The data set. The profiles that are stored with it when they are first needed are looked at.
    """

    def __init__(self, workload: Workload, data: ShardedDataset) -> None:
        self._workload, self._data = workload, data
        self._profiled: set[str] | None = None  # names of architectures

    def __call__(self, config: Config, halvings: int) -> int | None:
        """Return the bytes that a unit takes beside its shard; None if it is not known.

        Its samples are halved so often, which no profile knows.
        """
        workload = with_halved(self._workload, halvings)
        says = workload if isinstance(workload, NeedsMemory) else None
        measured = None
        if not halvings and (says is None or says.is_counted):
            measured = self._measured(config)
        if measured is not None or says is None:
            return measured
        return says.memory_bytes(config, outline(self._data.manifest))

    def _measured(self, config: Config) -> int | None:
        try:
            if self._profiled is None:
                self._profiled = set(profile_names(self._data))
            if not self._profiled:
                return None
            name = architecture_of(self._workload, config)
            found = _find(self._data, name) if name in self._profiled else None
        except (OSError, DatasetFormatError) as error:
            logger.warning("profiles beside %s are not used: %s", self._data.url, error)
            self._profiled = set()
            return None
        timings = () if found is None else found.timings
        return next((it.memory_bytes for it in timings if it.n_workers == 1), None)


def _units(run: Run, by: str | None) -> list[tuple[str, int, float]]:
    """Return architecture, number of workers and seconds of the units of a run."""
    timed, trials = run.record.timed(), run.record.trials
    trained = {done.unit.trial for done in timed}
    workload = run.given_workload
    names = {trial: _name(workload, trials[trial].config, by) for trial in trained}
    units, ready = [], set[str]()
    for done in timed:
        workers = {done.worker, *done.members}
        if done.gang == 1 or workers <= ready:
            units.append((names[done.unit.trial], done.gang, done.stop - done.start))
        else:  # the first gang of a process takes longer
            ready |= workers
    return units


def _name(workload: Workload, config: Config, by: str | None) -> str:
    if by is None:
        return architecture_of(workload, config)
    if by not in config:
        raise SearchError(
            f"a configuration has no {by!r}, by which its architecture is told; give by= another "
            "of its names, or leave it out"
        )
    return str(config[by])


def _has(kept: Profile, gangs: Iterable[int]) -> bool:
    return set(gangs) <= kept.scaling.speedups.keys()


@short_traceback
def _find(data: ShardedDataset, architecture: str) -> Profile | None:
    text = read_profile(data, architecture)
    if text is None:
        return None
    try:
        body = json.loads(text)
        if body["format"] != "dagsel.profile" or body["version"] > _VERSION:
            raise ValueError(f"its version is {body['version']}")
        found: Profile = from_json(Profile, body["profile"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetFormatError(
            f"{data.url}: the profile of {architecture!r} is damaged or of a newer dagsel "
            f"({error}); measure it again with remeasure=True"
        ) from None
    return found


@short_traceback
def _open(data: ShardedDataset | Url) -> ShardedDataset:
    dataset: ShardedDataset = checked(data=data).data
    return dataset
