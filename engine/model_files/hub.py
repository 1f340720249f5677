"""Finds the folder of a model: a local folder, or a snapshot from the Hugging Face hub or its cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ..protocol.errors import ModelLoadError
from .adapters import no_model_error

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DESCRIPTION_FILES: Final = ("config.json", "modules.json")
_ALLOW: Final = (
    *("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"),
    *("artifact.metadata", "sparse_linear.pt", "colbert_linear.pt"),
)
_IGNORE: Final = ("onnx/*", "openvino/*", "original/*", "consolidated*", "*.onnx.json", "*.tflite")
_WITHOUT_WEIGHTS: Final = ("_Pooling", "_Normalize", "_Dropout")


def locate_model(name: str, revision: str | None = None) -> Path:
    """Returns the local folder of a model. Downloads it from the hub if it is neither a folder nor cached.

    Works offline when the files are in the hub's cache. Of a hub repository only JSON, tokenizer files, templates, code
    (never run unless trust_remote_code is on) and weights are fetched; `.bin` weights only for want of safetensors.

    Args:
        name: Local folder or hub id, such as "sentence-transformers/all-MiniLM-L6-v2".
        revision: Branch, tag or commit of a hub id; None takes the default branch.

    Raises:
        ModelLoadError: No such folder (see is_local) or repository, or a folder without model files; the message says
            what was tried.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / file).is_file() for file in _DESCRIPTION_FILES):
            message = f"The folder {folder} is not a model: it holds neither config.json nor modules.json."
            raise no_model_error(folder, message)
        return folder.resolve()
    if folder.exists():
        raise ModelLoadError(f"{folder} is a file; a model is a folder with config.json, or a hub id.")
    if is_local(name, revision) and _HUB_ID.fullmatch(name):
        raise ModelLoadError(
            f"There is no folder {folder.name!r} in the folder {str(folder.parent)!r}. To load the hub repository "
            f"{name!r}, give --revision main, or run the command in another folder."
        )
    if not _HUB_ID.fullmatch(name):
        raise ModelLoadError(f"There is no folder {str(folder)!r}, and {name!r} is not a hub id (owner/name).")
    return _fetch(name, revision)


def is_local(name: str, revision: str | None = None) -> bool:
    """Whether a name means a local folder, which may not exist, and not a repository of the hub.

    A name such as "a/b" means the hub, unless it exists, or the folder "a" exists and no revision is given.
    """
    folder = Path(name).expanduser()
    if _HUB_ID.fullmatch(name) is None or folder.exists():
        return True
    return "/" in name and revision is None and folder.parent.is_dir()


def _fetch(name: str, revision: str | None) -> Path:
    """Returns the snapshot folder of a hub id."""
    from huggingface_hub import constants, snapshot_download

    where = f"{name!r}" if revision is None else f"{name!r} at revision {revision!r}"
    try:
        path = Path(
            snapshot_download(name, revision=revision, allow_patterns=list(_ALLOW), ignore_patterns=list(_IGNORE))
        )
        if not any((path / file).is_file() for file in _DESCRIPTION_FILES):
            message = f"The hub repository {where} is not a model: it holds neither config.json nor modules.json."
            raise no_model_error(path, message)
        if bin_files := _missing_weights(path):
            snapshot_download(name, revision=revision, allow_patterns=bin_files)
    except Exception as error:
        # huggingface_hub lets errors of its HTTP library through, and that library differs by version.
        raise ModelLoadError(
            f"The model {where} could not be loaded. Tried the folder {str(Path(name).absolute())!r}, the hub and its "
            f"local cache in {constants.HF_HUB_CACHE!r}: {_first_line(error)}"
        ) from error
    return path


def _missing_weights(path: Path) -> list[str]:
    """Patterns of the `.bin` weights of those folders (the model and its modules) that hold no safetensors."""
    folders = sorted({file.parent for file in path.glob("**/config.json")})
    bare = [folder.relative_to(path) for folder in folders if not any(folder.glob("*.safetensors"))]
    return [(folder / "pytorch_model*.bin").as_posix() for folder in bare if not folder.name.endswith(_WITHOUT_WEIGHTS)]


def _first_line(error: Exception) -> str:
    """The first line of an error's text, or its class name; without the "Got: " that huggingface_hub begins with."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
