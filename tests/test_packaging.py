"""What a wheel would hold, and what an import costs."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_packages_list_is_the_tree() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"dagsel": "dagsel", "dagsel.flows": "flows", "dagsel.storage": "storage"}
    for name, folder in list(found.items()):
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder)
            if inner.parts and not any((ROOT / folder / part).is_symlink() for part in inner.parts):
                found[".".join([name, *inner.parts])] = str(init.parent.relative_to(ROOT))
    assert set(config["packages"]) == set(found)
    assert all(found[name] == folder for name, folder in config["package-dir"].items())


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("dagsel", ["torch", "distributed", "zarr", "optuna"]),
        ("dagsel.storage", ["torch", "dask", "optuna"]),
        ("dagsel.flows", ["torch", "dask", "optuna", "zarr"]),
        ("dagsel.dispatch.dispatcher", ["torch", "dask", "optuna", "zarr"]),
        ("dagsel.execution.scheduler_plugin", ["torch", "optuna"]),
        ("dagsel.run", ["torch", "sklearn"]),
    ],
)
def test_an_import_stays_light(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print(*sorted(set({absent}) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_what_is_exported() -> None:
    import dagsel

    assert dagsel.__all__ == [
        "Attached",
        "Base",
        "FlaxWorkload",
        "HFWorkload",
        "KerasWorkload",
        "LightningWorkload",
        "Profile",
        "Run",
        "Search",
        "SklearnWorkload",
        "TorchWorkload",
        "Workers",
        "Workload",
        "abandon",
        "attach",
        "collate",
        "load",
        "metrics",
        "optimize",
        "preview",
        "profile",
        "replay",
        "resume",
        "set_verbosity",
        "simulate",
        "start",
    ]
    for name in dagsel.__all__:
        assert getattr(dagsel, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = dagsel.optimise


@pytest.mark.parametrize("name", ["dagsel", "dagsel.testing", "dagsel.workloads"])
def test_what_is_imported_when_it_is_asked_for_is_listed_and_nothing_else_is_there(
    name: str,
) -> None:
    package = importlib.import_module(name)
    assert {*package.__all__} <= {*dir(package)}
    with pytest.raises(AttributeError, match="nobody"):
        _ = package.nobody


def test_a_module_comes_when_it_is_asked_for() -> None:
    program = "import dagsel; print(dagsel.flows.ASHA.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.split() == [b"ASHA"]


def test_a_script_beside_a_folder_that_is_called_dagsel_finds_the_package(tmp_path: Path) -> None:
    """As a clone is called, in whose environment somebody's own script runs."""
    (tmp_path / "dagsel").mkdir()
    script = tmp_path / "own.py"
    script.write_text("import dagsel; print(dagsel.__file__)")
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert found.stdout.strip().endswith("__init__.py"), found.stdout
