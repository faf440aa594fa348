"""A search under faults of every kind ends as it does when nothing happens, bit for bit.

Here five seeds, each kind of fault among them; ``make chaos`` runs fifty and writes docs/chaos.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import chaos
import pytest

N_SEEDS = int(os.environ.get("CHAOS_SEEDS", "5"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(N_SEEDS))
def test_chaos(seed: int, tmp_path: Path) -> None:
    outcome = chaos.run_seed(seed, str(tmp_path))
    print(chaos.row(outcome))
    assert outcome.wrong == []
    assert outcome.done.total() > 0
