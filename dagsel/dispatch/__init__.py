"""The dispatcher: which worker trains which trial on which shard, and when.

Pure: events in, instructions out. No Dask, no clock, no files; it imports nothing of dagsel but
`dagsel.errors`. Dask's scheduler (`dagsel.execution.scheduler_plugin`) and the simulator
(`dagsel.simulation.virtual_cluster`) drive the same objects.

- `units`, `events`: what there is to do; what the dispatcher is told, and what it answers.
- `dispatcher`: the state machine; `dispatch_state`: what it knows, made of `trials` and `workers`;
  `invariants`: what holds at every moment.
- `list_scheduler`: the rule that picks a free worker's next unit; `remaining_work`, `unit_times`:
  what the rule is fed with; `assignment`: which worker is asked when; `gangs`: units on several
  workers.
- `placement`: which worker holds which shards; `shard_moves`: how they get there; `downscaling`:
  which workers to release.
- `interventions`: strikes, time limits, pauses.
"""
