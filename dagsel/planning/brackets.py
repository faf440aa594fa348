"""The arithmetic of searches in stages of wall-clock time: SEER's brackets, and Hyperband's.

Dunlap et al., Elastic Hyperparameter Tuning on the Cloud, SoCC 2021, Algorithms 1 to 3, with the
misprints mended that `docs/procedures/seer.md` lists. Everything is a fraction: a logarithm in
floating point gives the wrong number of stages where R is a power of the reduction factor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, count
from typing import Literal, TypeAlias

from dagsel.errors import SearchError
from dagsel.planning.nodes import nodes_for, nodes_within

SeerMode: TypeAlias = Literal["fill", "paper"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A span of wall-clock time in which a fixed set of trials trains."""

    seconds: Fraction
    n_trials: tuple[int, ...]  # of each bracket
    n_workers: int  # of all of them together


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a search in stages will do if nothing fails and every worker comes at once."""

    workers: tuple[int, ...]  # of a trial of each bracket
    stages: tuple[Stage, ...]

    @property
    def seconds(self) -> Fraction:
        """How long the search takes."""
        return sum((stage.seconds for stage in self.stages), Fraction())

    @property
    def cost(self) -> Fraction:
        """How many worker-seconds it takes."""
        return sum((stage.seconds * stage.n_workers for stage in self.stages), Fraction())

    @property
    def ends(self) -> tuple[float, ...]:
        """When each stage ends, in seconds since the beginning."""
        return tuple(float(end) for end in accumulate(stage.seconds for stage in self.stages))


@dataclass(frozen=True, slots=True)
class Brackets:
    """The quantities of SEER's algorithms, in the paper's order."""

    resource: Fraction  # R*: the last stage lasts t_min · R*
    n_stages: int  # K
    first_stage_s: Fraction  # t₁
    base_cost: Fraction  # B₀: worker-seconds of the cheapest bracket
    n_full: int  # q*: how many brackets the budget pays in full
    workers: tuple[int, ...]  # P: of a trial of each bracket
    budgets: tuple[Fraction, ...]  # B_i: worker-seconds of each bracket
    n_trials: tuple[int, ...]  # N_i: trials of each bracket in the first stage
    reduction_factor: int  # η
    most_workers: int | None = None  # W: of all trials together; None for no bound
    node_size: int = 1  # workers that come and go together

    def plan(self, n_trials: tuple[int, ...]) -> StagePlan:
        """Return the stages of brackets that begin with so many trials.

        Where the trials of a stage need more workers than there can be, they take turns, and the
        stage is as many times as long.
        """
        stages = []
        for k in range(self.n_stages):
            power = self.reduction_factor**k
            counts = tuple(n // power for n in n_trials)
            needed = sum(n * p for n, p in zip(counts, self.workers, strict=True))
            n_workers = nodes_for(needed, self.node_size)
            seconds = self.first_stage_s * power
            if self.most_workers is not None and needed > self.most_workers:
                n_workers = self.most_workers
                seconds *= Fraction(needed, n_workers)
            stages.append(Stage(seconds, counts, n_workers))
        return StagePlan(self.workers, tuple(stages))


def exactly(value: float) -> Fraction:
    """Read a number as it is written in decimals.

    Examples
    --------
    >>> exactly(0.3) / exactly(0.1)
    Fraction(3, 1)
    """
    return Fraction(repr(float(value)))


def n_workers_of(deadline_s: float, budget: float) -> int:
    """Return how many workers a budget pays for until a deadline.

    Raises
    ------
    SearchError
        If it pays for none.

    Examples
    --------
    >>> n_workers_of(60.0, 240.0)
    4
    """
    n_workers = int(exactly(budget) / exactly(deadline_s))
    if not n_workers:
        raise SearchError(
            f"a budget of {_told(budget)} worker-seconds buys no worker until the deadline; "
            f"the smallest that works is {_told(deadline_s)} worker-seconds"
        )
    return n_workers


def solve_brackets(
    deadline_s: float,
    budget: float,
    *,
    reduction_factor: int = 4,
    parallelism_factor: int = 2,
    min_workers_per_trial: int = 1,
    max_workers_per_trial: int | None = None,
    min_stage_s: float = 1.0,
    most_workers: int | None = None,
    node_size: int = 1,
) -> Brackets:
    """Return the brackets, stages and trials that a deadline and a budget pay for.

    These are Algorithms 2 and 3. R* is the largest R with ``t_min·R·η/(η−1)·(1 − η^(−K)) <= T`` and
    ``t_min·p_min·R·K <= B``, where K is ⌈log_η R⌉, or 1 for R = 1. Both sides grow with R and jump
    where K does. So the feasible R are an interval, and its end lies in the last piece between two
    jumps that has a feasible point.

    The paper knows no bound on the workers of all trials together. Under one, W, no more than W·T
    can be spent, so B is at most that. Each stage has an equal part V = B/K of the cost, as in the
    paper, and lasts t_k, or V/W if that is longer: its trials take turns. The first condition
    becomes ``Σ max(t_k, V/W) <= T``. Without a bound, or with one that no stage reaches, it is the
    paper's.

    Parameters
    ----------
    deadline_s
        T: seconds that the search may last.
    budget
        B: worker-seconds that it may cost.
    reduction_factor
        η: one of η trials goes on to the next stage, which is η times as long.
    parallelism_factor
        ν: a trial of the next bracket has ν times as many workers.
    min_workers_per_trial, max_workers_per_trial
        p_min and p_max; None for no limit.
    min_stage_s
        t_min: the first stage lasts as long, or longer.
    most_workers
        W; None for no bound.
    node_size
        Workers that come and go together.

    Raises
    ------
    SearchError
        If no trial can be trained for a stage.

    Examples
    --------
    >>> found = solve_brackets(10, 80, reduction_factor=2)
    >>> round(float(found.resource), 3), found.n_stages, round(float(found.first_stage_s), 4)
    (5.714, 3, 1.4286)
    >>> round(float(found.base_cost), 3), found.n_full, found.workers
    (17.143, 2, (1, 2, 4))
    >>> [round(float(budget), 3) for budget in found.budgets], found.n_trials
    ([34.286, 34.286, 11.429], (8, 4, 0))

    On two workers 24 trials take turns, in stages of equal length:

    >>> found = solve_brackets(60, 120, min_stage_s=1, most_workers=2)
    >>> plan = seer_plan(found, 60, 120, "fill")
    >>> [(float(stage.seconds), stage.n_trials, stage.n_workers) for stage in plan.stages]
    [(20.0, (16, 8), 2), (20.0, (4, 2), 2), (20.0, (1, 0), 1)]
    """
    T, B, t_min = exactly(deadline_s), exactly(budget), exactly(min_stage_s)
    eta, nu, p_min = reduction_factor, parallelism_factor, min_workers_per_trial
    W, p_max = most_workers, max_workers_per_trial
    if W is not None:
        W = nodes_within(W, node_size)
        B = min(B, W * T)
        if p_min > W:
            raise SearchError(
                f"min_workers_per_trial={p_min}, and the cluster can have {W} workers: lower the "
                "first, or give the cluster more"
            )
        p_max = W if p_max is None else min(W, p_max)
    least = nodes_for(p_min, node_size)  # workers that a single trial costs
    _check(deadline_s, budget, min_stage_s, p_min, max_workers_per_trial, least)
    width = None if W is None else Fraction(W, least)
    R, K = _largest_resource(T / t_min, B / t_min / least, eta, width)
    t_1 = t_min * R / eta ** (K - 1)
    B_0 = p_min * t_min * R * K
    q = 1
    while (q + 1) * nu**q <= B / B_0:
        q += 1
    powers = [p_min * nu**i for i in range(q)]
    if p_max is None or powers[-1] < p_max:
        last = powers[-1] * nu
        P = [*powers, last if p_max is None else min(p_max, last)]
        full = B_0 * nu ** (q - 1)
        budgets = [full] * q + [B - q * full]
    else:
        P = [*(p for p in powers if p < p_max), p_max]
        budgets = [B / len(P)] * len(P)
    N = tuple(int(b // (K * t_1 * p)) for b, p in zip(budgets, P, strict=True))
    return Brackets(R, K, t_1, B_0, q, tuple(P), tuple(budgets), N, eta, W, node_size)


def seer_plan(found: Brackets, deadline_s: float, budget: float, mode: SeerMode) -> StagePlan:
    """Return SEER's stages, of what `solve_brackets` found for a deadline and a budget.

    Mode ``"paper"`` is literal. ``"fill"`` also spends what the rounding to whole trials leaves
    over: on as many more trials of the first bracket as it pays for, and the rest on a longer last
    stage, if there is time.

    Examples
    --------
    >>> found = solve_brackets(10, 80, reduction_factor=2)
    >>> plan = seer_plan(found, 10, 80, "paper")
    >>> [stage.n_workers for stage in plan.stages], round(float(plan.cost), 2)
    ([16, 8, 4], 68.57)
    >>> plan = seer_plan(found, 10, 80, "fill")
    >>> [stage.n_trials for stage in plan.stages], round(float(plan.cost), 2)
    ([(11, 4, 0), (5, 2, 0), (2, 1, 0)], 75.71)
    """
    T, B = exactly(deadline_s), exactly(budget)
    n_trials = _within(found, B)
    if mode == "paper":
        return found.plan(n_trials)

    def fits(n: int) -> bool:
        plan = found.plan((n, *n_trials[1:]))
        return plan.cost <= B and plan.seconds <= T

    plan = found.plan((_largest(fits, n_trials[0]), *n_trials[1:]))
    *stages, last = plan.stages
    more = min(T - plan.seconds, (B - plan.cost) / last.n_workers)
    return StagePlan(
        plan.workers, (*stages, Stage(last.seconds + more, last.n_trials, last.n_workers))
    )


def _within(found: Brackets, budget: Fraction) -> tuple[int, ...]:
    # Whole nodes may cost more than their share of the budget: then fewer trials begin, those with
    # the most workers first.
    n_trials = [*found.n_trials]
    while found.plan(tuple(n_trials)).cost > budget:
        last = max(i for i, n in enumerate(n_trials) if n)
        n_trials[last] -= 1
    return tuple(n_trials)


def hyperband_plan(
    deadline_s: float,
    budget: float,
    *,
    reduction_factor: int = 4,
    min_stage_s: float = 1.0,
    most_workers: int | None = None,
    node_size: int = 1,
) -> StagePlan:
    """Return the stages of Hyperband's brackets side by side, one worker a trial.

    A trial's resource is its training time, T at most: bracket s is ranked after ``T·η^(-s)``,
    ``T·η^(1-s)`` and so on, so the brackets share the ends of their stages. The sizes of the
    brackets are in the proportion of Li et al. 2018, and as large as the budget pays for and the
    cluster can train at once; where it cannot train the least sizes, the brackets that are ranked
    first are left out.

    Examples
    --------
    >>> plan = hyperband_plan(16, 160, reduction_factor=4)
    >>> [(float(stage.seconds), stage.n_trials, stage.n_workers) for stage in plan.stages]
    [(1.0, (21, 7, 3), 31), (3.0, (5, 7, 3), 15), (12.0, (1, 1, 3), 5)]
    """
    T, B, eta = exactly(deadline_s), exactly(budget), reduction_factor
    W = None if most_workers is None else nodes_within(most_workers, node_size)

    def fits(plan: StagePlan) -> bool:
        return plan.cost <= B and (W is None or plan.stages[0].n_workers <= W)

    _check(deadline_s, budget, min_stage_s, 1, None, node_size)
    n_workers_of(deadline_s, budget)  # one is enough for the bracket that is never ranked
    least = [1]  # trials of each bracket, so that one is left in its last stage
    while exactly(min_stage_s) * eta * least[0] <= T:
        least.insert(0, eta * least[0])
    while len(least) > 1 and not fits(_side_by_side(T, eta, least, node_size)):
        del least[0]
    n = len(least)  # s_max + 1; bracket s stands at n - 1 - s
    shares = [n * power // (n - i) for i, power in enumerate(least)]

    def sized(scale: int) -> StagePlan:
        sizes = [*map(max, least, (n * scale // 1000 for n in shares))]
        return _side_by_side(T, eta, sizes, node_size)

    return sized(_largest(lambda scale: fits(sized(scale)), 0))


def _side_by_side(T: Fraction, eta: int, sizes: list[int], node_size: int) -> StagePlan:
    before, stages = Fraction(), []
    for k in range(len(sizes)):
        # The i-th bracket, with s = s_max - i, was ranked k - i times.
        counts = tuple(n // eta ** max(0, k - i) for i, n in enumerate(sizes))
        end = T / eta ** (len(sizes) - 1 - k)
        n_workers = nodes_for(sum(counts), node_size)
        stages.append(Stage(end - before, counts, n_workers))
        before = end
    return StagePlan((1,) * len(sizes), tuple(stages))


def _check(
    deadline_s: float,
    budget: float,
    min_stage_s: float,
    p_min: int,
    p_max: int | None,
    n_billed: int,
) -> None:
    given = {"deadline": deadline_s, "budget": budget, "min_stage": min_stage_s}
    for name, value in given.items():
        if not value > 0:
            raise SearchError(f"{name} must be above 0, got {value!r}")
    if p_max is not None and p_max < p_min:
        raise SearchError(
            f"max_workers_per_trial={p_max} is below min_workers_per_trial={p_min}; raise the "
            "first or lower the second"
        )
    if deadline_s < min_stage_s:
        raise SearchError(
            f"a deadline of {_told(deadline_s)} s has no room for one stage of min_stage="
            f"{_told(min_stage_s)} s; raise the first or lower the second"
        )
    least = n_billed * exactly(min_stage_s)
    if exactly(budget) < least:
        raise SearchError(
            f"a budget of {_told(budget)} worker-seconds is too small for one trial on {n_billed} "
            f"worker{'s' * (n_billed > 1)} for one stage of {_told(min_stage_s)} s; the smallest "
            f"that works is {_told(least)} worker-seconds"
        )


def _told(value: float | Fraction) -> str:
    return repr(float(value)).removesuffix(".0")


def _largest_resource(
    time: Fraction, cost: Fraction, eta: int, width: Fraction | None
) -> tuple[Fraction, int]:
    # R and K for a deadline in units of t_min and a budget in units of what the least number of
    # workers costs for t_min, both 1 or more; the width of the cluster is in units of that number.
    R, K = Fraction(1), 1
    for k in count(1):
        shortest = Fraction(0) if width is None else cost / k / width  # of a stage
        # The last m stages are longer than that, the others as long; the sum is the largest of all
        # these sums, and each of them must fit.
        in_time = (
            (time - (k - m) * shortest) * (eta - 1) / eta / (1 - Fraction(1, eta**m))
            for m in range(1 if shortest else k, k + 1)
        )
        end = min(Fraction(eta**k), cost / k, *in_time)
        if end <= eta ** (k - 1):  # the piece is open there
            break
        R, K = end, k
    return R, K


def _largest(holds: Callable[[int], bool], n: int) -> int:
    # The largest number for which it holds, if it does for n; above some number it never holds.
    step = 1
    while holds(n + step):
        step *= 2
    return n + bisect_left(range(n + 1, n + step), True, key=lambda m: not holds(m))
