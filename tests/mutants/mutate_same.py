"""Mutants that are the same program: file, text of the line, mutation, and why."""

SAME: tuple[tuple[str, str, str, str], ...] = (
    (
        "planning/scaling.py",
        "if x[0] > 0 and np.all(x >= 0) and residual < best[0]:",
        "residual < best[0]  ->  (residual <= best[0])",
        "the columns are independent: two supports with one residual have one and the same x",
    ),
)
