"""Translates vLLM's command line: its spelling of flags, keys of JSON flags with dots, and flags without effect here.

A flag without effect is accepted with a warning that says why. A flag that asks for something that penstock cannot do,
such as two GPUs for one model, is refused.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from penstock.engine.protocol.json_text import parse_json

from ..settings import UsageError

_NO_GRAPHS: Final = "nothing is compiled or captured beforehand."
_NO_CACHE: Final = "memory is taken as it is needed; --kv-cache-memory bounds what is kept for long inputs."
_OWN_LOGS: Final = "requests are logged with --access-log only, figures are in /metrics."
_JSON_FLAGS: Final = ("--pooler-config", "--hf-overrides")


class _Foreign(NamedTuple):
    """A flag of vLLM that has no effect here.

    Attributes:
        reason: Why it has none.
        accepts: Returns whether a value is accepted; None: the flag has no value.
    """

    reason: str
    accepts: Callable[[str], bool] | None = None


def _any(_: str) -> bool:
    return True


def _is_one(value: str) -> bool:
    return value == "1"


_ONE_DEVICE: Final = "a model runs on one device."
_ONE_MAXSIM: Final = "vectors of tokens are always compared in the engine process."
_FOREIGN: Final = {
    "--runner": _Foreign("every model served here is a pooling model.", {"auto", "pooling"}.__contains__),
    "--convert": _Foreign("the model's files say what it gives.", {"auto", "none", "embed", "classify"}.__contains__),
    "--task": _Foreign(
        "the model's files say what it gives.", {"auto", "embed", "embedding", "classify", "score"}.__contains__
    ),
    "--enforce-eager": _Foreign(_NO_GRAPHS),
    "--no-enforce-eager": _Foreign(_NO_GRAPHS),
    "--gpu-memory-utilization": _Foreign(_NO_CACHE, _any),
    "--swap-space": _Foreign(_NO_CACHE, _any),
    "--cpu-offload-gb": _Foreign("weights stay on the device.", lambda value: float(value) == 0),
    "--tensor-parallel-size": _Foreign(_ONE_DEVICE, _is_one),
    "--pipeline-parallel-size": _Foreign(_ONE_DEVICE, _is_one),
    "--disable-log-requests": _Foreign(_OWN_LOGS),
    "--no-enable-log-requests": _Foreign(_OWN_LOGS),
    "--disable-log-stats": _Foreign(_OWN_LOGS),
    "--uvicorn-log-level": _Foreign("--log-level is for all.", _any),
    "--load-format": _Foreign("weights are read as they are stored.", {"auto", "safetensors"}.__contains__),
    "--tokenizer-mode": _Foreign("every tokenizer is a fast one.", {"auto", "hf"}.__contains__),
    "--enable-tokenizer-info-endpoint": _Foreign("/tokenizer_info comes with --operator-routes."),
    "--seed": _Foreign("nothing here is random.", _any),
    "--enable-flash-late-interaction": _Foreign(_ONE_MAXSIM),
    "--no-enable-flash-late-interaction": _Foreign(_ONE_MAXSIM),
}
_OUR_NAMES: Final = {"--data-parallel-size": "--data-parallel"}
"""vLLM's names of flags that have another name here."""
_OUR_DTYPES: Final = {"half": "float16", "float": "float32"}
"""vLLM's names of types that have another name here."""


def translated(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the translated command line, and a warning for each flag that was left out.

    Dashes may be underscores. `--pooler-config.task embed` is a key of the JSON that `--pooler-config` takes.

    Raises:
        UsageError: A flag has a value that is not supported, or a key with dots stands beside the JSON of its flag.
    """
    left: list[str] = []
    warnings: list[str] = []
    dotted: dict[str, dict[str, Any]] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith("--") or word == "--":
            left.append(word)
            continue
        name, has_value, value = word.partition("=")
        name, _, key = name.partition(".")
        name = name.replace("_", "-")
        name = _OUR_NAMES.get(name, name)
        if key and name in _JSON_FLAGS:
            dotted.setdefault(name, {})[key] = _plain(value if has_value else next(words, ""))
        elif name in _FOREIGN:
            foreign = _FOREIGN[name]
            if foreign.accepts is not None:
                _check(name, value if has_value else next(words, ""), foreign)
            warnings.append(f"{name} has no effect: {foreign.reason}")
        elif has_value:
            dot = "." if key else ""
            left.append(f"{name}{dot}{key}={_OUR_DTYPES.get(value, value) if name == '--dtype' else value}")
        else:
            left.append(f"{name}.{key}" if key else name)
            if name == "--dtype":
                left += [_OUR_DTYPES.get(value, value) for value in itertools.islice(words, 1)]
    for name, fields in dotted.items():
        if any(word == name or word.startswith(f"{name}=") for word in left):
            raise UsageError(f"{name}: give all of it as JSON, or all of it by dots, as {name}.{next(iter(fields))}")
        left += [name, json.dumps(fields)]
    return left, warnings


def _check(name: str, value: str, foreign: _Foreign) -> None:
    try:
        is_taken = foreign.accepts is None or foreign.accepts(value)
    except ValueError:
        is_taken = False
    if not is_taken:
        raise UsageError(f"{name}: {value!r} is not supported: {foreign.reason}")


def _plain(value: str) -> Any:
    """Returns a value parsed as JSON, or the text itself if it is no JSON."""
    try:
        return parse_json(value)
    except ValueError:
        return value
