"""Runs programs of pages and examples: as a user does, or in this process."""

from __future__ import annotations

import copy
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import dask.config
import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
#: A dashboard of somebody else on this machine is no fault of a page.
PORT_TAKEN = "ignore:Port 8787 is already in use:UserWarning"
#: Whether NumPy computes as where the pages were written, with AVX-512. Elsewhere the last bits
#: of its functions differ, so that Optuna's sampler may draw other configurations.
HAS_NUMBERS_OF_PAGES = bool(
    {"X86_V4", "AVX512_SKX"} & {*np.show_config(mode="dicts")["SIMD Extensions"]["found"]}
)


def run(*command: str, folder: Path) -> str:
    """Run a command as a user does, in a folder of its own; any warning is an error."""
    temporary = folder / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", PORT_TAKEN, *command],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(program: Path, *arguments: str, folder: Path) -> None:
    """Run a program in this process, which has imported already what takes most of its time.

    What it says to Dask and PyTorch for all that follows is forgotten afterwards.
    """
    said, n_threads = copy.deepcopy(dask.config.config), torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(tempfile, "tempdir", str(folder))
            patch.setattr(sys, "argv", [str(program), *arguments])
            runpy.run_path(str(program), run_name="__main__")
    finally:
        torch.set_num_threads(n_threads)
        dask.config.config.clear()
        dask.config.config.update(said)
