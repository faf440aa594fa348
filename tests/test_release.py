"""What is released fits together: one version, all extras, the deployment's files, the change log.

`release.py` beside this file builds and installs a release; here is what needs no network.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from distributed import Client
from packaging.requirements import Requirement
from traitlets.config import Config

import dagsel
from dagsel.cli import main as command_line
from dagsel.cli.doctor import _EXTRAS

from . import release
from .waiting import wait_until

ROOT = release.ROOT
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
#: Extras of those who work on dagsel, and not of those who search.
OURS = {"examples", "peers", "docs", "dev"}
KINDS = ["Added", "Changed", "Fixed", "Removed"]
#: conda-forge's names where they are others. Its package `dask` brings much more than PyPI's.
CONDA = {"dask": "dask-core", "torch": "pytorch"}
YAML = [*DEPLOY.rglob("*.yaml"), *(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]


def read_yaml(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def names(requirements: list[str]) -> list[str]:
    """Return what requirements name, with the extras of dagsel's own."""
    found = [Requirement(text) for text in requirements]
    return [
        r.name + (f"[{','.join(sorted(r.extras))}]" if r.name == "dagsel" else "") for r in found
    ]


# The version.


def test_the_version_is_written_once_and_told_everywhere() -> None:
    (citation,) = read_yaml(ROOT / "CITATION.cff")
    (recipe,) = read_yaml(DEPLOY / "conda/recipe.yaml")
    assert "version" not in PROJECT["project"]
    assert release.version() == dagsel.__version__ == citation["version"]
    assert recipe["context"]["version"] == dagsel.__version__
    told = [
        found
        for path in [*DEPLOY.rglob("Dockerfile*"), *DEPLOY.rglob("*.yaml"), DEPLOY / "README.md"]
        for found in re.findall(r"dagsel:([\d.]+\d)|tag: \"([\d.]+)\"", path.read_text())
    ]
    assert {"".join(found) for found in told} == {dagsel.__version__}


def test_the_change_log_is_by_version_and_by_kind() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## (.+)$", text, re.MULTILINE)
    (citation,) = read_yaml(ROOT / "CITATION.cff")
    assert heads[0] == "Unreleased"
    assert heads[1] == f"{dagsel.__version__} ({citation['date-released']})"
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.+)$", part, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds]


# Dependencies and extras.


def test_the_conda_recipe_has_the_same_dependencies() -> None:
    (recipe,) = read_yaml(DEPLOY / "conda/recipe.yaml")
    run = dict(line.split(" ", 1) for line in recipe["requirements"]["run"])
    python = PROJECT["project"]["requires-python"]
    assert run.pop("python").replace("${{ python_min }}", "3.11") == python
    wanted = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    specifiers = {CONDA.get(r.name, r.name): set(str(r.specifier).split(",")) for r in wanted}
    assert {name: set(pin.split(",")) for name, pin in run.items()} == specifiers
    (host,) = [line for line in recipe["requirements"]["host"] if line.startswith("setuptools")]
    assert [host.replace(" ", "")] == PROJECT["build-system"]["requires"]
    (script,) = PROJECT["project"]["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(script)]


def test_the_page_of_extras_has_all_and_what_they_bring() -> None:
    page = (ROOT / "docs/reference/extras.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| `[^`]+` \|$", page, re.MULTILINE))
    assert set(rows) == set(EXTRAS)
    for extra in set(EXTRAS) - {"dev"}:
        assert rows[extra].split(", ") == names(EXTRAS[extra]), extra
        assert re.search(rf'`pip install "(dagsel|\.)\[{extra}\]"`', page), extra
    in_dev = {e for text in EXTRAS["dev"] for e in Requirement(text).extras if "dagsel[" in text}
    assert in_dev == set(EXTRAS) - OURS - {"cuda"} | {"docs"}


def test_the_doctor_looks_for_all_extras_of_a_search() -> None:
    # With a GPU it looks for dask-cuda by itself.
    assert {*_EXTRAS, "cuda"} == set(EXTRAS) - OURS


def test_the_constraints_meet_every_requirement() -> None:
    pins = release.pins(release.CONSTRAINTS.read_text())
    tested = [text for extra in EXTRAS.keys() - {"cuda"} for text in EXTRAS[extra]]
    for text in [*PROJECT["project"]["dependencies"], *tested]:
        wanted = Requirement(text)
        if wanted.name != "dagsel":
            _, pin = pins[re.sub(r"[-_.]+", "-", wanted.name).lower()]
            assert wanted.specifier.contains(pin), text
    assert not any(map(release.is_of_cuda, pins))


# Wheel and sdist.


def test_a_wheel_takes_all_files_of_the_packages() -> None:
    packages = PROJECT["tool"]["setuptools"]["packages"]
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for name in release.in_the_wheel(release.of_the_packages()):
        folder, _, file = name.rpartition("/")
        package = folder.replace("/", ".")
        assert package in packages, name
        assert file.endswith(".py") or any(fnmatch(file, p) for p in data[package]), name


def test_differences_between_an_archive_and_the_tree_are_named() -> None:
    wanted = {"a.py": b"1", "b.py": b"2", "c.py": b"3"}
    assert release.differences(wanted, wanted) == []
    found = {"a.py": b"1", "b.py": b"0", "d.py": b"4"}
    assert release.differences(found, wanted) == [
        "missing: c.py",
        "not expected: d.py",
        "changed: b.py",
    ]


def test_the_small_forms_are_of_examples_that_are_there() -> None:
    there = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert release.small_forms().keys() <= there
    assert "digits" in release.small_forms()


# Files that people and other programs read.


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_a_file_is_yaml(path: Path) -> None:
    assert all(isinstance(document, dict) for document in read_yaml(path))


def test_nothing_is_published_unless_the_owner_says_so() -> None:
    (workflow,) = read_yaml(ROOT / ".github/workflows/release.yml")
    publish = workflow["jobs"]["publish"]
    assert "vars.PUBLISH == 'yes'" in publish["if"]
    assert publish["needs"] == "check"
    assert workflow["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write"}


def test_what_a_workflow_or_a_form_calls_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for path in (ROOT / ".github").rglob("*.*ml"):
        text = path.read_text()
        for target in re.findall(r"\bmake ([\w-]+)", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (path, target)
        for command in re.findall(r"`dagsel (\w+)", text):
            assert command in command_line.commands, (path, command)
        for script in re.findall(r"run: (\.ci/\w+)", text):
            assert os.access(ROOT / script, os.X_OK)


def test_links_outside_the_pages_resolve() -> None:
    for path in (
        ROOT / "SECURITY.md",
        DEPLOY / "README.md",
        ROOT / ".github" / "pull_request_template.md",
    ):
        for link in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            assert "://" in link or (path.parent / link).exists(), (path, link)


def test_every_file_of_the_deployment_is_in_its_table() -> None:
    told = re.findall(r"^\| `([^`]+)` \|", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    there = [p.relative_to(DEPLOY).as_posix() for p in DEPLOY.rglob("*") if p.is_file()]
    assert {*told, "README.md"} == set(there)


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("Dockerfile*")), ids=lambda path: path.name)
def test_an_image_gets_what_its_file_asks_for(path: Path) -> None:
    text = path.read_text()
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    assert set(extras.split(",")) <= set(EXTRAS)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for source in ["pyproject.toml", *re.findall(r"^COPY ([\w.]+) /", text, re.MULTILINE)]:
        assert f"!{source}" in ignored
    for name in ("README.md", "LICENSE", *release.PACKAGES):
        assert f"!{name}" in ignored


def test_the_gateways_configuration_is_python_and_limits_agree() -> None:
    (values,) = read_yaml(DEPLOY / "gateway/values.yaml")
    config = Config()
    code = values["gateway"]["extraConfig"]
    for name in sorted(code):
        exec(compile(code[name], name, "exec"), {"c": config})
    assert "TRAIN=1" in config.KubeClusterConfig.worker_cmd
    options = config.Backend.cluster_options
    chosen = options.get_configuration(options.parse_options({"worker_cores": 8}), None)
    assert chosen["worker_cores"] == chosen["worker_cores_limit"] == 8
    assert chosen["worker_memory"] == chosen["worker_memory_limit"] == "16 G"
    assert set(chosen["environment"].values()) == {"8"}
    assert set(chosen["environment"]) == set(values["gateway"]["backend"]["environment"])


# The Kubernetes manifests, as processes of this machine.


def container(kind: str, name: str, file: str) -> dict[str, Any]:
    for document in read_yaml(DEPLOY / "kubernetes" / file):
        if (document["kind"], document["metadata"]["name"]) == (kind, name):
            (found,) = document["spec"]["template"]["spec"]["containers"]
            return dict(found)
    raise LookupError(name)


@contextmanager
def process(arguments: list[str], **environment: str) -> Iterator[None]:
    """Run what a container runs: its first word is a program of this environment."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    started = subprocess.Popen([sys.executable, "-m", *arguments], env=env)
    try:
        yield
    finally:
        started.terminate()
        started.wait(30)


@pytest.mark.alone
@pytest.mark.slow
def test_the_manifests_commands_make_a_cluster_and_its_search_goes_on(tmp_path: Path) -> None:
    scheduler = container("Deployment", "dagsel-scheduler", "cluster.yaml")
    worker = container("Deployment", "dagsel-worker", "cluster.yaml")
    about = tmp_path / "scheduler.json"
    ports = {"8786": "0", ":8787": ":0"}
    serve = [ports.get(word, word) for word in scheduler["args"]]
    given = {item["name"]: item["value"] for item in worker["env"] if "value" in item}
    (probe,) = scheduler["readinessProbe"].values()
    with ExitStack() as stack:
        stack.enter_context(
            process([*serve, "--scheduler-file", str(about), "--host", "127.0.0.1"])
        )
        wait_until(lambda: about.exists() and about.read_text(), "the scheduler")
        told = json.loads(about.read_text())
        port = told["services"]["dashboard"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{probe['path']}") as answer:
            assert answer.status == 200
        for pod in ("worker-a", "worker-b"):
            scratch = tmp_path / pod
            scratch.mkdir()
            pairs = {
                "tcp://dagsel-scheduler:8786": told["address"],
                "$(POD_NAME)": pod,
                "$(MEMORY_LIMIT)": str(2 * 10**9),
                "/scratch": str(scratch),
            }
            words = worker["args"]
            for before, after in pairs.items():
                assert any(before in word for word in words), before
                words = [word.replace(before, after) for word in words]
            stack.enter_context(process(words, **given))
        with Client(told["address"]) as client:
            client.wait_for_workers(2, timeout=60)
            threads = client.run(os.getenv, "OMP_NUM_THREADS")
            assert set(threads.values()) == {"4"}
            workers = client.run_on_scheduler(
                lambda dask_scheduler: [w.identity() for w in dask_scheduler.workers.values()]
            )
            assert {w["name"] for w in workers} == {"worker-a", "worker-b"}
            assert all(w["resources"] == {"TRAIN": 1} for w in workers)
        first, second = (search(tmp_path, told["address"]) for _ in range(2))
    assert first == second
    assert float(first.split()[0]) > 0.5


def search(folder: Path, address: str) -> str:
    """Run the program of search.yaml as its job does, and return what it prints."""
    job = container("Job", "dagsel-search", "search.yaml")
    (program,) = (d["data"] for d in read_yaml(DEPLOY / "kubernetes/search.yaml") if "data" in d)
    for name, text in program.items():
        (folder / name).write_text(text)
    assert job["args"] == ["python", "/program/search.py"]
    assert {item["name"] for item in job["env"]} == {"SCHEDULER", "RUN_DIR"}
    env = {"PYTHONPATH": str(ROOT), "SCHEDULER": address, "RUN_DIR": str(folder / "run")}
    done = subprocess.run(
        [sys.executable, folder / "search.py"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
