"""The dispatcher: which worker trains which trial on which shard, and when.

Pure: events in, instructions out. No Dask, no clock, no files. A plugin in Dask's scheduler
(`dagsel.execution.scheduler_plugin`) and the simulator (`dagsel.simulation.virtual_cluster`) drive
the same `dispatcher.Dispatcher`. In reading order:

- `units`: what there is to do; `events`: what the dispatcher is told, and what it answers.
- `dispatcher`: updates the state by each event, then decides.
- `dispatch_state`: the configuration and the state, with its `trials` and `workers`; `invariants`:
  what always holds.
- `assignment`: which workers are offered a unit, and when; `list_scheduler`: which trial they take;
  `remaining_work` and `unit_times`: the estimates for it; `gangs`: units on several workers.
- `placement`: which worker should hold which shards; `shard_moves`: how they get there;
  `downscaling`: which workers to release.
- `rests`: trials that may train for a limited time; `strikes`: units under which workers die, or
  that take too long; `suspicion`: whether they are the cause.
"""
