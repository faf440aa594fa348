"""Where and when each unit runs: pure, without Dask, a clock or I/O.

- `rounds`, `events`: what there is to do; what the dispatcher is told, and what it asks for.
- `dispatch`: the dispatcher, on its state (`board`, `ledger`, `holdings`, `accounting`), with the
  laws that hold at every moment (`invariants`).
- `rule`: which unit a free worker gets, on-line and in virtual time.
- `costs`, `placement`: how long units take; which worker holds which shards.
- `bounds`, `open_shop`, `exact`: what no schedule can beat; plans to compare with.
- `virtual`: a model cluster that drives a dispatcher.
"""
