"""Deep-learning model selection on Dask: the data stays on the workers, the models hop."""

from __future__ import annotations

__version__ = "0.1.0"
