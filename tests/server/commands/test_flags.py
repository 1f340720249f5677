"""vLLM's command lines: spelled with underscores, set by dots, and with flags that mean nothing here."""

import json

import pytest

from penstock.server.commands.flags import translated
from penstock.server.settings import UsageError


def test_our_own_command_lines_stay_as_they_are() -> None:
    words = ["serve", "a_model", "--port", "8001", "--dtype=float32", "--hf-overrides", '{"a_b": 1}', "--no-access-log"]
    assert translated(words) == (words, [])


def test_underscores_are_dashes_in_flags_alone() -> None:
    words = ["serve", "my_model", "--max_model_len", "512", "--served_model_name=a_b,c", "--api-key", "k_1"]
    expected = ["serve", "my_model", "--max-model-len", "512", "--served-model-name=a_b,c", "--api-key", "k_1"]
    assert translated(words) == (expected, [])


@pytest.mark.parametrize("is_joined", [False, True])
def test_settings_by_dots_become_their_json(is_joined: bool) -> None:
    pairs = [
        ("--pooler-config.task", "embed"),
        ("--pooler_config.seq_pooling_type", "LAST"),
        ("--pooler-config.normalize", "false"),
        ("--hf-overrides.matryoshka_dimensions", "[64, 128]"),
    ]
    words = [f"{name}={value}" for name, value in pairs] if is_joined else [word for pair in pairs for word in pair]
    left, warnings = translated(["serve", *words])
    assert left[:2] == ["serve", "--pooler-config"]
    assert json.loads(left[2]) == {"task": "embed", "seq_pooling_type": "LAST", "normalize": False}
    assert left[3] == "--hf-overrides"
    assert json.loads(left[4]) == {"matryoshka_dimensions": [64, 128]}
    assert warnings == []


@pytest.mark.parametrize(("theirs", "ours"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_types_by_vllms_other_words(theirs: str, ours: str) -> None:
    assert translated(["serve", "--dtype", theirs, "half"]) == (["serve", "--dtype", ours, "half"], [])
    assert translated([f"--dtype={theirs}", "--api-key", theirs]) == ([f"--dtype={ours}", "--api-key", theirs], [])
    assert translated(["serve", "--dtype"]) == (["serve", "--dtype"], [])


def test_flags_by_vllms_other_names() -> None:
    assert translated(["serve", "--data-parallel-size", "2"]) == (["serve", "--data-parallel", "2"], [])
    assert translated(["serve", "--data_parallel_size=2"]) == (["serve", "--data-parallel=2"], [])
    assert translated(["serve", "--enforce-eager", "M"]) == (["serve", "--no-cuda-graphs", "M"], [])
    assert translated(["serve", "--no_enforce_eager"]) == (["serve", "--cuda-graphs"], [])


def test_settings_by_dots_and_as_json_are_too_much() -> None:
    with pytest.raises(UsageError, match=r"^--pooler-config: .*--pooler-config\.task"):
        translated(["serve", "--pooler-config", "{}", "--pooler-config.task", "embed"])


def test_flags_without_effect_are_dropped_with_a_warning() -> None:
    words = ["serve", "--runner", "pooling", "--disable-log-stats", "--gpu_memory_utilization=0.4", "M"]
    words.append("--convert=embed")
    left, warnings = translated([*words, "--tensor-parallel-size", "1", "--no-enable-flash-late-interaction"])
    assert left == ["serve", "M"]
    assert [warning.split()[0] for warning in warnings] == [
        "--runner",
        "--disable-log-stats",
        "--gpu-memory-utilization",
        "--convert",
        "--tensor-parallel-size",
        "--no-enable-flash-late-interaction",
    ]
    assert all(warning.endswith(".") and " has no effect: " in warning for warning in warnings)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--runner", "generate"),
        ("--tensor-parallel-size", "2"),
        ("--cpu-offload-gb", "4"),
        ("--cpu-offload-gb", "much"),
        ("--load-format", "dummy"),
        ("--task", "generate"),
        ("--runner", ""),
    ],
)
def test_unsupported_values_are_refused(flag: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"^{flag}: {value!r} is not supported"):
        translated(["serve", flag, value])
