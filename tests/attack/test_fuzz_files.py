"""A damaged file is healed, or refused by an error of dagsel's, or changes nothing."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attacked
import numpy as np
import pytest
import searches
from damages import Damage, damage
from distributed import Client, LocalCluster

import dagsel
from dagsel.errors import DagselError
from dagsel.storage import ShardedDataset

# A busy machine makes these units of milliseconds longer, which is not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:a batch of trial")
N_CASES = int(os.environ.get("ATTACK_CASES", "32"))
SEED = int(os.environ.get("ATTACK_SEED", "0"))
#: By name of the run: what it trains, and after how many writes to its journal it was interrupted.
RUNS: dict[str, tuple[str, int | None]] = {
    "torch": ("torch", None),
    "torch-7": ("torch", 7),
    "torch-14": ("torch", 14),
    "torch-34": ("torch", 34),
    "sklearn": ("sklearn", None),
    "sklearn-21": ("sklearn", 21),
    "synthetic-20": ("synthetic", 20),
    "synthetic-50": ("synthetic", 50),
    "pbt-95": ("pbt", 95),
    "hermes-36": ("hermes", 36),
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    options: dict[str, Any] = {"processes": False, "n_workers": 1, "threads_per_worker": 1}
    with LocalCluster(**options, dashboard_address=":0") as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacked")


@pytest.fixture(scope="module")
def data(home: Path) -> ShardedDataset:
    return attacked.write_data(home / "data.zarr")


@pytest.fixture(scope="module", params=RUNS)
def run(
    request: pytest.FixtureRequest, home: Path, data: ShardedDataset, client: Client
) -> tuple[str, Path, attacked.Outcome]:
    """Make a run; return what it trains, its folder, and what it comes to undisturbed."""
    kind, n_records = RUNS[request.param]
    folder, whole = home / request.param, home / f"{request.param}-undisturbed"
    attacked.begin(kind, data, folder, client, n_records)
    shutil.copytree(folder, whole)
    return kind, folder, attacked.go_on(kind, data, whole, client)


def judge(
    seed: str, run: tuple[str, Path, attacked.Outcome], data: Any, client: Any, place: Path
) -> str:
    """Damage a copy of a run and go on with it; say what is wrong, if anything is."""
    kind, folder, undisturbed = run
    chance = random.Random(seed)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place / "run")
    done: Damage = damage(place / "run", chance)
    outcome: Any = None
    home = folder.parent
    before = attacked.contents(home)
    try:
        with attacked.no_hang():
            if chance.random() < 0.85:
                outcome = attacked.go_on(kind, data, place / "run", client)
                is_same = outcome == undisturbed
                if kind in ("pbt", "hermes"):  # another order of events, another search
                    notes = attacked.repeat(kind, data, place / "run", place / "again", client)
                    # A trial that went on from another one's state cannot be made again.
                    lost = ("CheckpointCorruptError: none of its", "the state of trial")
                    is_same = not notes and all(r.startswith(lost) for r in outcome.failures)
            else:
                notes = attacked.repeat(kind, data, place / "run", place / "again", client)
                outcome, is_same = notes, not notes
    except DagselError as error:
        verdict = "" if str(error) else "an error without words"
    except Exception as error:
        verdict = f"{type(error).__name__}: {error}"[:400]
    else:
        verdict = "" if is_same or done.is_forged else f"another result in silence: {outcome}"[:600]
    if attacked.contents(home) != before:
        verdict += " a file outside was touched"
    return f"{seed}: {done}: {verdict}" if verdict else ""


def test_a_damaged_run(
    run: tuple[str, Path, attacked.Outcome], data: ShardedDataset, client: Client, tmp_path: Path
) -> None:
    wrong = []
    for number in range(-(-N_CASES // len(RUNS))):
        seed = f"{run[1].name} {SEED + number}"
        found = judge(seed, run, data, client, tmp_path / "case")
        wrong += [found] if found else []
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="run.json names bytecode of 3.11")
@pytest.mark.parametrize("name", ["asha-killed", "pbt-killed", "hermes-killed", "torch-ended"])
def test_a_damaged_run_of_an_earlier_format(name: str, client: Client, tmp_path: Path) -> None:
    """Less of it is bound by checksums; even so, no other error comes out of it."""
    old = Path(searches.__file__).parent
    workload, _, _, _ = searches.SEARCHES[name]
    parts: dict[str, Any] = {"workload": workload(), "space": searches.space}
    wrong = []
    for number in range(-(-N_CASES // 16)):
        seed, place = f"{name} {SEED + number}", tmp_path / "case"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(old / name, place)
        done = damage(place, random.Random(seed))
        try:
            with attacked.no_hang():
                run = dagsel.resume(str(place), client, **parts, data=str(old / "data"))
                run.best_model()
        except DagselError:
            pass
        except Exception as error:
            wrong.append(f"{seed}: {done}: {type(error).__name__}: {error}"[:400])
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])


def test_a_damaged_data_set(data: ShardedDataset, home: Path, tmp_path: Path) -> None:
    whole = attacked.read_data(home / "data.zarr")
    wrong = []
    for number in range(N_CASES):
        place = tmp_path / "case"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(home / "data.zarr", place)
        done = damage(place, random.Random(f"data {SEED + number}"))
        before = attacked.contents(tmp_path)
        try:
            with attacked.no_hang():
                read = attacked.read_data(place)
                np.testing.assert_equal(read, whole)
                ShardedDataset.open(place).verify()
        except DagselError as error:
            if str(place) not in str(error):
                wrong.append(f"{number}: {done}: {error!r} does not say where")
        except (Exception, AssertionError) as error:
            wrong.append(f"{number}: {done}: {type(error).__name__}: {error}"[:400])
        assert attacked.contents(tmp_path) == before
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
