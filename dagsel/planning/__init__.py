"""Arithmetic for search procedures; pure.

- `budget`, `bill`: what a run may cost and what it has cost; `prices`, `pools`: of which workers,
  and `hiring`: which of them are started. `brackets`: stages and widths of elastic search.
- `scaling`: how many times faster a gang trains; `small_population`: gangs for few trials.
"""
