"""Checks the values of config.json for a forward, and returns them as a dataclass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, TypeVar

from ..protocol.errors import ModelLoadError, UnsupportedModelError

ConfigT = TypeVar("ConfigT")
_TYPES: Final[dict[str, type]] = {"bool": bool, "dict": dict, "list": list, "str": str}
_NAMES: Final[dict[type, str]] = {bool: "true or false", dict: "an object", list: "a list", str: "a text"}
_POSITIVE: Final = frozenset(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "state_size", "conv_kernel", "expand"),
        *("num_heads", "n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_n_heads", "mamba_n_groups"),
        *("mamba_d_head", "mamba_dt_rank", "time_step_rank", "num_experts_per_tok", "num_experts"),
        *("expert_layer_period", "attn_layer_period"),
        *("sliding_window_pattern", "local_attention", "global_attn_every_n_layers", "relative_attention_num_buckets"),
    )
)
"""Sizes that must be at least 1."""
_MAX_INTEGER: Final = 2**31 - 1


def read_config(cls: type[ConfigT], values: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> ConfigT:
    """Returns the dataclass filled from config.json. Missing keys keep the defaults of transformers.

    null becomes None if the field may be None, otherwise the default.

    Args:
        cls: The dataclass.
        values: config.json.
        keys: Field name to the family's key; other fields keep their defaults. None: keys equal the field names.

    Raises:
        ModelLoadError: A value has a wrong type, or is out of range.
    """
    arguments = {}
    for field in fields(cls):  # type: ignore[arg-type]
        kinds = [kind.partition("[")[0].strip() for kind in str(field.type).split("|")]
        key = field.name if keys is None else keys.get(field.name)
        if key is not None and key in values and ("None" in kinds or values[key] is not None):
            arguments[field.name] = _checked(key, values[key], field.name, kinds)
    return cls(**arguments)


def check_layer_types(types: Sequence[object], count: int, known: Sequence[str]) -> None:
    """Raises UnsupportedModelError if `types` has an unknown type or not `count` items."""
    if len(types) != count or not all(kind in known for kind in types):
        raise UnsupportedModelError(f"layer_types is {types}; it must be {count} of {', '.join(known)}.")


def _checked(key: str, value: Any, name: str, kinds: Sequence[str]) -> Any:
    """Checks a value of config.json against the type of its field. Fields of type Any are not checked."""
    if value is None:
        return value
    is_word = "str" in kinds and isinstance(value, _TYPES["str"])
    if not is_word and ("int" in kinds or "float" in kinds):
        type_, wanted, max_value = (
            (int | float, "a number", 1e30) if "float" in kinds else (int, "an integer", _MAX_INTEGER)
        )
        min_value = 1 if name in _POSITIVE else -max_value
        is_number = isinstance(value, type_) and not isinstance(value, bool)
        if not is_number or not min_value <= value <= max_value:
            raise ModelLoadError(
                f"config.json: {key} is {value!r}; it must be {wanted} from {min_value} to {max_value}."
            )
        return value
    types = [_TYPES[kind] for kind in kinds if kind in _TYPES]
    if types and not isinstance(value, tuple(types)):
        wanted = " or ".join(_NAMES[kind] for kind in types)
        raise ModelLoadError(f"config.json: {key} is {value!r}; it must be {wanted}.")
    return value
