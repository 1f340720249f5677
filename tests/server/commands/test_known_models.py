import json
import re

import pytest

from penstock.engine.families.registry import FAMILIES
from penstock.engine.model_files.reranker import find_preset
from penstock.server.commands import cli
from penstock.server.commands.known_models import KNOWN_MODELS, TASKS, models_for

from ...engine.executors.families import CAUSAL, ENCODERS

models = pytest.mark.parametrize("model", KNOWN_MODELS, ids=lambda model: model.name)


@models
def test_family_of_a_model_is_compared_with_transformers(model) -> None:
    assert model.family in FAMILIES
    compared = {case.values[0].lower() for case in ENCODERS + CAUSAL}
    in_transformers = {"new": "gte"}.get(model.family, model.family)
    assert re.sub("[-_]", "", in_transformers) in compared


@models
def test_facts_of_a_model_are_complete(model) -> None:
    assert re.fullmatch(r"[\w-]+/[\w.-]+", model.name)
    assert model.tasks
    assert set(model.tasks) <= set(TASKS)
    assert (model.dimensions is not None) == bool({"embed", "multi_vector"} & set(model.tasks))
    assert model.num_parameters > 10**7
    assert model.licence in {"Apache-2.0", "MIT"}
    has_preset = model.family.startswith("qwen") and "rerank" in model.tasks
    assert (find_preset(model.family, [model.name]) is not None) == has_preset


def test_command_lists_all_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["task", "parameters", "dimensions", "languages", "licence", "tested", "command"]
    for model in KNOWN_MODELS:
        assert sum(line.endswith(f"penstock serve {model.name}") for line in lines) == 1
    assert cli.main(["models", "--task", "rerank", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in answer] == [model.name for model in models_for("rerank")]
    assert answer[0]["command"] == f"penstock serve {answer[0]['name']}"
