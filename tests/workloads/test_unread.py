"""What nothing of a workload reads is said; what may be read later is not."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import SGDClassifier

import dagsel
from dagsel.errors import WorkloadError
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets.manifest import Manifest
from dagsel.workloads.unread import N_LOOKED_AT, saying_checks, unread_by

CONFIG = {"width": 4, "lr": 0.1, "momentum": 0.9}
READS_ALL: dict[str, Callable[[Any], object]] = {
    "unpacked": lambda config: dict(**config),
    "copied": lambda config: [config.copy(), {**config}, dict(config)],
    "joined": lambda config: config | {"a": 1},
    "joined from the right": lambda config: {"a": 1} | config,
    "its names": lambda config: [*config.keys()],
    "its values": lambda config: sum(config.values()),
    "in a loop": lambda config: [config[name] for name in config],
    "as JSON": json.dumps,
    "pickled": pickle.dumps,
    "copied deeply": copy.deepcopy,
}
KEEPS: dict[str, Callable[[Any], object]] = {
    "itself": lambda config: [config],
    "in a closure": lambda config: lambda: config["lr"],
    "in an attribute": lambda config: _Keeper(config),
}


class _Keeper(torch.nn.Linear):
    def __init__(self, config: Any) -> None:
        super().__init__(4, 2)
        self.config = config


@pytest.mark.parametrize("build", [*READS_ALL.values(), *KEEPS.values()], ids=[*READS_ALL, *KEEPS])
def test_a_configuration_that_is_read_whole_or_kept_has_nothing_unread(
    build: Callable[[Any], object],
) -> None:
    assert unread_by(build, CONFIG) == frozenset()


def matched(config: Any) -> object:
    match config:
        case {"lr": rate}:
            return rate
    return None


@pytest.mark.parametrize(
    "read",
    [
        lambda config: config["lr"],
        lambda config: config.get("lr", 1.0),
        lambda config: "lr" in config,
        lambda config: config.pop("lr"),
        lambda config: "{lr}".format_map(config),
        matched,
    ],
)
def test_what_is_read_by_name_is_read(read: Callable[[Any], object]) -> None:
    before = dict(CONFIG)
    assert unread_by(read, CONFIG) == {"width", "momentum"}
    assert before == CONFIG


def linear(config: Any) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, config["width"]), torch.nn.Linear(8, 2))


def torch_workload(**options: Any) -> dagsel.TorchWorkload:
    given: Any = {"model": linear, "optimizer": torch.optim.Adam, "batch_size": 8} | options
    return dagsel.TorchWorkload(loss=torch.nn.functional.cross_entropy, **given)


@pytest.mark.parametrize(
    ("options", "unread"),
    [
        ({}, {"momentum"}),
        ({"optimizer": torch.optim.SGD}, set()),
        (
            {"optimizer": lambda parameters, config: torch.optim.Adam(parameters)},
            {"lr", "momentum"},
        ),
        ({"batch_size": lambda config: round(10 * config["momentum"])}, set()),
        (
            {"lr_scheduler": lambda o, c: torch.optim.lr_scheduler.StepLR(o, 1, c["momentum"])},
            set(),
        ),
        (
            {"lr_scheduler": lambda o, c: torch.optim.lr_scheduler.LambdaLR(o, lambda e: c["lr"])},
            set(),  # the schedule keeps it
        ),
        ({"train_fn": lambda model, optimizer, batches, config: None}, set()),
        ({"input_fn": lambda batch, config: (batch["x"], batch["y"])}, set()),
        ({"augment": lambda sample, config: sample}, set()),
    ],
)
def test_a_torch_workload_knows_what_it_reads(options: Any, unread: set[str]) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert torch_workload(**options).unread(CONFIG) == unread
    assert torch.equal(before, torch.get_rng_state())


def test_a_sklearn_workload_knows_what_it_reads() -> None:
    def make(config: Any) -> SGDClassifier:
        return SGDClassifier(alpha=config["lr"])

    own = dagsel.SklearnWorkload(make, classes=[0, 1], batch_size=lambda config: config["width"])
    assert own.unread(CONFIG) == {"momentum"}
    cloned = dagsel.SklearnWorkload(SGDClassifier(), classes=[0, 1])
    assert cloned.unread({"alpha": 0.1}) == frozenset()


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    arrays = {"x": np.zeros((20, 4), "float32"), "y": np.zeros(20, "int64")}
    url = tmp_path_factory.mktemp("data") / "data.zarr"
    return ShardedDataset.write(url, arrays, n_shards=1).manifest


def said_of(
    workload: Any,
    manifest: Manifest,
    configs: list[Mapping[str, Any]],
    log: pytest.LogCaptureFixture,
    *,
    flow_reads: bool = False,
) -> list[str]:
    """Return what each configuration in turn had said, after its number."""
    check = saying_checks(workload, manifest, flow_reads=flow_reads)
    said = []
    with log.at_level(logging.WARNING, "dagsel"):
        for number, config in enumerate(configs, 1):
            log.clear()
            check(config)
            said += [f"{number}: {message}" for message in log.messages]
    return said


def test_what_no_trial_reads_is_said_once(
    manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    configs: list[Mapping[str, Any]] = [
        {
            "width": 8,
            "lr": 0.1,
            "batch_size": 2**i,
            "num_epochs": 5,  # nobody reads it though it does not vary
            "gamma": i / 9,
            "constant": np.arange(3),  # two of which cannot be compared at once
            "sometimes": i,
            "deep": i,
        }
        for i in range(2 * N_LOOKED_AT)
    ]

    def model(config: Any) -> torch.nn.Module:
        assert config["deep"] != 7 or config["sometimes"] == 7
        return torch.nn.Linear(4, 2)

    workload = torch_workload(model=model)
    first, second, third = said_of(workload, manifest, configs, caplog)
    assert first == (
        "1: nothing reads 'batch_size' of the configuration, so it makes no difference: give the "
        "workload batch_size=lambda config: config['batch_size']"
    )
    assert second.startswith("1: nothing reads 'num_epochs' ")
    assert "the flow decides how long a trial trains" in second
    assert third == (
        f"{N_LOOKED_AT}: nothing reads 'gamma' of the configuration, so it makes no difference: "
        "read it in a function of the workload, or leave it out of the space"
    )


def test_what_a_flow_may_read_is_not_said_to_make_no_difference(
    manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    configs: list[Mapping[str, Any]] = [
        {"lr": 0.1, "width": 8, "batch_size": 8, "epochs": i, "budget": i}
        for i in range(2 * N_LOOKED_AT)
    ]
    (said,) = said_of(torch_workload(), manifest, configs, caplog, flow_reads=True)
    assert "nothing reads 'batch_size'" in said


def test_what_all_trials_read_is_looked_at_once(manifest: Manifest) -> None:
    n_built = 0

    def model(config: Any) -> torch.nn.Module:
        nonlocal n_built
        n_built += 1
        return torch.nn.Linear(4, 2)

    workload = torch_workload(model=model)
    check = saying_checks(workload, manifest)
    built = []
    for _ in range(4):
        before = n_built
        check({"lr": 0.1})
        built.append(n_built - before)
    assert built[1:] == [1, 1, 1]
    assert built[0] > 1


def test_what_cannot_be_trained_fails_before(
    manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(WorkloadError, match="batch_size must be"):
        said_of(torch_workload(batch_size=lambda c: c["lr"]), manifest, [CONFIG], caplog)


def test_a_subclass_that_trains_otherwise_is_let_alone(
    manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(dagsel.TorchWorkload):
        def train(self, *args: Any, **options: Any) -> Any:
            return super().train(*args, **options)

    own = Own(linear, torch.nn.functional.cross_entropy, torch.optim.Adam, batch_size=8)
    assert own.unread({**CONFIG, "batch_size": 8}) == {"batch_size", "momentum"}
    assert said_of(own, manifest, [{**CONFIG, "batch_size": 8}], caplog) == []


def test_a_factory_that_wants_a_plain_dict_is_let_alone(
    manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    def model(config: Any) -> torch.nn.Module:
        assert type(config) is dict
        return torch.nn.Linear(4, 2)

    assert said_of(torch_workload(model=model), manifest, [CONFIG] * 12, caplog) == []
