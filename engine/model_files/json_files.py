"""Reads the JSON files of a model: checked values, and one-line errors that name the file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar

from ..protocol.errors import EngineError, ModelLoadError
from ..protocol.json_text import parse_json

ConfigT = TypeVar("ConfigT")
logger = logging.getLogger("penstock.engine")

LFS_HINT: Final = "is a Git LFS pointer, not the file itself; run `git lfs pull` in the model's folder"
_LFS_START: Final = b"version https://git-lfs.github.com/spec/"
_MAX_SHOWN: Final = 400
# Errors caused by values of a wrong type or an absurd size.
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

# Errors caused by the files, unlike a full disk or too many open files.
_FILE_ERRORS: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_TYPES: Final[dict[str, type]] = {"bool": bool, "dict": dict, "list": list, "str": str}
_NAMES: Final[dict[type, str]] = {bool: "true or false", dict: "an object", list: "a list", str: "a text"}
_POSITIVE: Final = frozenset(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "state_size", "conv_kernel", "expand"),
        *("num_heads", "n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_n_heads", "mamba_n_groups"),
        *(
            "mamba_d_head",
            "mamba_dt_rank",
            "time_step_rank",
            "num_experts_per_tok",
            "num_experts",
            "expert_layer_period",
            "attn_layer_period",
        ),
        *("sliding_window_pattern", "local_attention", "global_attn_every_n_layers", "relative_attention_num_buckets"),
    )
)
"""Sizes that must be at least 1."""
_MOST: Final = 2**31 - 1


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; None if the file does not exist.

    Raises:
        ModelLoadError: The file cannot be read, is a Git LFS pointer, holds null, or is not JSON within bounds; see
            parse_json.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(_LFS_START.decode()):
            raise ModelLoadError(f"{path} {LFS_HINT}.")
        value = parse_json(text)
    except FileNotFoundError:
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
    """Returns the JSON object in a file; an empty one if the file does not exist.

    Raises:
        ModelLoadError: The file is not valid JSON or holds something else.
    """
    value = read_json(path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def read_config(cls: type[ConfigT], values: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> ConfigT:
    """Returns the dataclass filled from config.json. Missing keys keep the defaults of transformers.

    A null is None if the field may be None, and the default otherwise.

    Args:
        cls: The dataclass.
        values: config.json.
        keys: Field name to the family's key; other fields keep their defaults. None: keys equal the field names.

    Raises:
        ModelLoadError: A value has a wrong type, or is a size that no model can have.
    """
    given = {}
    for field in fields(cls):  # type: ignore[arg-type]
        kinds = [kind.partition("[")[0].strip() for kind in str(field.type).split("|")]
        key = field.name if keys is None else keys.get(field.name)
        if key is not None and key in values and ("None" in kinds or values[key] is not None):
            given[field.name] = _checked(key, values[key], field.name, kinds)
    return cls(**given)


def _checked(key: str, value: Any, name: str, kinds: Sequence[str]) -> Any:
    """Checks a value of config.json against the type of its field. Fields of type Any are not checked."""
    if value is None:
        return value
    is_word = isinstance(value, str) and "str" in kinds
    if not is_word and ("int" in kinds or "float" in kinds):
        type_, wanted, most = (int | float, "a number", 1e30) if "float" in kinds else (int, "an integer", _MOST)
        least = 1 if name in _POSITIVE else -most
        is_number = isinstance(value, type_) and not isinstance(value, bool)
        if not is_number or not least <= float(value) <= most:
            raise ModelLoadError(f"config.json: {key} is {value!r}; it must be {wanted} from {least} to {most}.")
        return value
    types = [_TYPES[kind] for kind in kinds if kind in _TYPES]
    if types and not isinstance(value, tuple(types)):
        wanted = " or ".join(_NAMES[kind] for kind in types)
        raise ModelLoadError(f"config.json: {key} is {value!r}; it must be {wanted}.")
    return value


@contextmanager
def as_load_error(found: str) -> Iterator[None]:
    """Converts unexpected errors caused by broken files to a ModelLoadError of one line.

    Args:
        found: The failed action, with the file or folder at fault.

    Raises:
        ModelLoadError: See above; --log-level debug shows its origin.
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
            f"{found} ({type(error).__name__}: {one_line(error)}): a value there is damaged or of the wrong kind; "
            "download the model again, or see --log-level debug for the place."
        ) from error


def one_line(error: BaseException) -> str:
    """Returns the message of an error as part of one line, shortened if it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " ..."
