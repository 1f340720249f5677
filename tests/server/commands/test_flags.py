"""vLLM's command lines."""

import json

import pytest

from penstock.server.commands.flags import translate_vllm_flags
from penstock.server.settings import UsageError

from ...tables import cases, table


@cases(__file__, "words", "expected")
def test_flags_of_vllm_are_translated(words: str, expected: str | None) -> None:
    assert translate_vllm_flags(words.split()) == ((expected or words).split(), [])


@pytest.mark.parametrize("is_joined", [False, True])
def test_keys_with_dots_become_json(is_joined: bool) -> None:
    pairs = table(__file__, "test_keys_with_dots_become_json")
    words = [f"{name}={value}" for name, value in pairs] if is_joined else [word for pair in pairs for word in pair]
    left, warnings = translate_vllm_flags(["serve", *words])
    assert left[:2] == ["serve", "--pooler-config"]
    assert json.loads(left[2]) == {"task": "embed", "seq_pooling_type": "LAST", "normalize": False}
    assert left[3] == "--hf-overrides"
    assert json.loads(left[4]) == {"matryoshka_dimensions": [64, 128]}
    assert warnings == []


def test_keys_with_dots_beside_json_are_rejected() -> None:
    with pytest.raises(UsageError, match=r"^--pooler-config: .*--pooler-config\.task"):
        translate_vllm_flags(["serve", "--pooler-config", "{}", "--pooler-config.task", "embed"])


def test_flags_without_effect_are_dropped_with_a_warning() -> None:
    words = ["serve", "--runner", "pooling", "--disable-log-stats", "--gpu_memory_utilization=0.4", "M"]
    words += ["--convert=embed", "--cpu-offload-gb", "0"]
    left, warnings = translate_vllm_flags([*words, "--tensor-parallel-size", "1", "--no-enable-flash-late-interaction"])
    assert left == ["serve", "M"]
    assert [warning.split()[0] for warning in warnings] == table(
        __file__, "test_flags_without_effect_are_dropped_with_a_warning"
    )
    assert all(warning.endswith(".") and " has no effect: " in warning for warning in warnings)


@cases(__file__, "flag", "value")
def test_unsupported_values_are_rejected(flag: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"^{flag}: {value!r} is not supported"):
        translate_vllm_flags(["serve", flag, value])
