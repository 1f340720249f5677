"""Which quick tests may see a wrong change: those that mirror its file, then others that pass through its room."""

from __future__ import annotations

from pathlib import Path

ROOMS = ("engine/scheduling", "engine/pooling", "engine/client", "engine/core")
"""Changed where `--rooms` names none."""

_ENGINE = ("tests/engine/test_async_engine.py",)
_PROCESS = ("tests/engine/core/test_worker.py",)
_ROUTES = ("tests/server/routes", "tests/server/observability")
_OTHERS = {
    "engine/scheduling": ("tests/engine/core", "tests/engine/client", *_ENGINE),
    "engine/pooling": (
        "tests/engine/core",
        "tests/engine/tokenization",
        "tests/engine/executors/torch",
        *_ENGINE,
        *_ROUTES,
    ),
    "engine/client": (*_ENGINE, *_PROCESS, "tests/engine/protocol", "tests/engine/tokenization", *_ROUTES),
    "engine/core": (*_ENGINE, "tests/engine/scheduling", "tests/engine/executors/torch", *_ROUTES),
    "engine/tokenization": (*_ENGINE, "tests/engine/core", *_ROUTES),
    "engine/protocol": ("tests/engine/tokenization", "tests/engine/client", *_ENGINE, *_ROUTES),
    "kernels": ("tests/engine/pooling", "tests/engine/executors/torch", "tests/engine/core"),
    "server": ("tests/server",),
}


def is_in(room: str, file: str) -> bool:
    """Whether a file lies in a room; a room may be a file by itself."""
    return file == room or file.startswith(f"{room}/")


def mirror_tests(root: Path, file: str) -> list[str]:
    """Returns the test files that mirror a file: its own if it has one, then those of its folder."""
    folder = Path("tests", file).parent
    while not (root / folder).is_dir():
        folder = folder.parent
    own = f"test_{Path(file).stem.lstrip('_')}.py"
    return sorted(_files(root, folder.as_posix()), key=lambda test: (Path(test).name != own, test))


def other_tests(root: Path, file: str) -> list[str]:
    """Returns further test files that pass through a file's room, the likeliest first."""
    rooms = [room for room in _OTHERS if is_in(room, file)]
    mirrors = set(mirror_tests(root, file))
    listed = [test for room in rooms for place in _OTHERS[room] for test in _files(root, place)]
    return [test for test in dict.fromkeys(listed) if test not in mirrors]


def _files(root: Path, place: str) -> list[str]:
    path = root / place
    found = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    return [file.relative_to(root).as_posix() for file in found]
