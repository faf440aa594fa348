"""A search that is extended by a driver which dies at a chosen moment."""

from __future__ import annotations

import sys
from typing import Any

import dagsel

#: What the search of that name is extended by.
MORE: dict[str, dict[str, Any]] = {
    "random search": {"n_trials": 2, "max_epochs": 4, "n_best": 3},
    "asha": {"n_trials": 3, "max_epochs": 6},
}

if __name__ == "__main__":
    flow, n_steps, scheduler, run_dir, storage = sys.argv[1:]
    from tests.execution import interrupted

    run = dagsel.load(
        run_dir,
        workload=interrupted.workload(),
        space=interrupted.space,
        study=interrupted.open_study(storage),
    )
    with interrupted.stopping_after(int(n_steps), interrupted.die):
        run.extend(scheduler, **MORE[flow])
