"""What a run was called with: the contents of its ``run.json``.

Workload and space are code and are not kept: a folder that held them would run a stranger's code.
Descriptions of the workload are kept, so that a resume with another one is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from typing import Any, Literal, get_type_hints

import dagsel.flows
import dagsel.flows.baselines
from dagsel.arguments import check_flow
from dagsel.codec import LATER, Json, from_json, to_json
from dagsel.errors import DatasetError, RunDirError, SearchError
from dagsel.flow import Direction, Flow, Goal, Keep
from dagsel.planning.small_population import Policy
from dagsel.steering import SetLimits
from dagsel.storage import RunDir, ShardedDataset
from dagsel.storage.urls import KNOWN_HOSTS, hosts_in, unknown_hosts, without_credentials
from dagsel.study import opens_again
from dagsel.study.asked import is_optunas
from dagsel.workloads.base import HasNewDefaults, Workload
from dagsel.workloads.describe import describe, differences

#: Names of search procedures in a ``run.json`` of dagsel 0.1 that are others now.
_FORMER_NAMES = {"HyperOpt": "SamplerSearch", "Lsf": "LSF", "Slaq": "SLAQ", "Fifo": "FIFO"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run was called with; what is not told here is as `dagsel.optimize` was given it."""

    study: str  # its name
    home: str | None  # URL of its storage; None if it is in memory or the URL holds a password
    sampler: str  # name of its class
    sampler_seed: int
    direction: Direction
    metric: str  # of several the first one, and direction that of it
    seed: int
    flow: str  # name of its class
    flow_config: Any  # None if it has no form in JSON
    data: str  # its URL
    data_digest: str  # checksum of its manifest
    n_shards: int  # of training
    workload: dict[str, str] = field(default_factory=dict)  # descriptions of its parts
    replicas: int | Literal["auto"] = 1
    keep: Keep = field(default="last", metadata={LATER: True})
    top_k: int = field(default=1, metadata={LATER: True})
    # The metrics, if there are several.
    goals: tuple[Goal, ...] = field(default=(), metadata={LATER: True})
    # What the flow asks of the study: its sampler and its pruner, as they were made.
    asked: Mapping[str, Mapping[str, str]] = field(default_factory=dict, metadata={LATER: True})
    n_before: int = field(default=0, metadata={LATER: True})  # trials that the study had begun
    first_step: int = field(default=1, metadata={LATER: True})  # of a trial, to the study's pruner
    deterministic: bool = False
    # Threads that PyTorch trains with on CPUs; None for as many as each worker's process has.
    threads: int | None = field(default=None, metadata={LATER: True})
    # Whether validation samples are trained on, and nothing is scored: the run is a refit.
    trains_all: bool = field(default=False, metadata={LATER: True})
    deadline_s: float | None = None
    unit_timeout_s: float | None = None
    budget_s: float | None = None  # in worker-seconds
    price_per_worker_hour: float | None = None
    currency: str = field(default="", metadata={LATER: True})  # of the price
    # Of pools of workers, the price of each; the price above is that of the dearest.
    pools: Mapping[str, str] = field(default_factory=dict, metadata={LATER: True})
    # A budget in money that bounds what the workers of pools cost, each at its own price.
    budget_money: float | None = field(default=None, metadata={LATER: True})
    small_population: Policy = "auto"
    dagsel: str = version("dagsel")  # that began the run

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Those of the study."""
        return tuple(goal.direction for goal in self.goals) or (self.direction,)

    @property
    def goal(self) -> Goal:
        """The metric, of several the first one, and its direction."""
        return Goal(self.metric, self.direction)

    @property
    def ranks_by(self) -> tuple[Direction, Keep, int, tuple[Goal, ...]]:
        """What a `Record` ranks trials by."""
        return self.direction, self.keep, self.top_k, self.goals

    def to_json(self) -> dict[str, Json]:
        """Return the contents of ``run.json``."""
        about: dict[str, Json] = to_json(self)
        return about

    def within(self, limits: SetLimits | None) -> Settings:
        """Return these settings with other limits, if there are others."""
        if limits is None:
            return self
        return replace(
            self,
            deadline_s=limits.deadline_s,
            budget_s=limits.budget_s,
            budget_money=limits.budget_money,
        )

    @property
    def bounds_cost(self) -> bool:
        """Whether there is a budget."""
        return self.budget_s is not None or self.budget_money is not None

    @classmethod
    def from_json(cls, about: Mapping[str, Json], url: str) -> Settings:
        """Read the contents of a ``run.json``, also of one that dagsel 0.1 wrote.

        Raises
        ------
        RunDirError
            If something is missing or is not what it should be.
        """
        try:
            settings: Settings = from_json(cls, _as_now(about))
        except (ValueError, RecursionError) as error:
            raise RunDirError(
                f"{url}/run.json cannot be read: {error}; dagsel {about.get('dagsel', '?')} wrote "
                "it: install that version, or restore the file from a copy"
            ) from error
        return settings

    def check_data(self, digest: str, url: str) -> None:
        """Raise a `RunDirError` if a data set is another one."""
        if digest != self.data_digest:
            raise RunDirError(
                f"{url} is not the data set that the run began with ({self.data}, manifest "
                f"{self.data_digest}; here {digest}); give data= the one it began with"
            )

    def check_workload(self, description: Mapping[str, str]) -> None:
        """Raise a `RunDirError` if a workload is another one."""
        found = differences(self.workload, description)
        if found:
            raise RunDirError(
                f"the workload is not the one that the run began with: {'; '.join(found)}"
            )

    def as_begun(self, workload: Workload) -> Workload:
        """Return the run's workload with the defaults that it began with; check it."""
        if isinstance(workload, HasNewDefaults):
            workload = workload.as_of(self.workload)
        self.check_workload(describe(workload))
        return workload

    @property
    def holds_flow(self) -> bool:
        """Whether `make_flow` can make the search procedure from its name and numbers."""
        try:
            return _make(self.flow, self.flow_config) is not None
        except ValueError:
            return False

    def resume_call(self, url: str) -> str:
        """Return the call that goes on with the run in a folder, with all that it needs."""
        needs = ["workload=...", "space=..."]
        if not self.holds_flow:
            needs.append("flow=...")
        if not (opens_again(self.home) and is_optunas(self.asked, len(self.directions))):
            needs.append("study=...")
        return f"dagsel.resume({url!r}, {', '.join(needs)})"

    def make_flow(self, given: Flow | None, url: str = "run_dir") -> Flow:
        """Return the search procedure in its initial state: a fresh one of the user's, if given.

        `url` is the run's folder, for the error.

        Raises
        ------
        SearchError
            If it cannot be made from its name and is not given, or is another one.
        RunDirError
            If its configuration is damaged.
        """
        if given is not None:
            check_flow(given)
            about = (flow_name(given), flow_config(given))
            if about != (self.flow, self.flow_config):
                raise SearchError(
                    f"flow= is {about[0]} with {about[1]}, the run began with {self.flow} with "
                    f"{self.flow_config}"
                )
            return given.fresh()
        try:
            flow = _make(self.flow, self.flow_config)
        except ValueError as error:
            raise RunDirError(
                f"{url}/run.json: flow_config makes no {self.flow}: {error}; restore the file from "
                "a copy"
            ) from None
        if flow is None:
            raise SearchError(
                f"the run_dir cannot hold this {self.flow}, which was made with an object or is "
                "not dagsel's own; give the same one with flow="
            )
        return flow


def _own_flows() -> dict[str, type[Flow]]:
    """Return dagsel's own search procedures by name; a ``run.json`` makes nothing else."""
    packages = (dagsel.flows, dagsel.flows.baselines)
    own = {name: getattr(package, name) for package in packages for name in package.__all__}
    return {name: kind for name, kind in own.items() if Flow in kind.__mro__}


def _make(name: str, config: Any) -> Flow | None:
    kind = _own_flows().get(name)
    if kind is None or config is None:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"it is {config!r}")
    hints = get_type_hints(kind)
    made = {}
    for key, value in config.items():
        try:
            if hints[key] is Flow:  # a flow around another one
                made[key] = _make(value["flow"], value["config"])
                if made[key] is None:
                    return None
            else:
                made[key] = from_json(hints[key], value)
        except KeyError as error:
            raise ValueError(f"{key!r} has no {error}" if key in hints else f"{key!r} is no "
                             f"argument of {name}") from None  # fmt: skip
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key!r} is {value!r} ({error})") from None
    try:
        return kind(**made)
    except (ArithmeticError, AttributeError, TypeError) as error:
        raise ValueError(str(error)) from None


def _as_now(about: Mapping[str, Json]) -> dict[str, Json]:
    """Return what `Settings` holds of a ``run.json``, also of one that dagsel 0.1 wrote."""
    told = {name: value for name, value in about.items() if name != "run"}
    flow = {"flow": told.get("flow"), "config": told.get("flow_config")}
    if told.pop("priority", "flow") == "convergence":  # it is a flow around the flow now
        flow = {"flow": "ByConvergence", "config": {"flow": flow}}
    flow = _renamed(flow)
    return told | {"flow": flow["flow"], "flow_config": flow["config"]}


def _renamed(part: Any) -> Any:
    """Return a part of a flow's configuration with the present names of flows, at any depth."""
    if not isinstance(part, dict):
        return part
    renamed = {key: _renamed(value) for key, value in part.items()}
    if part.keys() == {"flow", "config"}:
        renamed["flow"] = _FORMER_NAMES.get(str(part["flow"]), part["flow"])
    return renamed


def flow_name(flow: Flow) -> str:
    """Return the name of a flow's class; that of one of dagsel's own is short."""
    kind = type(flow)
    own = kind.__module__.startswith("dagsel.flows")
    return kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"


def flow_config(flow: Any) -> Json:
    """Return a flow's configuration as JSON; None if it has no form in JSON."""
    try:
        parts = {f.name: getattr(flow, f.name) for f in fields(flow) if f.init}
        return {name: _config_part(part) for name, part in parts.items()}
    except TypeError:
        return None


def _config_part(part: Any) -> Json:
    if isinstance(part, Flow):
        return {"flow": flow_name(part), "config": flow_config(part)}
    return to_json(part)


def open_data(url: str, digest: str, folder: RunDir) -> ShardedDataset:
    """Open the data set that a run names; raise a `RunDirError` if nobody else names its host.

    What the run has written itself lies in its folder, wherever that has been moved to.
    """
    own = folder.data.url
    if url.endswith("/data") and url != own:
        with suppress(DatasetError, OSError):
            found = ShardedDataset.open(own)
            if found.digest == digest:
                return found
    unknown = unknown_hosts(hosts_in(url), folder.url)
    if unknown:
        raise RunDirError(
            f"{folder.url}/run.json names the data set {without_credentials(url)}, and nobody else "
            "names that place; if it is yours, give data= with that URL, or set "
            f"{KNOWN_HOSTS}={' '.join(unknown)!r}"
        )
    return ShardedDataset.open(url)
