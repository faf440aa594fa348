"""Arithmetic for search procedures; pure.

- `budget`: deadlines, budgets and bills; `brackets`: stages and widths of elastic search.
- `scaling`: how many times faster a gang trains; `small_population`: gangs for few trials.
"""
