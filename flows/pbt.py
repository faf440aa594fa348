"""Population based training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, TypeAlias

import numpy as np

from dagsel.checks import is_number, number, shown
from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Clone,
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
    WorkersChanged,
)
from dagsel.flows.drawing import check_counts, n_places, stop_all


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a hyperparameter of a population may take, ends included.

    Parameters
    ----------
    low, high
        The ends.
    log
        Whether resampling draws uniformly in the logarithm.

    Raises
    ------
    SearchError
        If the ends are not finite and in order, or not above 0 for a logarithm.

    Examples
    --------
    >>> Range(1e-4, 1.0, log=True).perturb(0.5, 1.2)
    0.6
    >>> Range(1, 8).resample(2, np.random.default_rng(0)) in range(1, 9)
    True
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        ends = (self.low, self.high)
        if not all(is_number(end) and math.isfinite(end) for end in ends) or self.low > self.high:
            raise SearchError(f"{self} must have finite ends, the lower one first")
        if self.log and self.low <= 0:
            raise SearchError(
                f"{self} has a logarithm, so low must be above 0; raise it or leave log=True out"
            )

    def perturb(self, value: float, factor: float) -> float:
        """Multiply a value and keep it within the range; a whole number stays one.

        Parameters
        ----------
        value
            The value so far.
        factor
            By how much.

        Examples
        --------
        >>> Range(1, 100).perturb(10, 1.2), Range(0.5, 2.0).perturb(2.0, 0.8)
        (12, 1.6)
        """
        return self._fit(value * factor, like=value)

    def resample(self, value: float, rng: np.random.Generator) -> float:
        """Draw a new value; a whole number if the value so far is one.

        Parameters
        ----------
        value
            The value so far.
        rng
            NumPy's generator.
        """
        if self.log:
            drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            drawn = float(rng.uniform(self.low, self.high))
        return self._fit(drawn, like=value)

    def _fit(self, value: float, *, like: float) -> float:
        if isinstance(like, int):
            return min(max(round(value), math.ceil(self.low)), math.floor(self.high))
        return float(min(max(value, self.low), self.high))


Choices: TypeAlias = Sequence[bool | int | float | str | None]


@dataclass(slots=True)
class Population:
    """The state of population based training."""

    context: Context = field(default_factory=lambda: Context(n_workers=1))
    n_places: int = 0
    epoch: int = 0  # at its end the generation is complete
    n_draws: int = 0
    configs: dict[int, dict[str, Any]] = field(default_factory=dict)  # live: what may mutate
    waiting: list[int] = field(default_factory=list)
    training: set[int] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)  # live: the latest


@dataclass
class PBT(Flow):
    """Train a population; its worst members go on from the best ones, with other settings.

    All members train for an interval. Then each of the worst quantile takes the state of one of the
    best and its configuration, perturbed or drawn anew. Generations are synchronous: members are
    ranked when all have trained as long, so the decisions depend neither on the speed of the
    workers nor on the order of their answers. With more members than workers, workers are idle only
    at the end of a generation.

    Jaderberg et al., Population Based Training of Neural Networks, 2017, Algorithm 1: exploit by
    truncation selection, explore by perturbing or resampling.

    Parameters
    ----------
    max_epochs
        Epochs of each member.
    n_trials
        Members of the population, four or more. One that fails is not replaced.
    mutations
        What may change, by name in the configuration: a list of choices in their order, or a
        `Range`.
    perturbation_interval
        Epochs of a generation; the last one may be shorter.
    quantile
        Share of the members that are the worst, and the best: above 0, and no more than a half.
    resample_probability
        How often a value is drawn anew. Otherwise it is perturbed.
    factors
        A value of a range is multiplied with one of these at random; it stays inside the range and,
        if it is whole, is rounded. A choice becomes the one before or after it in its list.
    n_concurrent
        How many members train at once; None for four a worker.

    Raises
    ------
    SearchError
        If one of these is out of its bounds, or if the configurations lack what is to mutate.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Reported
    >>> from dagsel.flows import Range
    >>> flow = PBT(max_epochs=9, n_trials=4, mutations={"lr": Range(1e-4, 1.0, log=True)})
    >>> flow.start(Context(n_workers=1))
    [Ask(n=4, sampling='study')]
    >>> decisions = flow.handle(Asked((0, 1, 2, 3), configs=4 * ({"lr": 0.1},)))
    >>> for trial in (0, 1, 2, 3):
    ...     decisions = flow.handle(Reported(trial, 1, trial / 10, {}, 1.0))
    >>> decisions[0].source, decisions[0].target
    (0, 3)
    """

    max_epochs: int
    n_trials: int
    mutations: Mapping[str, Choices | Range]
    perturbation_interval: int = 1
    quantile: float = 0.25
    resample_probability: float = 0.25
    factors: tuple[float, ...] = (1.2, 0.8)
    n_concurrent: int | None = None
    state: Population = field(default_factory=Population, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_counts(
            max_epochs=self.max_epochs,
            n_trials=self.n_trials,
            perturbation_interval=self.perturbation_interval,
            n_concurrent=self.n_concurrent,
        )
        if self.n_trials < 4:
            raise SearchError(
                f"a population needs four members or more, and n_trials is {self.n_trials}; "
                "raise it"
            )
        number("quantile", self.quantile, "above 0 and at most 0.5", lambda q: 0 < q <= 0.5)
        probability = self.resample_probability
        number("resample_probability", probability, "from 0 to 1", lambda p: 0 <= p <= 1)
        factors: Any = self.factors
        fit = isinstance(factors, list | tuple) and all(map(is_number, factors))
        if not fit or not factors or not all(0 < factor < math.inf for factor in factors):
            raise SearchError(f"factors must be numbers above 0, got {shown(factors)}")
        mutations: Any = self.mutations
        if not isinstance(mutations, Mapping) or not mutations:
            got = "empty" if not mutations else shown(mutations)
            raise SearchError(
                f"mutations is {got}; name what may change in the configuration, as "
                'mutations={"lr": Range(1e-4, 1e-1, log=True)}'
            )
        self.mutations = {key: _mutation(key, values) for key, values in self.mutations.items()}

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        reads = "changes parameters of the configurations"
        return Traits(self.max_epochs, reads_configs=reads, n_trials=self.n_trials)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the population."""
        self.state.context = context
        self.state.n_places = n_places(self.n_concurrent, context.n_workers)
        return [Ask(self.n_trials)]

    def handle(self, event: Event) -> list[Decision]:
        """Train generation after generation, exploit and explore between them."""
        state = self.state
        match event:
            case Asked(trials, _, configs):
                for index, trial in enumerate(trials):
                    config = configs[index] if index < len(configs) else {}
                    state.configs[trial] = self._mutable(config)
                return self._next_generation()
            case Reported(trial, epoch, value) if trial in state.training and epoch == state.epoch:
                state.training.discard(trial)
                state.losses[trial] = state.context.loss(value)
                return self._go_on()
            case TrialFailed(trial) if trial in state.configs:
                del state.configs[trial]
                state.training.discard(trial)
                state.losses.pop(trial, None)
                state.waiting = [other for other in state.waiting if other != trial]
                return self._go_on()
            case WorkersChanged(n_workers):
                state.n_places = n_places(self.n_concurrent, n_workers)
                return self._train()
            case DeadlineReached():
                live, state.configs, state.waiting = sorted(state.configs), {}, []
                return stop_all(live)
            case _:
                return []

    def _go_on(self) -> list[Decision]:
        state = self.state
        if state.waiting or state.training:
            return self._train()
        clones = self._exploit() if state.epoch < self.max_epochs else []
        return [*clones, *self._next_generation()]

    def _next_generation(self) -> list[Decision]:
        state = self.state
        if state.epoch == self.max_epochs or not state.configs:
            stops = [Stop(trial, "trained to the end", "complete") for trial in state.configs]
            state.configs = {}
            return [*stops, Finish()]
        state.epoch = min(state.epoch + self.perturbation_interval, self.max_epochs)
        state.waiting = sorted(state.configs)
        return self._train()

    def _train(self) -> list[Decision]:
        state = self.state
        room = max(state.n_places - len(state.training), 0)
        chosen, state.waiting = state.waiting[:room], state.waiting[room:]
        state.training.update(chosen)
        begun = (state.epoch - 1) // self.perturbation_interval * self.perturbation_interval
        return [Train(trial, state.epoch - begun) for trial in chosen]

    def _exploit(self) -> list[Clone]:
        state = self.state
        ranking = sorted(state.losses, key=lambda trial: (state.losses[trial], trial))
        n = min(math.ceil(self.quantile * len(ranking)), len(ranking) // 2)
        sources = [trial for trial in ranking[:n] if math.isfinite(state.losses[trial])]
        clones = []
        for target in ranking[len(ranking) - n :] if sources else []:
            rng = np.random.default_rng([state.context.seed, state.n_draws])
            state.n_draws += 1
            source = sources[int(rng.integers(len(sources)))]
            state.configs[target] = self._explore(state.configs[source], rng)
            clones.append(Clone(source, target, dict(state.configs[target])))
        return clones

    def _explore(self, config: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        explored: dict[str, Any] = {}
        for key, values in self.mutations.items():
            value, resample = config[key], rng.random() < self.resample_probability
            if isinstance(values, Range):
                factor = self.factors[int(rng.integers(len(self.factors)))]
                perturbed = values.perturb(value, factor)
                explored[key] = values.resample(value, rng) if resample else perturbed
            elif resample or value not in values:
                explored[key] = values[int(rng.integers(len(values)))]
            else:
                place = values.index(value) + (-1 if rng.random() < 0.5 else 1)
                explored[key] = values[min(max(place, 0), len(values) - 1)]
        return explored

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raise a `SearchError` if a configuration lacks what is to be mutated."""
        for key, value in self._mutable(config).items():
            if not isinstance(value, Number | str | None):
                raise SearchError(
                    f"mutations names {key!r}, which is {shown(value)} in a configuration, and "
                    "only numbers, text, booleans and None can change: suggest names of the "
                    "choices, and let the model look up what they mean"
                )

    def _mutable(self, config: Mapping[str, Any]) -> dict[str, Any]:
        for key, values in self.mutations.items():
            if key not in config:
                raise SearchError(
                    f"mutations names {key!r}, which a configuration lacks; it has "
                    f"{', '.join(config) or 'nothing that can be recorded'}"
                )
            if isinstance(values, Range) and not is_number(config[key]):
                raise SearchError(
                    f"mutations gives {key!r} a range, but it is {config[key]!r} in a "
                    "configuration; give it a list of choices"
                )
        return {key: config[key] for key in self.mutations}


def _mutation(key: str, values: Any) -> Choices | Range:
    if isinstance(values, Range):
        return values
    values = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(values, list | tuple) or not values:
        raise SearchError(
            f"mutations[{key!r}] must be a list of choices or a Range, got {shown(values)}; write "
            "[0.1, 0.01] or dagsel.flows.Range(1e-4, 1e-1, log=True)"
        )
    choices = [value.item() if isinstance(value, np.generic) else value for value in values]
    for value in choices:
        if not isinstance(value, bool | int | float | str | None):
            raise SearchError(
                f"mutations[{key!r}] has the choice {value!r}; choices must be numbers, strings, "
                "booleans or None"
            )
    return choices
