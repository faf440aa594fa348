"""Wrong arguments: each call says what is at fault and what to write, before anything starts.

The calls are lines of a script. No cluster is there, and a search that got as far as to look for
one was not refused.
"""

from __future__ import annotations

# ruff: noqa: F401 - the scripts use what is imported here
import datetime
import importlib
import inspect
import json
import linecache
import logging
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import optuna
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
import searches
import sklearn.datasets
import sklearn.linear_model
import torch
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from optuna.samplers import TPESampler

import dagsel
from dagsel import arguments, checks, errors
from dagsel.flows import ASHA, PBT, SEER, Hermes, MedianStopping, OptunaPruner, RandomSearch
from dagsel.simulation import PowerLaw, SimulatedCluster
from dagsel.storage import RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads.base import Visit
from dagsel.workloads.named_metrics import metric_functions

OLD_RUNS = Path(__file__).parents[1] / "data" / "runs_of_163b1ee"
NOBODY = "tcp://127.0.0.1:9"
X = np.random.default_rng(0).normal(size=(600, 4))
Y = np.arange(600) % 3
FRAME = pd.DataFrame(X, columns=list("abcd"))
SAMPLES = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
SPACE = {"lr": [0.1, 0.2], "momentum": (0.0, 0.9), "n": 3}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)


class Module:
    """As Lightning's modules of data."""

    def train_dataloader(self) -> Any:
        pass


class Half:
    """A workload that lacks most of it."""

    @property
    def metrics(self) -> dict[str, str]:
        return {"value": "maximize"}

    def validate(self, config: Any) -> None:
        pass


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.1, 1.0)}


def good(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a search that nothing is wrong with, but for the changes."""
    return {
        "study": optuna.create_study(direction="maximize"),
        "workload": SyntheticWorkload(),
        "data": "memory://wrong-arguments.zarr",
        "space": space,
        "flow": RandomSearch(max_epochs=1, n_trials=1),
        "metric": "value",
        "client": NOBODY,
        "run_dir": f"memory://wrong-arguments-{len(RUNS)}",
        **changes,
    }


RUNS: list[str] = []
TWO = optuna.create_study(directions=["maximize", "minimize"])
THREE = optuna.create_study(directions=["maximize", "minimize", "minimize"])


def torch_workload(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "model": lambda config: torch.nn.Linear(4, 3),
        "loss": torch.nn.functional.cross_entropy,
        "optimizer": torch.optim.Adam,
        "batch_size": 8,
        **changes,
    }
    return parts


def plateau(optimizer: Any, config: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max")


def own(status: str, **members: Any) -> Any:
    """A cluster object of a kind that dagsel does not know."""
    return SimpleNamespace(scheduler_address=NOBODY, status=status, **members)


SEARCH, WORK = errors.SearchError, errors.WorkloadError
DATA, RUN, CLUSTER = errors.DatasetInputError, errors.RunDirError, errors.ClusterError
#: The changed argument of a search; the error; what its message contains.
REFUSED: dict[str, tuple[type[Exception], str, str]] = {
    # the parts of a search
    "study=None": (
        SEARCH, "study must be a study of Optuna, got None", "study=optuna.create_study("),
    "study=optuna.Study": (SEARCH, "got the class Study", "study=optuna.create_study("),
    "study=optuna.create_study": (SEARCH, "the function create_study", "optuna.create_study(dir"),
    "study='digits'": (SEARCH, "got 'digits'", "optuna.load_study(study_name='digits', storage="),
    "study=TWO": (
        SEARCH, "has 2 directions, and metric= names one; write metric=['value', ...]",
        "or create the study with direction='maximize'"),
    "study=optuna.create_study()": (SEARCH, "to minimize and 'value' is to max", "direction='max"),
    "workload=Net()": (
        WORK, "workload is Net, a module", "dagsel.TorchWorkload(model=lambda config: Net("),
    "workload=Net": (
        WORK, "workload is Net, a module", "dagsel.TorchWorkload(model=lambda config: Net("),
    "workload=importlib.import_module('flax.nnx').Linear": (
        WORK, "workload is Linear, a module", "FlaxWorkload(model=lambda config, rngs: Linear(..."),
    "workload=LightningModule()": (
        WORK, "is LightningModule, a module", "LightningWorkload(module=lambda config: LightningM"),
    "workload=sklearn.linear_model.SGDClassifier()": (
        WORK, "an estimator", "workload=dagsel.SklearnWorkload(SGDClassifier())"),
    "workload=sklearn.linear_model.SGDClassifier": (
        WORK, "an estimator", "workload=dagsel.SklearnWorkload(SGDClassifier())"),
    "workload=dagsel.TorchWorkload": (WORK, "the class TorchWorkload", "workload=TorchWorkload("),
    "workload=None": (WORK, "got None", "workload=dagsel.TorchWorkload(model="),
    "workload=dagsel.TorchWorkload(**torch_workload(lr_scheduler=plateau)), metric='loss', "
    "study=optuna.create_study()": (
        WORK, "ReduceLROnPlateau has mode='max', and the search is to minimize 'loss'",
        "write ReduceLROnPlateau(optimizer, mode='min')"),
    "workload=dagsel.TorchWorkload(**torch_workload(model=lambda config: Net)), metric='loss', "
    "study=optuna.create_study()": (WORK, "model gave a type", "not a torch.nn.Module"),
    "workload=Half()": (
        WORK, "a Half and has no evaluate and no init", "dagsel.workloads.Workload"),
    "data={'x': X, 'y': Y}": (DATA, "data must be", 'data=ShardedDataset.write("data.zarr", {"x":'),
    "data=FRAME": (DATA, "got a DataFrame of shape (600, 4)", "data=(frame.drop(columns="),
    "data=[X, Y]": (DATA, "got a list", "data=(x, y)"),
    "data=X": (DATA, "got a ndarray of shape (600, 4)", "data=(x, y)"),
    "data=None": (DATA, "got None", "data=(x, y)"),
    "data=(X, Y, Y)": (DATA, "got a tuple", "data=(x, y)"),
    "data=((X, Y), (X, Y))": (DATA, "got a tuple", 'validation={"x": x_test, "y": y_test}'),
    "data=[X, X, Y, Y]": (DATA, "got a list", 'validation={"x": x_test, "y": y_test}'),
    "data={'train': X, 'test': X}": (DATA, "got a dict", 'validation={"x": x_test, "y": y_test}'),
    "data={'train': SAMPLES, 'test': SAMPLES}": (
        DATA, "got a dict", 'write("data.zarr", data["train"], validation=data["test"], n_s'),
    "data=sklearn.datasets.load_iris()": (DATA, "got a Bunch", 'data=(data["data"], data["target"'),
    "data=Module()": (
        DATA, "got a Module", '.write("data.zarr", data.train_dataloader().dataset, '),
    "data=([X, X], Y)": (
        DATA, "x is a list of 2 arrays, each with 600 samples",
        '{"x0": x[0], "x1": x[1], "y": y}, n_shards=8), and give the workload an input_fn'),
    "data=({'input_ids': X}, Y)": (
        DATA, "x must be one array, got a dict of 'input_ids'",
        'data=ShardedDataset.write("data.zarr", {**x, "y": ...}, n_shards=8)'),
    "data=torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))": (
        DATA, "got a TensorDataset", "data=dataset.tensors"),
    "data=torch.utils.data.random_split(SAMPLES, [500, 100])": (
        DATA, "got a list", 'data=ShardedDataset.write("data.zarr", train, validation=test'),
    "data=tuple(torch.utils.data.random_split(SAMPLES, [500, 100]))": (
        DATA, "got a tuple", 'data=ShardedDataset.write("data.zarr", train, validation=test'),
    "data=torch.utils.data.DataLoader(SAMPLES)": (
        DATA, "got a DataLoader", 'data=ShardedDataset.write("data.zarr", loader.dataset'),
    "data=dagsel.storage.ImageFolder('photos')": (
        DATA, "got an ImageFolder", 'data=ShardedDataset.write("data.zarr", dataset, n_shards=8)'),
    "data=(X, Y[:9])": (DATA, "'x' has 600, 'y' has 9 samples", "make them equal"),
    "data=(X, 'y')": (DATA, "y must be an array", "got 'y'"),
    "data=(FRAME.assign(city='Ulm'), Y)": (DATA, "'city' holds text", "dtype=float)"),
    "data=(FRAME.mask(FRAME == FRAME.iloc[3, 1]), Y)": (
        DATA, "x lacks 1 of its values, the first in row 3 of column", "x.fillna(x.median())"),
    "data=(X, pd.Series(['a', 'b', None] * 200))": (DATA, "row 2 of y has no value", "leave it o"),
    "data=(scipy.sparse.eye(600), Y)": (DATA, "x is a sparse matrix", "x.toarray()"),
    "data=(pl.DataFrame(X).lazy(), Y)": (DATA, "x is a LazyFrame", "give x.collect()"),
    "data=([[1], [[1, 2]]], [0, 1])": (DATA, "x is neither an array nor a", "number of axes"),
    "data=(X[:2], Y[:2])": (DATA, "2 samples with validation=0.2", "change validation"),
    "data='nowhere.zarr'": (errors.DatasetNotFoundError, "nowhere.zarr", "ShardedDataset.write"),
    "data=SyntheticWorkload(), workload=ShardedDataset.open(good()['data'])": (
        SEARCH, "is a data set", "data=..., workload=..."),
    "study=ShardedDataset.open(good()['data']), data=optuna.create_study()": (
        SEARCH, "is a data set", "data=..., study=..."),
    "metric=None": (SEARCH, "metric must be the name of one of", "write metric='value'"),
    "metric=dagsel.metrics.accuracy": (SEARCH, "got the function accuracy", "write metric='value'"),
    "metric='val_loss'": (SEARCH, "it gives loss, value, all of the val", "write metric='loss'"),
    "metric=[]": (SEARCH, "got []", "write metric='value'"),
    "metric=['value', 3]": (SEARCH, "got ['value', 3]", "or a list of names"),
    "metric={'value', 'loss'}": (SEARCH, "or a list of names, got {", "write metric='value'"),
    "metric=['value', 'loss']": (
        SEARCH, "has one direction, and metric= names 2",
        "create the study with directions=['maximize', 'minimize']"),
    "study=TWO, metric=['value', 'loss', 'value']": (SEARCH, "'value' twice", "each metric once"),
    "study=TWO, metric=['loss', 'value']": (
        SEARCH, "is to maximize and 'loss' is to minimize", "directions=['minimize', 'maximize']"),
    "study=TWO, metric=['value', 'f1']": (SEARCH, "no metric 'f1'", "it gives loss, value"),
    "study=THREE, metric=['value', 'loss']": (
        SEARCH, "has 3 directions, and metric= names 2", "with a metric for each direction"),
    "study=TWO, metric=['value', 'loss'], flow=ASHA(max_epochs=9, n_trials=9)": (
        SEARCH, "ASHA ranks trials by one metric, and the search is about value, loss",
        "take MOASHA, SamplerSearch, RandomSearch or Grid"),
    "study=TWO, metric=['value', 'loss'], flow=OptunaPruner(max_epochs=9, n_trials=9)": (
        SEARCH, "OptunaPruner ranks trials by one metric", "take MOASHA, SamplerSearch"),
    "study=TWO, metric=['value', 'loss'], keep='best'": (
        SEARCH, "keep='best' is the epoch in which one metric is best",
        "leave it out, and a trial is worth its last epoch"),
    "study=TWO, metric=['value', 'loss'], top_k=2": (
        SEARCH, "top_k=2 ranks models by one metric", "those of the Pareto front are kept"),
    "metric='f1'": (SEARCH, "no metric 'f1'", "it gives loss, value"),
    # space, flow
    "space=SPACE": (
        SEARCH, "space must be a function",
        "space=lambda trial: {'lr': trial.suggest_categorical('lr', [0.1, 0.2]), 'momentum': "
        "trial.suggest_float('momentum', 0.0, 0.9), 'n': 3}"),
    "space={'lr': optuna.distributions.FloatDistribution(0.1, 1.0, log=True)}": (
        SEARCH, "space must be", "{'lr': trial.suggest_float('lr', 0.1, 1.0, log=True)}"),
    "space={'n': range(1, 9, 2), 'm': (1, 8)}": (
        SEARCH, "space must be",
        "{'n': trial.suggest_int('n', 1, 7, step=2), 'm': trial.suggest_int('m', 1, 8)}"),
    "space=None": (SEARCH, "got None", "space=lambda trial: {"),
    "space=dict": (SEARCH, "the class dict", "space=lambda trial: {"),
    "space=lambda trial: trial.suggest_float('lr', 0, 1)": (SEARCH, "as a dict, got float", "dict"),
    "space=lambda trial: {'lr': 0.1}": (SEARCH, "space suggests nothing", "trial.suggest_float"),
    "space=lambda: {}": (SEARCH, "the function <lambda>", "space=lambda trial: {"),
    "flow=ASHA": (SEARCH, "got the class ASHA", "write flow=ASHA(max_epochs=9, n_trials=20)"),
    "flow='asha'": (SEARCH, "got 'asha'", "flow=dagsel.flows.ASHA(max_epochs=9, n_trials=20)"),
    "flow='seer'": (SEARCH, "got 'seer'", 'SEER(deadline="10 min", budget="30 worker-minutes")'),
    "flow=None": (SEARCH, "got None", "flow=dagsel.flows.ASHA("),
    "flow=optuna.pruners.MedianPruner()": (
        SEARCH, "got a MedianPruner",
        "flow=dagsel.flows.OptunaPruner(max_epochs=9, n_trials=20, pruner="),
    "flow=optuna.samplers.TPESampler()": (
        SEARCH, "got a TPESampler", "flow=dagsel.flows.SamplerSearch("),
    # where it runs
    "client=3": (CLUSTER, "got 3", "client=distributed.Client(n_workers=3"),
    "client=Client": (CLUSTER, "the class Client", "client=distributed.Client(n_workers="),
    "client=None, cluster='local'": (CLUSTER, "cluster='local' is no address", "tcp://host:8786"),
    "client=None, cluster=LocalCluster": (CLUSTER, "the class LocalCluster", "distributed.Client("),
    "cluster='cuda'": (CLUSTER, "starts a cluster of its own", "give no client with it"),
    "client=None, cluster=own('closed')": (CLUSTER, "the cluster is closed", "make a new one"),
    "client=None, cluster=own('running', asynchronous=True)": (
        CLUSTER, "the cluster is asynchronous", "await asyncio.to_thread(dagsel.optimize, ..."),
    # numbers, times, words
    "progress='bar'": (SEARCH, "progress must be one of 'auto', 'table', 'line', 'log'", "'bar'"),
    "progress=True": (SEARCH, "progress must be one of", "got True"),
    "progress=None": (SEARCH, "progress must be one of", "got None"),
    "replicas=0": (SEARCH, 'replicas must be "auto" or a whole number of 1 or more', "got 0"),
    "replicas=True": (SEARCH, "replicas must be", "got True"),
    "replicas=1.5": (SEARCH, "replicas must be", "got 1.5"),
    "replicas='2'": (SEARCH, "replicas must be", "got '2'"),
    "deadline=-1": (SEARCH, "deadline must be above 0", "got -1"),
    "deadline='soon'": (SEARCH, "deadline='soon' is no time", '"10 min"'),
    "deadline=True": (SEARCH, "deadline=True is no time", '"10 min"'),
    "deadline=float('nan')": (SEARCH, "deadline must be above 0", "nan"),
    "budget='cheap'": (SEARCH, "budget='cheap'", '"30 worker-minutes"'),
    "budget='3 USD'": (SEARCH, "is money", "price_per_worker_hour="),
    "budget=60, price_per_worker_hour='2'": (
        SEARCH, "cannot read price_per_worker_hour='2'", '"2.50 USD"'),
    "price_per_worker_hour=-1": (SEARCH, "price_per_worker_hour must be", "got -1"),
    "price_per_worker_hour=2.5": (SEARCH, "has no currency", 'write "2.5 USD"'),
    "budget='3 USD', price_per_worker_hour='2 EUR'": (
        SEARCH, "the budget is in USD, and price_per_worker_hour is 2 EUR", "in one currency"),
    "hold='ram'": (SEARCH, "hold", "'memory', 'disk'"),
    "hold=None": (SEARCH, "hold", "'auto'"),
    "cache_dir='s3://bucket/cache'": (SEARCH, "cache_dir must be a folder", "/scratch"),
    "cache_dir=3": (SEARCH, "cache_dir must be a folder", "got 3"),
    "cache_dir=''": (SEARCH, "cache_dir must be a folder", "leave it out"),
    "worker_timeout='x'": (SEARCH, "worker_timeout='x' is no time", '"10 min"'),
    "worker_timeout=None": (SEARCH, "worker_timeout=None is no time", '"10 min"'),
    "worker_timeout=0": (SEARCH, "worker_timeout must be above 0", "got 0"),
    "unit_timeout=0": (SEARCH, "unit_timeout must be above 0", "got 0"),
    "unit_timeout='x'": (SEARCH, "unit_timeout='x' is no time", '"10 min"'),
    "callbacks=print": (SEARCH, "got the function print", "callbacks=[print]"),
    "callbacks=[3]": (SEARCH, "functions of study and trial, got 3", "[lambda study, trial:"),
    "callbacks=3": (SEARCH, "functions of study and trial, got 3", "[lambda study, trial:"),
    "seed=-1": (SEARCH, "seed must be a whole number of 0 or more", "got -1"),
    "seed=1.5": (SEARCH, "seed must be", "got 1.5"),
    "seed='0'": (SEARCH, "seed must be", "got '0'"),
    "seed=True": (SEARCH, "seed must be", "got True"),
    "deterministic='no'": (SEARCH, "deterministic must be True or False", "got 'no'"),
    "small_population='x'": (SEARCH, "small_population must be one of 'auto', 'hop'", "got 'x'"),
    "small_population=['hop']": (SEARCH, "small_population must be one of", "got ['hop']"),
    "run_dir=3": (RUN, "3 is no URL", "pass a path"),
    "run_dir=__file__": (RUN, "cannot write run_dir", "File exists"),
    "run_dir=''": (RUN, "'' is no URL", "pass a path"),
    "run_dir='nofs://a/b'": (RUN, "no file system 'nofs'", "use a path"),
}  # fmt: skip
#: The changed argument of a `TorchWorkload`.
MODELS: dict[str, tuple[type[Exception], str, str]] = {
    "model=Net()": (WORK, "got a Net", "model=lambda config: Net("),
    "model=Net": (WORK, "the class Net", "model=lambda config: Net("),
    "model=lambda: Net()": (
        WORK, "model must be a function, called as model(config)", "model=lambda config:"),
    "model='resnet'": (WORK, "got 'resnet'", "model=lambda config:"),
    "loss='mse'": (WORK, "loss(output, target), got 'mse'", "loss=torch."),
    "loss=None": (WORK, "got None", "loss=torch.nn.functional"),
    "loss=torch.nn.CrossEntropyLoss": (
        WORK, "the class CrossEntropyLoss", "loss=torch.nn.CrossEntropyLoss()"),
    "optimizer=torch.optim.Adam(Net().parameters())": (
        WORK, "optimizer(parameters, config), got an Adam", "optimizer=torch.optim.Adam"),
    "optimizer='sgd'": (WORK, "got 'sgd'", "optimizer=torch.optim.SGD"),
    "optimizer=lambda p: 0": (
        WORK, "optimizer(parameters, config)", "optimizer=torch.optim.Adam"),
    "lr_scheduler=torch.optim.lr_scheduler.StepLR": (
        WORK, "the class StepLR",
        "lr_scheduler=lambda optimizer, config: torch.optim.lr_scheduler.StepLR("),
    "lr_scheduler='cosine'": (WORK, "'cosine'", "lambda optimizer, config"),
    "input_fn='x'": (WORK, "input_fn(batch, config), got 'x'", "lambda batch"),
    "train_fn=lambda model, batches, optimizer, config: 0": (
        WORK, "the function <lambda> takes them in another order",
        "write def train_fn(model, optimizer, batches, config): ..."),
    "loss=lambda target, output: 0": (
        WORK, "takes them in another order", "def loss(output, target)"),
    "train_fn=3": (WORK, "train_fn(model, optimizer, batches, config)", "def train("),
    "batch_size='32'": (WORK, "batch_size must be a whole", "'32'"),
    "batch_size=None": (WORK, "batch_size must be a whole", "None"),
    "drop_last='yes'": (WORK, "drop_last is 'yes'", "True or False"),
    "metrics=['f2']": (WORK, "no metric 'f2', it has accuracy", "metrics={'f2':"),
    "metrics=[lambda a, b: 0]": (
        WORK, "by name, got the function <lambda>",
        'metrics={"accuracy": dagsel.metrics.accuracy}'),
    "metrics=3": (WORK, "got 3", 'metrics=["accuracy"]'),
    "metrics={'f': lambda output: 0}": (
        WORK, "functions of output and target", 'metrics=["accuracy"]'),
    "metrics=['loss']": (WORK, "'loss'", "metric"),
}  # fmt: skip
#: Other calls, whole.
CALLS: dict[str, tuple[type[Exception], str, str]] = {
    "dagsel.SklearnWorkload('SGD')": (
        WORK, "got 'SGD'", "estimator=sklearn.linear_model.SGDClassifier()"),
    "dagsel.SklearnWorkload(None)": (WORK, "got None", "estimator=sklearn"),
    "dagsel.SklearnWorkload(Net())": (WORK, "got a Net", "estimator=sklearn"),
    "dagsel.SklearnWorkload(sklearn.linear_model.SGDClassifier(), classes=3)": (
        WORK, "classes must be a list of all classes, got 3", "classes=[0, 1]"),
    "dagsel.SklearnWorkload(sklearn.linear_model.SGDClassifier(), batch_size='x')": (
        WORK, "batch_size", "'x'"),
    "ASHA(max_epochs='9', n_trials=3)": (SEARCH, "max_epochs must be a whole number", "got '9'"),
    "ASHA(max_t=9, num_samples=20)": (
        SEARCH, "ASHA takes no max_t: write max_epochs=", "; and no num_samples: write n_trials="),
    "ASHA(max_epochs=9)": (SEARCH, "ASHA needs n_trials", "write n_trials=20"),
    "ASHA(max_epochs=9, n_trials=3, min_epochs=10)": (SEARCH, "min_epochs=10", "lower the first"),
    "MedianStopping(max_epochs=9, n_trials=True)": (SEARCH, "n_trials must be a whole", "got True"),
    "RandomSearch(max_epochs=0, n_trials=3)": (
        SEARCH, "max_epochs must be a whole number", "got 0"),
    "SEER('soon', 3)": (SEARCH, "deadline='soon' is no time", '"10 min"'),
    "SEER('1 min', 'cheap')": (SEARCH, "budget='cheap'", '"30 worker-minutes"'),
    "PBT(max_epochs=3, n_trials=4, mutations=['lr'])": (
        SEARCH, "mutations is ['lr']", 'mutations={"lr": Range('),
    "PBT(max_epochs=3, n_trials=4, mutations={'lr': [1]}, quantile='x')": (
        SEARCH, "quantile must be", "got 'x'"),
    "PBT(max_epochs=3, n_trials=4, mutations={'lr': [1]}, factors=2)": (
        SEARCH, "factors must be", "got 2"),
    "Hermes(max_epochs=3, n_trials=4, milestones=0.5)": (
        SEARCH, "milestones must be", "such as (0.5"),
    "Hermes(max_epochs=3, n_trials=4, growth='x')": (SEARCH, "growth must be 1 or more", "got 'x'"),
    "dagsel.flows.Marble(ASHA(9, 9), by='n', scaling=[1])": (
        SEARCH, "scaling must be a mapping", "scaling={"),
    "dagsel.flows.ByConvergence(ASHA)": (SEARCH, "ByConvergence goes around a search", "flow="),
    "OptunaPruner(max_epochs=2, n_trials=2, pruner='median')": (
        SEARCH, "pruner must be", "MedianPruner()"),
    "dagsel.preview(ASHA, epoch_seconds=1, n_workers=2)": (SEARCH, "the class ASHA", "flow=ASHA("),
    "dagsel.preview(ASHA(9, 9), epoch_seconds=1, n_workers=1.5)": (
        SEARCH, "n_workers must be a whole", "got 1.5"),
    "dagsel.preview(ASHA(9, 9), epoch_seconds=1, n_workers=2, space=SPACE)": (
        SEARCH, "space must be", "lambda trial"),
    "dagsel.preview(ASHA(9, 9), epoch_seconds=1, n_workers=2, direction='up')": (
        SEARCH, "direction must be one of 'minimize', 'maximize'", "got 'up'"),
    "dagsel.preview(ASHA(9, 9), epoch_seconds='a day', n_workers=2)": (
        SEARCH, "epoch_seconds='a day'", '"10 min"'),
    "dagsel.preview(ASHA(9, 9), curves=3, n_workers=2)": (
        SEARCH, "curves must say", "PowerLaw(epoch_s="),
    "dagsel.preview(ASHA(9, 9), cluster=3, epoch_seconds=1)": (
        SEARCH, "a SimulatedCluster, got 3", "n_workers=3"),
    "dagsel.simulate(ASHA(9, 9), 3, SimulatedCluster(2), space=space)": (
        SEARCH, "curves must say", "PowerLaw("),
    "dagsel.simulate(ASHA(9, 9), PowerLaw(1.0), 4, space=space)": (
        SEARCH, "got 4", "SimulatedCluster(n_workers=4)"),
    "dagsel.simulate(ASHA(9, 9), PowerLaw(1.0), SimulatedCluster(2), space=space, seed='0')": (
        SEARCH, "seed must be a whole number of 0 or more", "got '0'"),
    "dagsel.simulate(ASHA(9, 9), PowerLaw(1), SimulatedCluster(2), sampler=TPESampler)": (
        SEARCH, "the class TPESampler", "sampler=optuna.samplers.TPESampler()"),
    "SimulatedCluster(2, speeds='ab')": (SEARCH, "speeds must be", "got 'ab'"),
    "SimulatedCluster(2, failures=[3])": (SEARCH, "failures must be pairs", "got [3]"),
    "SimulatedCluster(2, startup_s='x')": (SEARCH, "times must be", "'x'"),
    "dagsel.Profile.given([1, 2])": (SEARCH, "by number of workers, got [1, 2]", "{1: 1, 2: 1.8}"),
    "dagsel.Profile.load((X, Y), 'a')": (DATA, "got a tuple", "ShardedDataset.write("),
    "dagsel.Profile.load(good()['data'], 3)": (SEARCH, "3 cannot be an archi", "use letters"),
    "dagsel.profile(SyntheticWorkload(), {}, good()['data'], [2], client=NOBODY, within='x')": (
        SEARCH, "within must be at least 0", "got 'x'"),
    "dagsel.profile(SyntheticWorkload(), {}, good()['data'], [1.5], client=NOBODY)": (
        SEARCH, "each of gangs must be a whole number", "got 1.5"),
    "dagsel.storage.Batches(3, length=3)": (DATA, "got 3", "Batches(iterable, length="),
    "ShardedDataset.open('d', storage_options='x')": (DATA, "storage_options must be", "'x'"),
    "Hermes(max_epochs=3, n_trials=4, migrate='no')": (SEARCH, "migrate must be True", "got 'no'"),
    "SimulatedCluster('4')": (SEARCH, "n_workers must be a whole number", "got '4'"),
    "dagsel.profile(SyntheticWorkload(), {}, good()['data'], 2)": (
        SEARCH, "gangs must be", "gangs=[2]"),
    "dagsel.profile(SyntheticWorkload(), None, good()['data'], [2])": (
        SEARCH, "config must be", 'config={"lr": 0.1}'),
    "dagsel.profile(SyntheticWorkload(), {}, (X, Y), [2])": (
        DATA, "got a tuple", "data=ShardedDataset.write("),
    "dagsel.profile(Net(), {}, good()['data'], [2])": (
        WORK, "Net, a module", "dagsel.TorchWorkload("),
    "dagsel.profile(SyntheticWorkload(), {}, good()['data'], [2], n_batches=0)": (
        SEARCH, "n_batches must be", "got 0"),
    "dagsel.resume(None, workload=SyntheticWorkload(), space=space)": (
        RUN, "None is no URL", "pass a path"),
    "dagsel.resume('r', NOBODY, workload=Net(), space=space)": (
        WORK, "Net, a module", "dagsel.TorchWorkload("),
    "dagsel.resume('r', NOBODY, workload=SyntheticWorkload(), space=SPACE)": (
        SEARCH, "space must be", "lambda trial"),
    "dagsel.resume('r', NOBODY, workload=SyntheticWorkload(), space=space, flow='asha')": (
        SEARCH, "got 'asha'", "flow=dagsel.flows.ASHA("),
    "dagsel.resume('r', NOBODY, workload=SyntheticWorkload(), space=space, data=(X, Y))": (
        DATA, "data must be a data set or its URL", "ShardedDataset.write("),
    "dagsel.resume('r', own('closed'), workload=SyntheticWorkload(), space=space)": (
        CLUSTER, "is closed", "a new one"),
    "dagsel.resume('r', NOBODY, workload=SyntheticWorkload(), space=space, hold='ram')": (
        SEARCH, "hold", "'memory', 'disk'"),
    "dagsel.replay('r', NOBODY, workload=SyntheticWorkload(), space=space, cache_dir=1)": (
        SEARCH, "cache_dir must be a folder", "got 1"),
    "dagsel.resume('r', NOBODY, workload=SyntheticWorkload(), space=space, worker_timeout='x')": (
        SEARCH, "worker_timeout='x'", '"10 min"'),
    "dagsel.replay('r', 3, workload=SyntheticWorkload(), space=space)": (
        CLUSTER, "got 3", "Client(n_workers=3"),
    "dagsel.replay('r', NOBODY, workload=SyntheticWorkload(), space=space, into=3)": (
        RUN, "3 is no URL", "pass a path"),
    "ShardedDataset.write('memory://q', [X, Y], n_shards=2)": (
        DATA, "arrays is a list", "mapping of names to arrays"),
    "ShardedDataset.write('memory://q', {'x': X}, n_shards=0)": (
        DATA, "n_shards must be a whole number", "got 0"),
    "ShardedDataset.write('memory://q', {'x': X}, n_shards=2, seed='0')": (
        DATA, "seed must be a whole", "got '0'"),
    "ShardedDataset.write('memory://q', {'x': X}, n_shards=2, validation=None)": (
        DATA, "validation is", "mapping"),
    "ShardedDataset.write('memory://q', {'x': X}, n_shards=2, overwrite='no')": (
        DATA, "overwrite must be", "got 'no'"),
    "ShardedDataset.write({'x': X}, 'memory://q', n_shards=2)": (
        DATA, "a dict is no URL", "pass a path"),
    "ShardedDataset.write('memory://q', {'x': FRAME}, n_shards=2)": (
        DATA, "'x' is a DataFrame", "numpy.asarray"),
    "ShardedDataset.write('memory://q', x=X, y=Y, n_shards=2)": (
        DATA, "ShardedDataset.write takes no x", 'write arrays={"x": x, "y": y}'),
    "ShardedDataset.write('memory://q', {'x': X}, num_shards=2, test_size=0.2)": (
        DATA, "no num_shards: write n_shards=; and", "no test_size: write validation="),
    "dagsel.resume('r', workload=SyntheticWorkload(), space=space, metric='value')": (
        SEARCH, "dagsel.resume takes no metric: the run keeps its own", "leave it out"),
    "dagsel.replay('r', deadline='10 min')": (
        SEARCH, "replay takes no deadline: the run keeps its own", ".extend(n_trials=20, deadline"),
    "ShardedDataset.open(None)": (DATA, "None is no URL", "pass a path"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    ShardedDataset.write(good()["data"], {"x": X, "y": Y}, n_shards=2, overwrite=True)
    RUNS.append("")
    with dask.config.set({"distributed.comm.timeouts.connect": "0.2 s"}):
        yield


def run_script(line: str, folder: Path) -> tuple[Exception, list[str]]:
    """Run a line as a script does; return its error and what Python prints of it."""
    script = folder / "script.py"
    script.write_text(f"made = {line}\n")
    linecache.checkcache()
    try:
        exec(compile(script.read_text(), str(script), "exec"), dict(globals()))
    except Exception as error:
        trace: Any = error.__traceback__
        printed = traceback.format_exception(error.with_traceback(trace.tb_next))
        return error, "".join(printed).splitlines()
    raise AssertionError(f"{line} was not refused")


SCRIPTS = {
    **{f"dagsel.optimize(**good({change}))": told for change, told in REFUSED.items()},
    **{
        f"dagsel.TorchWorkload(**torch_workload({change}))": told for change, told in MODELS.items()
    },
    **CALLS,
}


@pytest.mark.parametrize("line", SCRIPTS)
def test_a_wrong_argument_is_refused_in_few_lines(line: str, tmp_path: Path) -> None:
    kind, culprit, cure = SCRIPTS[line]
    error, printed = run_script(line, tmp_path)
    assert type(error) is kind, printed
    assert culprit in str(error)
    assert cure in printed[-1]  # the message is of one line, and the last one
    assert 3 < len(printed) < 15
    assert list(tmp_path.glob("[!s]*")) == []  # nothing was begun


def searched(folder: Path, **changes: Any) -> dict[str, Any]:
    """Search with what is right but for the changes; return the run's ``run.json``."""
    with pytest.raises(errors.ClusterError, match="no scheduler at"):
        dagsel.optimize(**good(**{"run_dir": folder / "run", **changes}))
    about: dict[str, Any] = json.loads((folder / "run" / "run.json").read_text())
    return about


NUMPY_COUNTS: dict[str, Any] = {"max_epochs": np.int64(9), "n_trials": np.int32(3)}
ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "numbers of numpy": (
        {"replicas": np.int64(2), "seed": np.int32(3), "deterministic": np.bool_(True),
         "deadline": np.float32(60), "budget": "3 EUR", "worker_timeout": np.float64(2),
         "unit_timeout": np.int64(9), "price_per_worker_hour": np.float64(2)},
        {"replicas": 2, "seed": 3, "deterministic": True, "deadline_s": 60.0, "budget_s": 5400.0,
         "unit_timeout_s": 9.0, "price_per_worker_hour": 2.0, "currency": "EUR"},
    ),
    "times": (
        {"deadline": datetime.timedelta(minutes=2), "unit_timeout": "1 min",
         "worker_timeout": "3 s"},
        {"deadline_s": 120.0, "unit_timeout_s": 60.0},
    ),
    "a flow's numbers of numpy": (
        {"flow": ASHA(**NUMPY_COUNTS)},
        {"flow": "ASHA"},
    ),
    "no callbacks": ({"callbacks": None}, {}),
    "a list of one metric": ({"metric": ["value"]}, {"metric": "value", "direction": "maximize"}),
    "several metrics": (
        {"study": TWO, "metric": ("value", "loss")},
        {"metric": "value", "direction": "maximize",
         "goals": [{"metric": "value", "direction": "maximize"},
                   {"metric": "loss", "direction": "minimize"}]},
    ),
    "callbacks": ({"callbacks": [print]}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_was_meant_is_taken(name: str, tmp_path: Path) -> None:
    changes, told = ACCEPTED[name]
    about = searched(tmp_path, **changes)
    assert {key: about[key] for key in told} == told
    assert all(type(about[key]) is type(value) for key, value in told.items())


def test_a_seed_of_none_is_drawn_and_recorded(tmp_path: Path) -> None:
    seeds = [searched(tmp_path / name, seed=None)["seed"] for name in ("a", "b")]
    assert all(type(seed) is int and seed >= 0 for seed in seeds)
    assert seeds[0] != seeds[1]


STORED = ("float64", "int64")
PAIRS: dict[str, tuple[Any, Any, tuple[str, str]]] = {
    "arrays": (X.astype("float32"), Y, ("float32", "int64")),
    "a data frame and a series": (FRAME, pd.Series(Y), ("float32", "int64")),
    "tensors": (torch.tensor(X, requires_grad=True), torch.tensor(Y), STORED),
    "lists": (X.tolist(), Y.tolist(), STORED),
    "words": (X, pd.Series(["cat", "dog", "cow"] * 200), STORED),
    "nullable numbers": (FRAME, pd.Series(Y, dtype="Int64"), ("float32", "int64")),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_two_arrays_are_written_into_the_runs_own_folder(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y, dtypes = PAIRS[kind]
    with caplog.at_level(logging.WARNING, "dagsel"):
        about = searched(tmp_path, data=(x, y))
    (line,) = (
        record.getMessage() for record in caplog.records if "is written to" in record.getMessage()
    )
    assert "1 shard, 480 samples to train and 120 to validate" in line
    data = ShardedDataset.open(about["data"])
    assert data.url == str(tmp_path / "run" / "data")
    assert data.url in line
    assert about["data_digest"] == data.digest
    assert [str(spec.numpy_dtype) for spec in data.schema.values()] == list(dtypes)
    assert data.classes == ({"y": ("cat", "cow", "dog")} if kind == "words" else {})
    rows = data.shard(0)["x"]
    held = {row.tobytes() for row in np.asarray(X, rows.dtype)}
    assert len(rows) == 480
    assert all(row.tobytes() in held for row in rows)


@pytest.mark.parametrize("kind", ["object", "str", "string"])
def test_a_text_that_is_missing_is_named_whatever_holds_it(kind: str, tmp_path: Path) -> None:
    y = pd.Series(["a", None, "b"] * 200, dtype=kind)
    with pytest.raises(errors.DatasetInputError, match="row 1 of y has no value"):
        searched(tmp_path, data=(X, y))


def test_a_nullable_number_that_is_missing_is_named(tmp_path: Path) -> None:
    column = pd.Series([1, None, 3] * 200, dtype="Int64")
    with pytest.raises(errors.DatasetInputError, match="x lacks 200 of .* row 1 of column 'old'"):
        searched(tmp_path, data=(FRAME.assign(old=column), Y))


def test_arrays_among_objects_are_still_refused_by_name(tmp_path: Path) -> None:
    y = pd.Series([np.arange(2), np.arange(3)] * 300)
    with pytest.raises(errors.DatasetInputError, match="y holds neither numbers nor text alone"):
        searched(tmp_path, data=(X, y))


def test_columns_of_yes_and_no_beside_numbers_are_numbers(tmp_path: Path) -> None:
    about = searched(tmp_path, data=(FRAME.assign(old=[True, False] * 300), Y))
    rows = ShardedDataset.open(about["data"]).shard(0)["x"]
    assert (rows.dtype, rows.shape[1]) == ("float32", 5)
    assert set(np.unique(rows[:, 4])) == {0.0, 1.0}


def test_resume_finds_the_two_arrays(tmp_path: Path) -> None:
    searched(tmp_path, data=(X, Y))
    with pytest.raises(errors.ClusterError, match="no scheduler at"):
        dagsel.resume(tmp_path / "run", NOBODY, workload=SyntheticWorkload(), space=space)


def test_arrays_are_not_written_into_the_folder_of_another_run() -> None:
    taken = RunDir("memory://taken")
    taken.claim("3f9a", {})
    taken.journal.append([{"is": "session"}])
    with pytest.raises(errors.RunDirError, match="holds run 3f9a"):
        dagsel.optimize(**good(data=(X, Y), run_dir="memory://taken"))
    with pytest.raises(errors.DatasetNotFoundError):
        ShardedDataset.open("memory://taken/data")


def test_arrays_go_to_a_run_dir_in_memory_alike() -> None:
    with pytest.raises(errors.ClusterError, match="no scheduler at"):
        dagsel.optimize(**good(data=(X, Y), run_dir="memory://pair"))
    assert len(ShardedDataset.open("memory://pair/data")) == 600


# ---- an optimizer's class, metrics by name


def rate(optimizer: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the optimizer that a workload makes."""
    made: dict[str, Any] = {}

    class Seen(optimizer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.update(self.defaults)

    Seen.__init__.__signature__ = inspect.signature(optimizer.__init__)  # type: ignore[attr-defined]
    workload = dagsel.TorchWorkload(**torch_workload(optimizer=Seen))
    workload.validate(config)
    return made


def test_an_optimizers_class_gets_what_the_configuration_has_for_it() -> None:
    config = {"lr": 0.25, "momentum": 0.5, "width": 3}
    made = rate(torch.optim.SGD, config)
    assert (made["lr"], made["momentum"], made["weight_decay"]) == (0.25, 0.5, 0)
    assert rate(torch.optim.AdamW, {"lr": 0.5, "betas": (0.5, 0.6)})["betas"] == (0.5, 0.6)


def test_a_class_trains_as_the_function_that_calls_it_does() -> None:
    shard = {"x": X.astype("float32"), "y": Y}
    states = []
    for optimizer in (torch.optim.Adam, lambda p, c: torch.optim.Adam(p, lr=c["lr"])):
        workload = dagsel.TorchWorkload(**torch_workload(optimizer=optimizer))
        state = workload.init({"lr": 0.1}, seed=1)
        visit = Visit(seed=0, trial=0, epoch=1, shard=0)
        states.append(
            workload.train(state, workload.prepare(shard), {"lr": 0.1}, visit=visit).state
        )
    assert bytes(states[0].buffer) == bytes(states[1].buffer)


def test_a_configuration_without_a_rate_has_the_classes_own_and_a_word_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.125) -> None:
            super().__init__(params, lr)

    workload = dagsel.TorchWorkload(**torch_workload(optimizer=Own))
    with caplog.at_level(logging.WARNING, "dagsel"):
        workload.validate({"learning_rate": 0.5})
        workload.validate({"learning_rate": 0.5})
    (line,) = caplog.messages
    assert line == "the configuration has no 'lr': Own trains with its own, 0.125"


def test_a_class_that_needs_more_than_the_configuration_has_is_refused() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any, rate: float) -> None:
            super().__init__(params, rate)

    workload = dagsel.TorchWorkload(**torch_workload(optimizer=Own))
    with pytest.raises(errors.WorkloadError, match=r"Own needs rate, and .* has lr: let the space"):
        workload.validate({"lr": 0.5})


@pytest.mark.parametrize(
    "metrics",
    [
        ["accuracy"],
        ("accuracy",),
        "accuracy",
        dagsel.metrics.accuracy,
        [dagsel.metrics.accuracy],
        {"accuracy": "accuracy"},
        {"accuracy": dagsel.metrics.accuracy},
    ],
    # Not their addresses: two processes that share the tests call them the same.
    ids=["list", "tuple", "name", "function", "functions", "names by name", "functions by name"],
)
def test_metrics_go_by_their_names(metrics: Any) -> None:
    models: list[Any] = [
        dagsel.TorchWorkload(**torch_workload(metrics=metrics)),
        dagsel.SklearnWorkload(sklearn.linear_model.SGDRegressor(), metrics=metrics),
    ]
    assert [model.metrics["accuracy"] for model in models] == ["maximize", "maximize"]
    assert models[0]._metrics == {"accuracy": dagsel.metrics.accuracy}


# ---- whatever is given


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary()
    | st.sampled_from([print, int, Net, Net(), X, FRAME, ASHA, object(), np.int64(3), np.nan]),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a call returns, and the text of its error."""
    try:
        return call(), ""
    except errors.DagselError as error:
        return None, str(error)


@given(name=st.sampled_from(sorted(arguments._CHECKS)), value=ANYTHING)
@settings(deadline=None)
def test_each_check_takes_what_it_is_given_or_says_what_is_wrong(name: str, value: Any) -> None:
    _, error = attempt(lambda: arguments.checked(**{name: value}))
    assert "\n" not in error
    assert len(error) < 500


@given(ANYTHING)
def test_metrics_are_functions_or_refused(value: Any) -> None:
    metrics, error = attempt(lambda: metric_functions(value))
    assert error or all(callable(metric) for metric in metrics.values())


@given(ANYTHING, st.integers(-3, 3))
def test_a_whole_number_is_one_of_pythons(value: Any, least: int) -> None:
    found, error = attempt(lambda: checks.whole("n", value, least=least))
    if error:
        assert error.startswith(f"n must be a whole number of {least} or more, got ")
    else:
        assert type(found) is int
        assert found == value
        assert found >= least


names = st.text("abcxyz", min_size=1, max_size=5)
finite = st.floats(-1e9, 1e9)


@given(
    st.dictionaries(
        names,
        st.lists(st.integers() | st.text(max_size=3), min_size=1, max_size=3)
        | st.tuples(st.integers(-9, 0), st.integers(1, 9))
        | st.tuples(st.floats(-9, 0), st.floats(1, 9))
        | st.builds(range, st.integers(-9, 0), st.integers(1, 9), st.integers(1, 4))
        | st.integers()
        | st.builds(
            optuna.distributions.FloatDistribution, st.just(0.5), st.just(2.0), st.booleans()
        )
        | st.builds(optuna.distributions.IntDistribution, st.just(1), st.just(8), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
def test_the_space_that_is_written_for_a_mapping_is_one(mapping: dict[str, Any]) -> None:
    with pytest.raises(errors.SearchError) as caught:
        arguments.checked(space=mapping)
    written = eval(str(caught.value).partition("write space=")[2])
    trial = optuna.create_study().ask()
    config = written(trial)
    assert config.keys() == mapping.keys()
    for name, value in mapping.items():
        if isinstance(value, list | range):
            assert config[name] in value
        elif isinstance(value, tuple):
            assert value[0] <= config[name] <= value[1]
        elif isinstance(value, int):
            assert config[name] == value
        else:
            assert trial.distributions[name] == value


# ---- a run.json that names a flow which cannot be


def test_a_flow_damaged_in_run_json_is_named_with_its_file(tmp_path: Path) -> None:
    shutil.copytree(OLD_RUNS / "torch-ended", tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    about["flow_config"] |= {"n_trials": "many"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    with pytest.raises(errors.RunDirError) as caught:
        dagsel.resume(
            tmp_path / "run",
            NOBODY,
            workload=searches.trained(),
            space=searches.space,
            data=OLD_RUNS / "data",
        )
    told = f"{tmp_path}/run/run.json: flow_config makes no {about['flow']}: 'n_trials' is 'many'"
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith("restore the file from a copy")
