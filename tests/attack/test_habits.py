"""What a user of Optuna is used to: it works here, or one sentence says what to write instead."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import optuna
import pytest
from distributed import Client
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial

import dagsel
from dagsel import argument_names as of_a_search
from dagsel import going_on, workloads
from dagsel.errors import SearchError, WorkloadError
from dagsel.flows import RandomSearch, SamplerSearch
from dagsel.history import attribute_names
from dagsel.simulation import preview, run
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets import plan
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads import argument_names
from tests.conftest import Optimize


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.1, 1.0)}


def reports(trial: optuna.Trial) -> dict[str, Any]:
    config = space(trial)
    trial.report(0.5, step=0)
    return config


def asks_the_pruner(trial: optuna.Trial) -> dict[str, Any]:
    config = space(trial)
    if trial.should_prune():
        raise optuna.TrialPruned
    return config


def prunes(trial: optuna.Trial) -> dict[str, Any]:
    if space(trial)["lr"] > 0.0:
        raise optuna.TrialPruned("too large")
    return {}


def objective(trial: optuna.Trial) -> float:
    return float(space(trial)["lr"])


def returns_nothing(trial: optuna.Trial) -> None:
    space(trial)


def returns_the_trial(trial: optuna.Trial) -> optuna.Trial:
    space(trial)
    return trial


def other_choices_each_time(trial: optuna.Trial) -> dict[str, Any]:
    return {"layer": trial.suggest_categorical("layer", list(range(trial.number + 2)))}


def another_kind_each_time(trial: optuna.Trial) -> dict[str, Any]:
    if trial.number % 2:
        return {"n": trial.suggest_int("n", 1, 3)}
    return {"n": trial.suggest_float("n", 0.0, 1.0)}


def own_mistake(trial: optuna.Trial) -> dict[str, Any]:
    return {"n": int(f"{trial.suggest_int('n', 1, 3)}."), "k": optuna.distributions}


#: A space, or an argument that is Optuna's: what the sentence says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "to report in the space": (
        {"space": reports}, r"the space calls trial.report, .* dagsel reports each epoch; leave"),
    "to ask the pruner in the space": (
        {"space": asks_the_pruner}, r"trial.should_prune, .* flow=dagsel.flows.OptunaPruner\("),
    "to prune all in the space": (
        {"space": prunes},
        r"1,000 times .*: the space raised TrialPruned \(too large\) for {'lr': .*set_constraint"),
    "to give the objective as the space": (
        {"space": objective}, "as a dict, got float: it draws and .* return trial.params"),
    "to return nothing": ({"space": returns_nothing}, "got NoneType: .* return trial.params"),
    "to return the trial": ({"space": returns_the_trial}, "got Trial: .* return trial.params"),
    "to change the choices of a parameter": (
        {"space": other_choices_each_time},
        r"suggests 'layer' otherwise than in a trial before \(Cat.*give it another name"),
    "to change the kind of a parameter": (
        {"space": another_kind_each_time}, r"suggests 'n' otherwise .* the same kind"),
    "to minimize an accuracy": (
        {"study": optuna.create_study()}, "to minimize and 'value' is to max.* direction='max"),
    "several directions and a pruner": (
        {"study": optuna.create_study(directions=["maximize", "minimize"]),
         "metric": ["value", "loss"],
         "flow": dagsel.flows.OptunaPruner(max_epochs=2, n_trials=2)},
        "OptunaPruner ranks trials by one metric, .*take MOASHA"),
    "n_jobs": ({"n_jobs": 4}, r"takes no n_jobs: .* client=distributed.Client\(n_workers=4\)"),
    "n_trials": ({"n_trials": 20}, r"takes no n_trials: .*flows.RandomSearch\(max_epochs=9, n_tr"),
    "timeout": ({"timeout": 600}, 'takes no timeout: write deadline="10 min"'),
    "sampler": (
        {"sampler": optuna.samplers.TPESampler()}, r"takes no sampler: .*create_study\(sampler="),
    "pruner": ({"pruner": optuna.pruners.MedianPruner()}, r"no pruner: .*flows.OptunaPruner\("),
    "direction": ({"direction": "maximize"}, r"no direction: .*create_study\(direction="),
    "objective": ({"objective": objective}, "no objective: write space=, .*, and workload=, what"),
    "validation": ({"validation": 0.1}, r"no validation: .*ShardedDataset.write\(.*takes it"),
    "what Ray Tune takes": (
        {"num_samples": 20, "search_alg": 3, "mode": "max"},
        r"no num_samples: write flow=.*n_trials=20\); and no search_alg: .*; and no mode: write"),
    "what scikit-learn takes": (
        {"n_iter": 20, "scoring": "accuracy", "random_state": 0},
        r"no n_iter: write flow=.*; and no scoring: write metric=; and no random_state: write s"),
    "what Keras Tuner takes": (
        {"max_trials": 20, "directory": "runs", "project_name": "digits"},
        r"and no directory: write run_dir=; and no project_name: .*create_study\(study_name="),
    "x and y by name": ({"X": 1, "y": 1}, r"takes no X: write data=\(x, y\); and no y: write data"),
    "batch_size": ({"batch_size": 32}, r"no batch_size: .*TorchWorkload\(...\), which takes it"),
    "catch": ({"catch": (ValueError,)}, "no catch: a trial that fails does not end the run"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_said_in_one_sentence_before_anything_trains(
    name: str, optimize: Optimize
) -> None:
    changes, told = REFUSED[name]
    study = optuna.create_study(direction="maximize")
    given = {"study": study, "space": space, "client": "tcp://127.0.0.1:9", **changes}
    with pytest.raises(SearchError, match=told) as caught:
        optimize(given.pop("flow", RandomSearch(max_epochs=2, n_trials=4)), **given)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert given["study"].trials == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("criterion", "write loss=$"),
        ("scheduler", "write lr_scheduler=$"),
        ("lr", r"write optimizer=torch.optim.Adam, .* or optimizer=lambda parameters, config: "),
        (
            "clip_grad_norm",
            r"write train_fn=, .* that calls torch\.nn\.utils\.clip_grad_norm_",
        ),
        ("sampler", "each epoch takes each sample once, .*; leave it out$"),
        (
            "epochs",
            r"write flow=dagsel\.flows\.RandomSearch\(.*\) for dagsel\.optimize",
        ),
        (
            "patience",
            r"write flow=dagsel\.flows\.EarlyStopping\(flow, patience=5\) for",
        ),
    ],
)
def test_a_torch_workload_says_where_an_argument_belongs(name: str, told: str) -> None:
    given: dict[str, Any] = {"model": space, "loss": reports, "optimizer": reports, name: 1}
    with pytest.raises(WorkloadError, match=rf"^dagsel\.TorchWorkload takes no {name}: {told}"):
        dagsel.TorchWorkload(batch_size=8, **given)


@pytest.mark.parametrize(
    ("workload", "name", "told"),
    [
        ("HFWorkload", "args", "what a search needs of TrainingArguments .* write batch_size="),
        ("HFWorkload", "per_device_train_batch_size", "write batch_size=$"),
        ("LightningWorkload", "optimizer", "the module's configure_optimizers makes it; write mod"),
        ("FlaxWorkload", "learning_rate", r"write optimizer=lambda config: optax\.adam\("),
        (
            "KerasWorkload",
            "validation_split",
            r"a fifth of data=\(x, y\) is held out; write Sharded",
        ),
        ("KerasWorkload", "class_weight", "weigh the samples in the loss that the model is compi"),
        ("FlaxWorkload", "rngs", r"model gets them, .*; write model=lambda config, rngs: \.\.\.$"),
        ("SklearnWorkload", "cv", "one validation set scores all trials; leave it out$"),
        ("KerasWorkload", "loss", "the model is compiled with it; write model=build"),
        ("SklearnWorkload", "param_grid", r"write space= for dagsel\.optimize$"),
    ],
)
def test_so_does_each_workload(workload: str, name: str, told: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^dagsel\.{workload} takes no {name}: {told}"):
        getattr(workloads, workload)(**{name: 1})


@pytest.mark.parametrize(
    ("workload", "elsewhere"),
    [
        ("TorchWorkload", argument_names.TORCH),
        ("HFWorkload", argument_names.HUGGINGFACE),
        ("LightningWorkload", argument_names.LIGHTNING),
        ("FlaxWorkload", argument_names.FLAX),
        ("KerasWorkload", argument_names.KERAS),
        ("SklearnWorkload", argument_names.SKLEARN),
    ],
)
def test_each_argument_that_is_told_to_write_is_one_of_the_workload(
    workload: str, elsewhere: dict[str, str]
) -> None:
    known = inspect.signature(getattr(workloads, workload)).parameters
    told = "\n".join(text for name, text in elsewhere.items() if name not in known)
    own = re.findall(r"write (\w+)=(?!.*for dagsel.optimize)", told)
    assert set(own) <= set(known)
    assert own
    of_a_search = inspect.signature(dagsel.optimize).parameters
    assert set(re.findall(r"write (\w+)=.* for dagsel.optimize", told)) <= set(of_a_search)


def test_each_argument_that_a_search_is_told_to_write_is_one_of_it() -> None:
    known = inspect.signature(dagsel.optimize).parameters
    told = [text for name, text in of_a_search._ELSEWHERE.items() if name not in known]
    own = {name for text in told for name in re.findall(r"(?:write|and) (\w+)=", text)}
    assert own <= set(known)
    flows = {code for text in told for code in re.findall(r"flow=(.*\))$", text)}
    assert len(flows) > 4
    for code in flows:
        eval(code.replace("...", "None"), {"dagsel": dagsel, "flow": RandomSearch(max_epochs=1)})


def test_each_argument_that_a_write_or_a_resume_is_told_to_take_is_one_of_it() -> None:
    known = inspect.signature(ShardedDataset.write).parameters
    for name, told in plan._ELSEWHERE.items():
        assert name not in known
        found = re.match(r"write (\w+)=", told)
        assert found is None or found[1] in known
    kept = inspect.signature(dagsel.optimize).parameters.keys() | {"max_epochs", "n_trials"}
    going_on_with: set[str] = {*inspect.signature(dagsel.resume).parameters}
    assert going_on._KEPT.keys() <= kept - going_on_with
    longer = inspect.signature(dagsel.Run.extend).parameters
    assert {"n_trials", "deadline", "budget", "max_epochs"} <= set(longer)


@pytest.mark.parametrize(
    ("call", "name", "told"),
    [
        (dagsel.Run.extend, "epochs", "Run.extend takes no epochs: write max_epochs=$"),
        (dagsel.Run.extend, "timeout", "Run.extend takes no timeout: write deadline=$"),
        (dagsel.Run.refit, "max_epochs", "Run.refit takes no max_epochs: write epochs=$"),
        (
            dagsel.Search.extend,
            "n_trials",
            r"Search.extend takes no n_trials: when .* has ended, write run.extend\(n_tr",
        ),
    ],
)
def test_so_do_the_calls_that_go_on(call: Callable[..., Any], name: str, told: str) -> None:
    with pytest.raises(SearchError, match=told):
        call(None, **{name: 3})


@pytest.mark.parametrize(
    ("call", "name", "told"),
    [
        (dagsel.simulate, "n_workers", "write cluster=dagsel.simulation.SimulatedCluster"),
        (dagsel.simulate, "epoch_seconds", "write curves=dagsel.simulation.PowerLaw"),
        (dagsel.simulate, "workload", "nothing is trained; leave it out$"),
        (dagsel.preview, "metric", "nothing is trained; leave it out$"),
        (dagsel.preview, "num_workers", "write n_workers=$"),
    ],
)
def test_so_do_those_that_train_nothing(call: Callable[..., Any], name: str, told: str) -> None:
    with pytest.raises(SearchError, match=rf"dagsel\.{call.__name__} takes no {name}: {told}"):
        call(1, **{name: 3})
    elsewhere = run._ELSEWHERE if call is dagsel.simulate else preview._ELSEWHERE
    assert not elsewhere.keys() & inspect.signature(call).parameters.keys()


@pytest.mark.parametrize("call", [dagsel.optimize, dagsel.start])
def test_arrays_that_are_no_pair_are_said_to_be_one(call: Callable[..., Any]) -> None:
    told = r"takes study, workload, data by their places, .* are one of them, data=\(x, y\)$"
    with pytest.raises(SearchError, match=told):
        call(1, 2, [3], [4], space=space, metric="loss")


@pytest.mark.parametrize("call", [dagsel.optimize, dagsel.start])
def test_what_is_missing_is_said_with_the_line_to_write(call: Callable[..., Any]) -> None:
    given = {"study": 1, "workload": 2, "data": 3, "space": 4, "flow": 5, "metric": 6}
    for name in given:
        rest = {key: value for key, value in given.items() if key != name}
        with pytest.raises(
            SearchError, match=rf"^dagsel\.{call.__name__} needs {name}: write {name}="
        ):
            call(**rest)
    with pytest.raises(SearchError, match=r"needs space and flow and metric: write space=lambda"):
        call(1, 2, 3)
    with pytest.raises(TypeError, match="multiple values for argument 'study'"):
        call(1, 2, 3, study=4)


@pytest.mark.parametrize("call", [dagsel.optimize, dagsel.start])
def test_a_search_without_its_study_is_told_so(call: Callable[..., Any]) -> None:
    by_name = r"write workload=\.\.\., data=\.\.\. by name"
    told = rf"^dagsel\.{call.__name__} takes the study first; {by_name}"
    rest: dict[str, Any] = {"space": 4, "flow": 5, "metric": 6}
    with pytest.raises(SearchError, match=rf"{told}; it needs study: write study=optuna"):
        call(SyntheticWorkload(), 3, **rest)
    with pytest.raises(SearchError, match=f"{told}$"):
        call(SyntheticWorkload(), 3, study=1, **rest)
    with pytest.raises(SearchError, match=r"; it needs study and data and metric: write study="):
        call(SyntheticWorkload(), space=4, flow=5)


def test_attributes_that_others_have_say_what_to_write(optimize: Optimize) -> None:
    run: Any = optimize(RandomSearch(max_epochs=1, n_trials=1))
    search: Any = object.__new__(dagsel.Search)
    for owner, known in ((run, attribute_names.RUN), (search, attribute_names.SEARCH)):
        for name, written in known.items():
            if owner is search and (hasattr(dagsel.Search, name) or written.startswith("result.")):
                continue
            with pytest.raises(AttributeError, match=rf"'{name}': write \.{re.escape(written)}$"):
                getattr(owner, name)
            attrgetter(written.partition("(")[0])(owner if owner is run else dagsel.Search)
    for name, written in (("best_config", "best_params"), ("leaderboard", "leaderboard")):
        with pytest.raises(AttributeError, match=rf"'{name}': write \.result\.{written}$"):
            getattr(search, name)
    for owner in (run, search):
        with pytest.raises(AttributeError, match="has no attribute 'colour'$"):
            owner.colour  # noqa: B018
    assert copy.copy(run).best == run.best


def test_an_attribute_that_a_property_lacks_is_the_one_that_is_named() -> None:
    class Mine(dagsel.Run):
        @property
        def best(self) -> Any:
            return self.study.colour  # type: ignore[attr-defined]

    run = Mine(study=None, metric="", record=None, workload=None, run_dir=None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'colour'"):
        run.best  # noqa: B018


def test_the_result_of_a_search_is_not_called(optimize: Optimize) -> None:
    run = optimize(RandomSearch(max_epochs=1, n_trials=1))
    with pytest.raises(TypeError, match=r"search.result without brackets, .* or search.wait\(\),"):
        run()
    with pytest.raises(SearchError, match=r"by their names: write n_trials=4$"):
        run.extend(4)


def test_every_other_argument_that_is_unknown_is_pythons_to_refuse(optimize: Optimize) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        optimize(colour="red")


def test_a_mistake_in_the_space_is_raised_as_it_is(optimize: Optimize) -> None:
    with pytest.raises(ValueError, match="invalid literal for int") as caught:
        optimize(space=own_mistake)
    assert not isinstance(caught.value, SearchError)


@pytest.fixture
def search(optimize: Optimize, client: Client) -> Callable[..., dagsel.Run]:
    def call(**given: Any) -> dagsel.Run:
        flow = given.pop("flow", SamplerSearch(max_epochs=2, n_trials=5, n_concurrent=2))
        return optimize(flow, **{"space": space, "client": client, **given})

    return call


def maximizing() -> optuna.Study:
    return optuna.create_study(direction="maximize")


def test_to_return_params_and_to_set_attributes_works(search: Any) -> None:
    def noting(trial: optuna.Trial) -> dict[str, Any]:
        space(trial)
        trial.set_user_attr("note", trial.number)
        return dict(trial.params)

    run = search(space=noting)
    assert [t.user_attrs["note"] for t in run.study.trials] == [0, 1, 2, 3, 4]


def test_to_optimize_the_study_before_and_after_works(search: Any) -> None:
    study = maximizing()
    study.optimize(objective, n_trials=2)
    run = search(study=study)
    study.optimize(objective, n_trials=2)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 9
    assert set(run.record.trials) == {2, 3, 4, 5, 6}


def test_to_search_in_an_objective_works(search: Any) -> None:
    outer, inner = maximizing(), maximizing()
    outer.optimize(lambda trial: search(study=inner).best_value, n_trials=1)
    assert outer.best_value == inner.best_value
    assert len(inner.trials) == 5


@pytest.mark.parametrize("ends", [True, False])
def test_to_tell_a_trial_of_a_run_changes_the_study_and_not_the_run(
    ends: bool, search: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    def tell(study: optuna.Study, trial: Any) -> None:
        if not told:
            told.extend(t.number for t in study.trials if t.state == TrialState.RUNNING)
            for number in told:
                study.tell(number, -1.0) if ends else study.tell(number, state=TrialState.FAIL)

    with caplog.at_level(logging.WARNING, "dagsel"):
        run = search(callbacks=[tell])
    assert told
    for number in told:
        assert f"trial {number} was told to study" in caplog.text
        assert run.record.trials[number].state == "complete"
        trial = run.study.trials[number]
        assert trial.state == (TrialState.COMPLETE if ends else TrialState.FAIL)
        assert trial.value == (-1.0 if ends else None)
    assert len(caplog.messages) == len(told)
    assert run.best_value > 0


def test_to_tell_a_trial_that_fails_then_is_no_error(search: Any) -> None:
    def fails(config: Any, epoch: int) -> float:
        return 0.5 if epoch == 1 else float("nan")

    told: list[int] = []

    def tell(study: optuna.Study, trial: Any) -> None:
        for other in study.trials if not told else ():
            if other.state == TrialState.RUNNING:
                told.append(other.number)
                study.tell(other.number, 0.25)

    run = search(callbacks=[tell], workload=SyntheticWorkload(value=fails))
    assert told
    assert all(run.record.trials[number].state == "failed" for number in told)
    assert all(run.study.trials[number].value == 0.25 for number in told)


def test_enqueued_trials_may_leave_parameters_open_and_a_wrong_name_is_told(
    search: Any, caplog: pytest.LogCaptureFixture
) -> None:
    study = maximizing()
    study.enqueue_trial({})
    study.enqueue_trial({"lr": 0.25})
    study.enqueue_trial({"lrr": 0.25})
    with caplog.at_level(logging.WARNING, "dagsel"):
        run = search(study=study)
    assert run.record.trials[1].params == {"lr": 0.25}
    assert all(0.1 <= trial.params["lr"] <= 1.0 for trial in run.record.trials.values())
    (line,) = caplog.messages
    assert line == (
        "trial 2 was enqueued with lrr, which the space did not suggest; it suggested lr"
    )


def test_an_enqueued_value_that_the_space_cannot_suggest_is_named(search: Any) -> None:
    study = maximizing()
    study.enqueue_trial({"lr": "large"})
    with pytest.raises(
        SearchError, match=r"trial 0 was enqueued with \{'lr': 'large'\}, which the"
    ):
        search(study=study)


def test_what_callbacks_ask_enqueue_and_add_is_taken_as_in_optuna(search: Any) -> None:
    ended: list[int] = []

    def busy(study: optuna.Study, trial: Any) -> None:
        ended.append(trial.number)
        if len(ended) == 1:  # three are still to be asked for
            study.ask()
            study.enqueue_trial({"lr": 0.125})
            floats: dict[str, Any] = {"lr": FloatDistribution(0.1, 1.0)}
            study.add_trial(create_trial(value=0.5, params={"lr": 0.5}, distributions=floats))

    run = search(callbacks=[busy])
    assert len(run.record.trials) == 5
    assert {"lr": 0.125} in [trial.params for trial in run.record.trials.values()]


def test_data_of_a_pair_searches_like_an_objective_that_holds_it(
    client: Client, run_dir: str
) -> None:
    data = (np.arange(80.0), np.arange(80))
    run = dagsel.optimize(
        maximizing(),
        SyntheticWorkload(),
        data,
        space=space,
        flow=RandomSearch(max_epochs=1, n_trials=2),
        metric="value",
        client=client,
        run_dir=run_dir,
    )
    assert len(ShardedDataset.open(f"{run_dir}/data")) == 80
    assert len(run.study.trials) == 2
