"""What a run was called with, as far as it can be kept: the contents of its ``run.json``.

Code is not kept: workload and space are functions, and a folder that held them would run a
stranger's code. What is kept of them are descriptions, so that a resume with others is noticed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Any, get_type_hints

from dagsel.codec import Json, from_json, to_json
from dagsel.errors import RunDirError, SearchError
from dagsel.flow import Direction, Flow, check_flow
from dagsel.planning.small_population import Policy
from dagsel.workloads.describe import differences

#: Names of search procedures in a ``run.json`` of dagsel 0.1 that are others now.
_FORMER_NAMES = {"HyperOpt": "SamplerSearch", "Lsf": "LSF", "Slaq": "SLAQ", "Fifo": "FIFO"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run was called with.

    Parameters
    ----------
    study
        Name of the study.
    home
        URL of its storage; None if it is in memory, or if the URL holds a password.
    sampler
        Name of its sampler's class.
    sampler_seed
        Seeds the sampler's draws.
    direction, metric
        What the search is about.
    seed
        Seed of the run.
    flow
        Name of the search procedure's class.
    flow_config
        Its configuration; None if it has no form in JSON.
    data
        URL of the data set.
    data_digest
        Checksum of its manifest.
    n_shards
        Its training shards.
    workload
        Description of the workload's parts.
    replicas, deterministic, deadline_s, unit_timeout_s
        As `dagsel.optimize` was given them.
    budget_s
        The budget, in worker-seconds.
    price_per_worker_hour, small_population
        As `dagsel.optimize` was given them.
    dagsel
        Version that began the run.
    """

    study: str
    home: str | None
    sampler: str
    sampler_seed: int
    direction: Direction
    metric: str
    seed: int
    flow: str
    flow_config: Any
    data: str
    data_digest: str
    n_shards: int
    workload: dict[str, str] = field(default_factory=dict)
    replicas: int = 1
    deterministic: bool = False
    deadline_s: float | None = None
    unit_timeout_s: float | None = None
    budget_s: float | None = None
    price_per_worker_hour: float | None = None
    small_population: Policy = "auto"
    dagsel: str = version("dagsel")

    def to_json(self) -> dict[str, Json]:
        """Return the contents of ``run.json``."""
        about: dict[str, Json] = to_json(self)
        return about

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
        except ValueError as error:
            raise RunDirError(f"{url}/run.json cannot be read: {error}") from error
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

    def make_flow(self, given: Flow | None) -> Flow:
        """Make the search procedure, in its initial state.

        Parameters
        ----------
        given
            The user's; needed where its configuration could not be kept.

        Raises
        ------
        SearchError
            If it is needed and not given, or is another one.
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
        flow = _make(self.flow, self.flow_config)
        if flow is None:
            raise SearchError(f"the run_dir cannot hold a {self.flow}; give the run's with flow=")
        return flow


def _own_flows() -> dict[str, type[Flow]]:
    """Return dagsel's own search procedures by name; a ``run.json`` makes no others."""
    kinds = {}
    for package in ("dagsel.flows", "dagsel.flows.baselines"):
        with suppress(ModuleNotFoundError):
            module = importlib.import_module(package)
            kinds.update({name: getattr(module, name) for name in module.__all__})
    return kinds


def _make(name: str, config: Any) -> Flow | None:
    kind = _own_flows().get(name)
    if kind is None or config is None:
        return None
    hints = get_type_hints(kind)
    made = {}
    for key, value in config.items():
        if hints[key] is Flow:  # a flow around another one
            made[key] = _make(value["flow"], value["config"])
            if made[key] is None:
                return None
        else:
            made[key] = from_json(hints[key], value)
    return kind(**made)


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
        now = _FORMER_NAMES.get(str(part["flow"]))
        renamed["flow"] = now if now in _own_flows() else part["flow"]
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
