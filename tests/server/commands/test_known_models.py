import json
import re
import sys
from pathlib import Path

import pytest

from penstock.engine.families.registry import FAMILIES
from penstock.engine.families.vision_language import VISION_LANGUAGE
from penstock.engine.model_files.image_models import TWO_TOWER_TYPES
from penstock.engine.model_files.reranker import find_preset
from penstock.server.commands import cli
from penstock.server.commands.known_models import TASKS, KnownModel, as_text, find_models

from ...random_models import TWO_TOWERS, VISION_LANGUAGE_CASES
from ...tables import table, table as engine_table

MODELS = find_models()
models = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
CASES = Path(__file__).parents[2] / "engine" / "executors" / "families.py"  # not imported: it loads torch


@models
def test_family_of_a_model_is_compared_with_transformers(model) -> None:
    names = ("encoders", "causal_decoders") if model.family in FAMILIES else ("models_without_a_family",)
    cases = [case for name in names for case in engine_table(CASES, name).values()]
    compared = {case[0].removesuffix("Model").removesuffix("Encoder").lower() for case in cases}
    if model.family in TWO_TOWER_TYPES:
        compared = {kind.lower() for kind in TWO_TOWERS}
    if model.family in VISION_LANGUAGE:
        compared = set(VISION_LANGUAGE_CASES)
    in_transformers = {"new": "gte"}.get(model.family, model.family)
    assert re.sub("[-_]", "", in_transformers) in compared
    assert (model.tested == "weights") == (model.name == "sentence-transformers/all-MiniLM-L6-v2")


@models
def test_facts_of_a_model_are_complete(model) -> None:
    assert re.fullmatch(r"[\w-]+/[\w.-]+", model.name)
    assert model.tasks
    assert set(model.tasks) <= set(TASKS)
    assert (model.dimensions is not None) == bool({"embed", "multi_vector"} & set(model.tasks))
    assert model.num_parameters > 10**7
    assert 64 <= model.max_tokens <= 32_768
    assert model.licence in {"Apache-2.0", "MIT", "CC-BY-NC-4.0", "CC-BY-NC-SA-4.0", "Gemma"}
    has_preset = model.family.startswith(("qwen", "gemma")) and "rerank" in model.tasks
    assert (find_preset(model.family, [model.name]) is not None) == has_preset


def test_models_have_different_names_and_all_tasks() -> None:
    assert len({model.name for model in MODELS}) == len(MODELS) >= 40
    assert {task for model in MODELS for task in model.tasks} == set(TASKS)


def test_command_lists_all_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["models"]) == 0
    wide = capsys.readouterr().out.splitlines()
    assert wide[0].split()[0] == "task"
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["models"]) == 0
    narrow = capsys.readouterr().out.splitlines()
    assert max(map(len, narrow)) <= 80
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "__stdout__", None)  # not a terminal
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().out.splitlines() == wide
    for model in MODELS:
        assert sum(line.endswith(f"  penstock serve {model.name}") for line in wide) == 1
        assert narrow.count(f"penstock serve {model.name}") == 1


def test_facts_of_models_are_aligned_or_wrapped() -> None:
    facts = {"family": "bert", "num_parameters": 22_700_000, "max_tokens": 256, "licence": "MIT", "tested": "weights"}
    embedder = KnownModel(name="o/a", tasks=("embed", "sparse"), dimensions=384, note="a note", **facts)
    wide, _, tested = as_text([embedder, KnownModel(name="o/b", tasks=("rerank",), **facts)], 200).partition("\n\n")
    assert wide.splitlines() == table(__file__, "test_facts_of_models_are_aligned_or_wrapped")
    assert max(map(len, tested.splitlines())) in range(100, 121)
    assert as_text([embedder], 60).splitlines()[:4] == table(__file__, "wrapped_facts")
    assert [as_text([embedder], width).startswith("task ") for width in (105, 106)] == [False, True]


def test_task_and_word_select_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--task", "sparse", "--json"]) == 0
    answer = json.loads(text := capsys.readouterr().out)
    assert text == json.dumps(answer, indent=2) + "\n"
    assert [model["tasks"][0] for model in answer] == ["sparse", "sparse", "sparse", "embed"]
    assert answer[0]["command"] == f"penstock serve {answer[0]['name']}"
    assert cli.main(["models", "QWEN3", "--task", "rerank", "--json"]) == 0
    names = [model["name"] for model in json.loads(capsys.readouterr().out)]
    assert names == ["Qwen/Qwen3-Reranker-0.6B", "Qwen/Qwen3-Reranker-4B", "Qwen/Qwen3-VL-Reranker-2B"]
    assert cli.main(["models", "no such model"]) == 0
    assert capsys.readouterr().out.startswith("No listed model matches.")
