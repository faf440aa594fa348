"""Damages to a folder of files: what disks, copies and editors do to it. Seeded, so repeatable."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

HUGE = (10**400, -(10**19), 1e308, float("nan"), float("inf"))


@dataclass(frozen=True)
class Damage:
    """What was done."""

    name: str
    files: tuple[str, ...]
    detail: str = ""
    # Whether checksums were made to fit again: whoever does that has written another run.
    is_forged: bool = False

    def __str__(self) -> str:
        return f"{self.name} {' '.join(self.files)} {self.detail}"


def damage(folder: Path, chance: random.Random) -> Damage:
    """Damage one thing in a folder."""
    while True:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        # A kind of file first: of some there are many.
        kinds = sorted({_kind(path) for path in files})
        kind = chance.choice(kinds)
        path = chance.choice([path for path in files if _kind(path) == kind])
        act = chance.choice(ACTS)
        done = act(folder, path, chance)
        if done is not None:
            return done


def _kind(path: Path) -> str:
    return path.name if path.name in SINGLE else path.suffix


SINGLE = {"run.json", "best.json", "dagsel.json", "zarr.json", "journal.jsonl"}
Act = Callable[[Path, Path, random.Random], Damage | None]


def _done(name: str, folder: Path, *paths: Path, detail: str = "", forged: bool = False) -> Damage:
    return Damage(name, tuple(str(path.relative_to(folder)) for path in paths), detail, forged)


def flip(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    data = bytearray(path.read_bytes())
    if not data:
        return None
    places = [chance.randrange(len(data)) for _ in range(chance.choice((1, 1, 1, 2, 9)))]
    for place in places:
        data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return _done("flip", folder, path, detail=str(places))


def truncate(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    data = path.read_bytes()
    if not data:
        return None
    n_left = chance.choice((0, len(data) - 1, chance.randrange(len(data))))
    path.write_bytes(data[:n_left])
    return _done("truncate", folder, path, detail=f"{n_left} of {len(data)}")


def cut_lines(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    """Cut whole lines off the end."""
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) < 2:
        return None
    n_left = chance.randrange(len(lines))
    path.write_bytes(b"".join(lines[:n_left]))
    return _done("cut lines", folder, path, detail=f"{n_left} of {len(lines)}")


def blank(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    """Fill a part with zeros, as a power failure does."""
    data = bytearray(path.read_bytes())
    if not data:
        return None
    start = chance.randrange(len(data))
    stop = min(len(data), start + chance.choice((1, 16, 512, 1 << 20)))
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    return _done("blank", folder, path, detail=f"{start}:{stop} of {len(data)}")


def insert(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    data = path.read_bytes()
    place = chance.choice((0, len(data), chance.randrange(len(data) + 1)))
    more = chance.choice((b"\0", b"\n", b"{}\n", chance.randbytes(20), data[:50]))
    path.write_bytes(data[:place] + more + data[place:])
    return _done("insert", folder, path, detail=f"{more!r} at {place}")


def delete(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    if chance.random() < 0.3:
        path = path.parent
        if path == folder:
            return None
        shutil.rmtree(path)
    else:
        path.unlink()
    return _done("delete", folder, path)


def _like(folder: Path, path: Path, chance: random.Random) -> Path | None:
    others = sorted(
        other
        for other in folder.rglob(f"*{path.suffix}")
        if other.is_file() and other != path and other.read_bytes() != path.read_bytes()
    )
    return chance.choice(others) if others else None


def swap(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    other = _like(folder, path, chance)
    if other is None:
        return None
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)
    return _done("swap", folder, path, other)


def overwrite(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    other = _like(folder, path, chance)
    if other is None:
        return None
    shutil.copyfile(other, path)
    return _done("overwrite", folder, path, other)


def swap_folders(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    """Swap two folders side by side: the states of two trials, two shards."""
    one = path.parent
    while one != folder:
        others = sorted(o for o in one.parent.iterdir() if o.is_dir() and o != one)
        if others and chance.random() < 0.6:
            other, aside = chance.choice(others), folder / "aside"
            one.rename(aside)
            other.rename(one)
            aside.rename(other)
            return _done("swap folders", folder, one, other)
        one = one.parent
    return None


def duplicate(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    """Copy a file or its folder to the next number, or to another name."""
    source = path.parent if chance.random() < 0.5 and path.parent != folder else path
    digits = [place for place, letter in enumerate(source.name) if letter.isdigit()]
    if digits and chance.random() < 0.8:
        place = chance.choice(digits)
        number = (int(source.name[place]) + chance.choice((1, 3))) % 10
        name = f"{source.name[:place]}{number}{source.name[place + 1 :]}"
    else:
        name = f"{source.name}.copy"
    goal = source.with_name(name)
    if source.is_dir():
        shutil.copytree(source, goal, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, goal)
    return _done("duplicate", folder, source, goal)


def edit(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    """Edit the JSON of a file by hand; a journal's line keeps its checksum."""
    text = path.read_bytes()
    try:
        if path.name == "journal.jsonl":
            return _edit_line(folder, path, chance)
        body = json.loads(text)
    except ValueError:
        return None
    changed, detail = edited(body, chance)
    path.write_text(changed)
    return _done("edit", folder, path, detail=detail)


def _edit_line(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    lines = path.read_bytes().splitlines()
    number = chance.randrange(len(lines))
    body = json.loads(lines[number])
    changed, detail = edited(body["record"], chance)
    rest = f'"n":{body["n"]},"group":{json.dumps(body["group"])},"record":{changed}}}'.encode()
    is_forged = chance.random() < 0.7
    checksum = google_crc32c.value(rest) if is_forged else chance.randrange(2**32)
    lines[number] = b'{"crc32c":"%08x",%b' % (checksum, rest)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return _done("edit", folder, path, detail=f"line {number}: {detail}", forged=is_forged)


def edited(body: Any, chance: random.Random) -> tuple[str, str]:
    """Change one thing in JSON; return its text, and what was changed."""
    holder, key = chance.choice(list(_places({"all": body})))
    value = holder[key]
    where = f"{key!r} (was {str(value)[:40]})"
    if isinstance(holder, dict) and body is not holder and chance.random() < 0.2:
        del holder[key]
        return json.dumps(body), f"{where} removed"
    if isinstance(holder, dict) and chance.random() < 0.1:
        holder["odd"] = 1
        return json.dumps(body), "'odd' added"
    if isinstance(key, str) and chance.random() < 0.1:
        new = _changed(value, chance)
        text = json.dumps(body)
        first = text.find(f'"{key}":')
        if first >= 0:
            twice = f'{text[:first]}"{key}": {json.dumps(new)}, {text[first:]}'
            return twice, f"{where} twice, first as {str(new)[:40]}"
    if chance.random() < 0.1:
        mark = json.dumps(f"deep{chance.random()}")
        holder[key] = json.loads(mark)
        deep = chance.choice((50, 900, 100_000))
        return json.dumps(body).replace(mark, "[" * deep + "]" * deep), f"{where} {deep} deep"
    if chance.random() < 0.1:
        holder[key] = "digits" * 3
        n = chance.choice((25, 5000))
        return json.dumps(body).replace('"digitsdigitsdigits"', "9" * n), f"{where} of {n} digits"
    new = holder[key] = _changed(value, chance)
    return json.dumps(body), f"{where} is {str(new)[:60]}"


def _places(body: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    items = body.items() if isinstance(body, dict) else enumerate(body)
    for key, value in items:
        found.append((body, key))
        if isinstance(value, dict | list):
            found += _places(value)
    return found[1:] if "all" in body and len(found) > 1 else found


def _changed(value: Any, chance: random.Random) -> Any:
    other: tuple[Any, ...] = (None, True, 0, -1, "", "odd", [], {}, [[1]], *HUGE[1:])
    match value:
        case bool():
            near: tuple[Any, ...] = (not value,)
        case int():
            near = (value + 1, max(0, value - 1), value * 2, -value - 1)
        case float():
            near = (value * 2 + 1, -value, value + 1e-9)
        case str():
            near = (value[:-1], value + "x", value.swapcase() + " ", "../" + value)
        case list():
            near = (value[1:], value + value, value[::-1])
        case dict():
            near = (dict(list(value.items())[1:]), list(value.items()))
        case _:
            near = other
    return chance.choice(near if chance.random() < 0.5 else other)


def turn(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    """Make a folder of a file, or a file of a folder."""
    if chance.random() < 0.5 and path.parent != folder:
        path = path.parent
        shutil.rmtree(path)
        path.write_bytes(chance.choice((b"", b"{}\n")))
    else:
        path.unlink()
        path.mkdir()
        if chance.random() < 0.5:
            (path / "odd").write_bytes(b"{}")
    return _done("turn", folder, path)


PLANTED = (
    "lock.json",
    "best.json",
    "dagsel.unfinished.json",
    "journal/00000001.jsonl",
    "journal/00000009.jsonl",
    "journal.jsonl.1f0c9a3e.tmp",
    "states/trial-000000/epoch-000001-position-000000.json",
    "states/trial-000001/epoch-000001-position-000001.partial.json",
    "states/trial-000007/epoch-000001-position-000000.json",
    "states/trial-99999999999999999999/epoch-1-position-1.json",
    "states/trial-000000/check-000001.json",
    "states/notes.txt",
)


def plant(folder: Path, path: Path, chance: random.Random) -> Damage | None:
    """Add a file that was not there."""
    goal = folder / chance.choice(PLANTED)
    if goal.exists() or any(parent.is_file() for parent in goal.parents):
        return None
    goal.parent.mkdir(parents=True, exist_ok=True)
    text = chance.choice((b"", b"{}", b"[]", b"\x80\x04", path.read_bytes(), b"[" * 100_000))
    goal.write_bytes(text)
    return _done("plant", folder, goal, detail=str(text[:30]))


ACTS: tuple[Act, ...] = (
    flip, truncate, cut_lines, blank, insert, delete, swap, overwrite, swap_folders, duplicate,
    edit, edit, edit, turn, plant,
)  # fmt: skip
