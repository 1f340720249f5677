"""Flags of the command line: the settings as flags of argparse, and the flags of vLLM.

vLLM's spelling of flags is translated, including dotted keys of JSON flags. A flag of vLLM without effect in penstock
is accepted with a warning that has the reason. A flag that requests an unsupported feature, such as two GPUs for one
model, is rejected.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from penstock.engine.protocol.setting import parse_json

from ..settings import (
    GROUPS,
    UsageError,
    declared_settings,
    did_you_mean,
    environment_variable,
    flag_of,
    flag_of_other_server,
)


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError with one line instead of printing its usage.

    Abbreviated flags are rejected: argparse would read `--model NAME` as --model-memory.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads by the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses known flags. Raises UsageError for an unknown flag, with the nearest flag and without its value."""
        found, extras = super().parse_known_args(args, namespace)
        for flag in extras:
            name = flag.partition("=")[0]
            if name.startswith("--"):
                self.error(f"unrecognized argument: {name}{self._hint(name)}")
        return found, extras

    def _hint(self, flag: str) -> str:
        """Returns the end of the error for an unknown flag."""
        if flag in ("--model", "--model-id"):
            return "; name the model without a flag: penstock serve MODEL"
        other = flag_of_other_server(flag) if "--env-compat" in self._option_string_actions else ""
        return other or did_you_mean(flag, self._option_string_actions)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            hint = did_you_mean(value, action.choices) or f"; commands: {', '.join(action.choices)}"
            self.error(f"there is no command {value!r}{hint}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(message)


def add_flags(parser: argparse.ArgumentParser, kind: type, *, positional: str = "", nargs: str = "?") -> None:
    """Adds one flag for every setting of a command. Values stay strings; `load_settings` converts and checks them.

    Args:
        parser: Parser of the command.
        kind: Dataclass of its settings.
        positional: The setting that is a positional argument; empty for none.
        nargs: Number of positional values, in argparse's notation.
    """
    settings = declared_settings(kind).values()
    for title in GROUPS:
        if not any(declared.setting.group == title for declared in settings):
            continue
        group = parser.add_argument_group(title)
        for declared in settings:
            if declared.setting.group != title:
                continue
            default = (
                " (required)"
                if declared.is_required
                else declared.shown_default and f" (default: {declared.shown_default})"
            )
            text = f"{declared.setting.help}{default} [{environment_variable(declared.name)}]".replace("%", "%%")
            options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
            if declared.name == positional:
                group.add_argument(declared.name, metavar=declared.metavar, nargs=nargs, **options)
            elif declared.kind is bool:
                group.add_argument(flag_of(declared.name), action=argparse.BooleanOptionalAction, **options)
            else:
                action = "append" if declared.is_list else "store"
                group.add_argument(flag_of(declared.name), action=action, metavar=declared.metavar, **options)


_NO_CACHE: Final = "memory is allocated as needed; --kv-cache-memory limits the memory for long inputs."
_OWN_LOGS: Final = "requests are logged with --access-log only, statistics are in /metrics."
_JSON_FLAGS: Final = ("--pooler-config", "--hf-overrides", "--mm-processor-kwargs")


class _IgnoredFlag(NamedTuple):
    """A flag of vLLM without effect in penstock.

    Attributes:
        reason: Reason in the warning.
        accepts: Function that returns whether a value is accepted. None: the flag has no value.
    """

    reason: str
    accepts: Callable[[str], bool] | None = None


def _any(_: str) -> bool:
    return True


def _is_one(value: str) -> bool:
    return value == "1"


_ONE_DEVICE: Final = "a model runs on one device."
_ONE_MAXSIM: Final = "token vectors are always compared in the engine process."
_IGNORED_FLAGS: Final = {
    "--runner": _IgnoredFlag("every model served here is a pooling model.", {"auto", "pooling"}.__contains__),
    "--convert": _IgnoredFlag(
        "the model's files determine its tasks.", {"auto", "none", "embed", "classify"}.__contains__
    ),
    "--task": _IgnoredFlag(
        "the model's files determine its tasks.", {"auto", "embed", "embedding", "classify", "score"}.__contains__
    ),
    "--gpu-memory-utilization": _IgnoredFlag(_NO_CACHE, _any),
    "--swap-space": _IgnoredFlag(_NO_CACHE, _any),
    "--cpu-offload-gb": _IgnoredFlag("weights stay on the device.", lambda value: float(value) == 0),
    "--tensor-parallel-size": _IgnoredFlag(_ONE_DEVICE, _is_one),
    "--pipeline-parallel-size": _IgnoredFlag(_ONE_DEVICE, _is_one),
    "--disable-log-requests": _IgnoredFlag(_OWN_LOGS),
    "--no-enable-log-requests": _IgnoredFlag(_OWN_LOGS),
    "--disable-log-stats": _IgnoredFlag(_OWN_LOGS),
    "--uvicorn-log-level": _IgnoredFlag("--log-level applies to the whole server.", _any),
    "--load-format": _IgnoredFlag("weights are loaded as they are stored.", {"auto", "safetensors"}.__contains__),
    "--tokenizer-mode": _IgnoredFlag("every tokenizer is a fast tokenizer.", {"auto", "hf"}.__contains__),
    "--enable-tokenizer-info-endpoint": _IgnoredFlag("--operator-routes enables /tokenizer_info."),
    "--enable-lora": _IgnoredFlag("--adapter names the adapters."),
    **dict.fromkeys(
        ("--max-loras", "--max-cpu-loras", "--max-lora-rank", "--lora-dtype"),
        _IgnoredFlag("all adapters stay in memory, with any rank and in the type of the model.", _any),
    ),
    "--seed": _IgnoredFlag("nothing here is random.", _any),
    "--enable-flash-late-interaction": _IgnoredFlag(_ONE_MAXSIM),
    "--no-enable-flash-late-interaction": _IgnoredFlag(_ONE_MAXSIM),
}
_RENAMED_FLAGS: Final = {
    "--data-parallel-size": "--data-parallel",
    "--lora-modules": "--adapter",
    "--enforce-eager": "--no-cuda-graphs",
    "--no-enforce-eager": "--cuda-graphs",
}
"""vLLM's flag names that differ from penstock's."""
_RENAMED_DTYPES: Final = {"half": "float16", "float": "float32"}
"""vLLM's dtype names that differ from penstock's."""


def translate_vllm_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the translated command line, and a warning for each ignored flag.

    Underscores count as dashes. `--pooler-config.task embed` sets a key of the JSON value of `--pooler-config`.
    `serve MODEL --served-model-name A B` gives two names; without a MODEL before the flag, B is the model.

    Raises:
        UsageError: A flag has an unsupported value, or both dotted keys and a JSON value.
    """
    left: list[str] = []
    warnings: list[str] = []
    dotted: dict[str, dict[str, Any]] = {}
    repeated = ""  # a flag of vLLM that takes several words: penstock's takes one and is repeated
    first = argv[2 if argv[:1] == ["ray"] else 1 :][:1]
    begins_with_model = bool(first) and not first[0].startswith("-")
    words = iter(argv)
    for word in words:
        if not word.startswith("--") or word == "--":
            if word == "--":
                repeated = ""
            elif repeated and left[-1] != repeated and (repeated != "--adapter" or "=" in word):
                left.append(repeated)
            left.append(word)
            continue
        name, has_value, value = word.partition("=")
        name, _, key = name.partition(".")
        name = name.replace("_", "-")
        takes_several = name == "--lora-modules" or (name == "--served-model-name" and begins_with_model)
        name = _RENAMED_FLAGS.get(name, name)
        repeated = name if takes_several else ""
        if key and name in _JSON_FLAGS:
            dotted.setdefault(name, {})[key] = _plain(value if has_value else next(words, ""))
        elif name in _IGNORED_FLAGS:
            foreign = _IGNORED_FLAGS[name]
            if foreign.accepts is not None:
                _check(name, value if has_value else next(words, ""), foreign.accepts, foreign.reason)
            warnings.append(f"{name} has no effect: {foreign.reason}")
        elif has_value:
            dot = "." if key else ""
            left.append(f"{name}{dot}{key}={_RENAMED_DTYPES.get(value, value) if name == '--dtype' else value}")
        else:
            left.append(f"{name}.{key}" if key else name)
            if name == "--dtype":
                left += [_RENAMED_DTYPES.get(value, value) for value in itertools.islice(words, 1)]
    for name, fields in dotted.items():
        if any(word == name or word.startswith(f"{name}=") for word in left):
            raise UsageError(f"{name}: use either JSON or dotted keys such as {name}.{next(iter(fields))}, not both")
        left += [name, json.dumps(fields)]
    return left, warnings


def _check(name: str, value: str, accepts: Callable[[str], bool], reason: str) -> None:
    try:
        is_taken = accepts(value)
    except ValueError:
        is_taken = False
    if not is_taken:
        raise UsageError(f"{name}: {value!r} is not supported: {reason}")


def _plain(value: str) -> Any:
    """Returns a value parsed as JSON, or the text itself if it is not JSON."""
    try:
        return parse_json(value)
    except ValueError:
        return value
