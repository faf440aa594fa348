"""A search procedure of your own, in forty lines: after each epoch the worst trials are out.

    python examples/own_flow.py
    python -m pytest examples/own_flow.py

It checks the procedure with dagsel's conformance suite, plays it in virtual time, and searches
with it on digits. It takes about half a minute on two cores. Needs ``pip install hypothesis``.
"""

import argparse
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.samplers import TPESampler
from sklearn.datasets import load_digits

import dagsel
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Finish,
    Flow,
    Reported,
    Stop,
    Train,
    Traits,
    TrialFailed,
)
from dagsel.simulation import PowerLaw, SimulatedCluster
from dagsel.testing import FlowSuite, check


@dataclass
class Standing:
    """What the procedure has learnt so far: it is kept as JSON, so that a run can be resumed."""

    context: Context | None = None
    epoch: int = 1
    live: set[int] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)  # of those that have ended the epoch


@dataclass
class Knockout(Flow):
    """Train all trials for an epoch, drop a share of them, and go on with the others."""

    n_trials: int
    max_epochs: int
    share: float = 0.25  # of the trials that are left
    state: Standing = field(default_factory=Standing, init=False, repr=False, compare=False)

    @property
    def traits(self) -> Traits:
        return Traits(max_epochs=self.max_epochs, sampling="random", n_trials=self.n_trials)

    def start(self, context: Context) -> list[Decision]:
        self.state.context = context
        return [Ask(self.n_trials, "random")]

    def handle(self, event: Event) -> list[Decision]:
        state = self.state
        match event:
            case DeadlineReached():
                return [Finish()]
            case Asked(trials):
                state.live.update(trials)
                return [Train(trial, 1) for trial in trials] or [Finish()]
            case Reported(trial, _, value):
                assert state.context is not None
                state.losses[trial] = state.context.loss(value)  # smaller is better
            case TrialFailed(trial):
                state.live.discard(trial)
                state.losses.pop(trial, None)
        if not state.live:
            return [Finish()]
        if state.losses.keys() != state.live:
            return []  # the others are still training
        return self.next_epoch()

    def next_epoch(self) -> list[Decision]:
        state = self.state
        ranking = sorted(state.losses, key=lambda trial: (state.losses[trial], trial))
        state.losses.clear()
        if state.epoch == self.max_epochs:
            ended = [Stop(trial, "trained to the end", "complete") for trial in ranking]
            return [*ended, Finish()]
        n_left = max(1, round(len(ranking) * (1 - self.share)))
        state.epoch += 1
        state.live = set(ranking[:n_left])
        out = [Stop(trial, "among the worst of its epoch") for trial in ranking[n_left:]]
        return [*out, *(Train(trial, 1) for trial in ranking[:n_left])]


class TestKnockout(FlowSuite):
    """The laws that every search procedure keeps; pytest finds them in this file, too."""

    n_concurrent = 6

    def make_flow(self) -> Flow:
        return Knockout(n_trials=6, max_epochs=4)


def search(n_trials: int, max_epochs: int, folder: Path) -> dagsel.Run:
    digits = load_digits()
    workload = dagsel.TorchWorkload(
        model=lambda config: torch.nn.Sequential(
            torch.nn.Linear(64, config["width"]),
            torch.nn.ReLU(),
            torch.nn.Linear(config["width"], 10),
        ),
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.Adam,
        batch_size=32,
        metrics=["accuracy"],
    )
    return dagsel.optimize(
        optuna.create_study(
            study_name="knockout", direction="maximize", sampler=TPESampler(seed=0)
        ),
        workload,
        ((digits.data / 16).astype("float32"), digits.target),
        space=space,
        metric="accuracy",
        flow=Knockout(n_trials=n_trials, max_epochs=max_epochs),
        run_dir=folder / "run",
    )


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "width": trial.suggest_int("width", 16, 128, log=True),
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="a search procedure of your own")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    kept = check(TestKnockout)  # raises if the procedure breaks a law
    flow = Knockout(n_trials=args.trials, max_epochs=args.epochs)
    played = dagsel.simulate(flow, PowerLaw(epoch_s=30.0), SimulatedCluster(4), space=space)
    print(f"in virtual time: {played.seconds:.0f} s on 4 workers, {len(kept)} laws kept")

    folder = Path(tempfile.mkdtemp(prefix="dagsel-own-flow-"))
    run = search(args.trials, args.epochs, folder)
    print(run.trials()[["trial", "state", "value", "epochs", "reason"]].to_string(index=False))
    torch.save(run.best_model().state_dict(), folder / "best.pt")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.pt'}")


if __name__ == "__main__":
    main()
