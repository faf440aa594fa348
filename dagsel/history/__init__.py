"""What a run has done, folded from its journal, and what is made of it.

- `settings`: what the run was called with; `record`: all that happened; `trial`, `tally`: of one
  trial, of one epoch.
- `script`: a recorded run as a flow that decides the same again.
- `result`: what `dagsel.optimize` returns; `tables`: data frames; `makespans`: rounds against their
  lower bounds.
"""
