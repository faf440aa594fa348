"""The driver: puts events to the flow, writes the journal, performs decisions.

It knows neither Dask nor a clock of its own. `protocols` says what it needs of the world: an
engine, a store of states, a journal. `dagsel.execution` and `dagsel.simulation` provide them.

- `runner`: one search, turn by turn.
- `clock`: deadline and budget over all sessions; `trial_limits`: gangs, time limits and pauses of
  trials; `idle_workers`: what becomes of workers when few trials are left.
- `recovery`: how a trial, and the flow, go on after an interruption.
"""
