"""Everything that speaks Dask, and nothing else does.

- `engine`: the driver's side; sends rounds as graphs (`graph`) and hears what became of them.
- `scheduler_plugin`: the dispatcher inside Dask's scheduler.
- `worker_plugin`: a worker's side; `unit_runner` trains units, `state_cache` keeps states in
  memory, `process` sets up the process, `sigterm` stores the running unit before the worker ends.
- `run_spec`: what every worker of a run is given; what these tell each other is in
  `dagsel.messages`. `copies`: states that nobody needs any more. `compatibility`: versions that
  fit together.
- `cluster`, `elastic`: the cluster of a run, and how it grows and shrinks.
- `timing`: measuring for `dagsel.profile`.
"""
