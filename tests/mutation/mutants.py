"""Files with one wrong change each: all that there are of a room, and a sample that the seed alone decides."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from operators import OPERATORS, Edit
from sites import sites_of


class Key(NamedTuple):
    """What names a wrong change as long as its line stays as it is, wherever the line moves to in its function.

    Attributes:
        file: Path from the root of the checkout.
        place: Dotted name of the function or class around it; "" at the top of a module.
        operator: Kind of the mistake.
        before: The changed lines, as one.
        after: What they have become.
        number: Which of those that read alike in that place, from 1.
    """

    file: str
    place: str
    operator: str
    before: str
    after: str
    number: int = 1


@dataclass(frozen=True)
class Mutant:
    """A file with one wrong change.

    Attributes:
        id: Eight hexadecimal digits that stay the same from run to run; the name of a known change.
        key: What was changed.
        line: Number of the first changed line.
        text: The whole file as it is then.
    """

    id: str
    key: Key
    line: int
    text: str


def mutants_of(root: Path, room: str) -> list[Mutant]:
    """Returns every wrong change to the files of a room (a folder, or one file), in the order of the text."""
    path = root / room
    if not path.exists():
        raise SystemExit(f"--rooms: there is no {room} in {root}")
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [mutant for file in files for mutant in _of_file(root, file)]


def sample(mutants: Iterable[Mutant], count: int | None, seed: str) -> list[Mutant]:
    """Draws `count` of them (all where it is None).

    Each has a rank of its own, which the seed and its id decide: a change to one line does not shuffle the rest.
    """
    listed = list(mutants)
    ranked = sorted(listed, key=lambda mutant: sha256(f"{seed} {mutant.id}".encode()).digest())
    chosen = {mutant.id for mutant in ranked[:count]}
    return [mutant for mutant in listed if mutant.id in chosen]


class Judged:
    """Wrong changes that change nothing, each with its reason: `[[equivalent]]` tables of a TOML file.

    Args:
        file: Where they are listed.
    """

    def __init__(self, file: Path) -> None:
        entries = tomllib.loads(file.read_text())["equivalent"]
        self._keys = {Key(**{name: entry[name] for name in Key._fields if name in entry}) for entry in entries}
        if without := [entry for entry in entries if not entry["reason"].strip()]:
            raise SystemExit(f"{file}: an entry without a reason: {without[0]}")

    def __contains__(self, mutant: Mutant) -> bool:
        return mutant.key in self._keys

    def gone_from(self, mutants: Iterable[Mutant]) -> list[Key]:
        """Returns the entries in the files of these mutants that name none of them any more."""
        keys = {mutant.key for mutant in mutants}
        files = {key.file for key in keys}
        return sorted(key for key in self._keys - keys if key.file in files)


def known_changes(root: Path, file: Path) -> tuple[list[Mutant], list[str]]:
    """Reads the `[[change]]` tables of a TOML file: changes by hand, each a text that is replaced by another.

    Returns:
        The mutants, and the names of the changes whose old text is not there, or not just once.
    """
    mutants: list[Mutant] = []
    gone: list[str] = []
    for change in tomllib.loads(file.read_text())["change"]:
        path = root / change["file"]
        text = path.read_text() if path.exists() else ""
        if text.count(change["old"]) != 1:
            gone.append(f"{change['name']} ({change['file']})")
            continue
        line = text[: text.index(change["old"])].count("\n") + 1
        key = Key(change["file"], "", "known", _as_line(change["old"]), _as_line(change["new"]))
        changed = text.replace(change["old"], change["new"])
        ast.parse(changed)
        mutants.append(Mutant(change["name"], key, line, changed))
    return mutants, gone


def _of_file(root: Path, path: Path) -> list[Mutant]:
    text, file = path.read_text(), path.relative_to(root).as_posix()
    data = text.encode()
    mutants: list[Mutant] = []
    texts: set[str] = {text}
    seen: Counter[Key] = Counter()
    for place, site in sites_of(text):
        for edit in (edit for operator in OPERATORS for edit in operator(site)):
            changed = (data[: edit.start] + edit.text.encode() + data[edit.end :]).decode()
            if changed in texts or not _parses(changed):
                continue
            texts.add(changed)
            key = Key(file, place, edit.operator, *_lines(data, edit))
            seen[key] += 1
            key = key._replace(number=seen[key])
            mutants.append(Mutant(_id(key), key, data[: edit.start].count(b"\n") + 1, changed))
    return sorted(mutants, key=lambda mutant: mutant.line)


def _lines(data: bytes, edit: Edit) -> tuple[str, str]:
    """Returns the lines that an edit touches, before and after."""
    start = data.rfind(b"\n", 0, edit.start) + 1
    end = data.find(b"\n", edit.end)
    end = len(data) if end < 0 else end
    after = data[start : edit.start].decode() + edit.text + data[edit.end : end].decode()
    return _as_line(data[start:end].decode()), _as_line(after)


def _as_line(text: str) -> str:
    return " ".join(text.split())


def _id(key: Key) -> str:
    return sha256("\0".join(map(str, key)).encode()).hexdigest()[:8]


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
