"""Mutants that are the same program: file, text of the line, mutation, and why."""

SAME: tuple[tuple[str, str, str, str], ...] = (
    (
        "planning/scaling.py",
        "if x[0] > 0 and np.all(x >= 0) and residual < best[0]:",
        "residual < best[0]  ->  (residual <= best[0])",
        "the columns are independent: two supports with one residual have one and the same x",
    ),
    (
        "dispatch/dispatch_state.py",
        "best = (-inf, False)",
        "False  ->  True",
        "a priority is a finite number: the first one is greater than minus infinity",
    ),
    (
        "dispatch/dispatcher.py",
        "self.list_scheduler.rem[chain.trial] = 0.0",
        "0.0  ->  1.0",
        "the same call counts anew what remains, and puts the trial in its place again",
    ),
    (
        "flows/baselines/fifo.py",
        "migrate: bool = field(default=False, init=False, repr=False)",
        "False  ->  True",
        "with one trial a worker and turns to the end, none that could move is left over",
    ),
    (
        "flows/hypersched.py",
        "is_paused: bool = False  # in a pause of all",
        "False  ->  True",
        "the first Train says False; until then the gang is 0, which is asked first",
    ),
    (
        "flows/hypersched.py",
        "n_workers: int = field(init=False, repr=False, compare=False)",
        "False  ->  True",
        "compare: it follows from the deadline and the budget, which are compared",
    ),
    (
        "dispatch/list_scheduler.py",
        "top_pressure = max(pressure.values(), default=0.0) or 1.0",
        "1.0  ->  2",
        "it counts where all pressures are 0: 0 is 0 in any unit",
    ),
    (
        "dispatch/remaining_work.py",
        "scheduler.speed[worker] = 1.0 / times.pace[worker]",
        "1.0  ->  2",
        "only ratios of speeds are used, and all are counted at once",
    ),
    (
        "dispatch/remaining_work.py",
        "everything = (1 << len(effort)) - 1",
        "1  ->  0",
        "a shortcut is not taken: the same sum is made shard by shard",
    ),
    (
        "dispatch/shard_moves.py",
        "self._holders_changed = True",
        "True  ->  False",
        "a loaded shard makes none missing; a refusal and a missing shard are looked at anyway",
    ),
    (
        "driver/trial_limits.py",
        "self._numbers[trial] = self._numbers.get(trial, 0) + 1",
        "1  ->  2",
        "a number has to be one that was not given before, no more",
    ),
    (
        "storage/datasets/sources.py",
        "own = (own,) * math.ceil(length / max(1, own)) if own > 1 else ()",
        "1  ->  2",
        "the divisor: own is 2 or more there",
    ),
    (
        "storage/datasets/sources.py",
        "if len(blocks) == 1:",
        "1  ->  0",
        "a shortcut is not taken: one block joined with none is itself",
    ),
    (
        "history/plan_differences.py",
        "n, at, later = wanted - asked.n_workers, asked.seconds, moments[index + 1 :]",
        "1  ->  0",
        "the moment itself has too few: it is neither when they came, nor the most of them",
    ),
    (
        "driver/recovery.py",
        "return index + 1",
        "1  ->  0",
        "the entry itself is a kept state, which is put to no flow",
    ),
)
