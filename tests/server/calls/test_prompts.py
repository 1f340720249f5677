"""input_type and task choose a prompt of the model."""

import contextlib
from collections.abc import Iterable
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import Request

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.model_info import AdapterSpec
from penstock.server.admission import AdmissionController
from penstock.server.calls import prompts as prompt_names
from penstock.server.calls.context import ServerContext
from penstock.server.calls.model_call import ModelCall
from penstock.server.models.model_manager import ModelLimits, ModelManager
from penstock.server.models.table import ModelTable, ModelTarget
from penstock.server.routes.openai import EmbeddingRequest
from penstock.server.settings import ServerSettings

from ...tables import cases, table

REQUEST = Request({"type": "http", "headers": []})
E5 = {"query": "query: ", "passage": "passage: "}
QUERY_ONLY = {"query": "Represent this sentence for searching relevant passages: "}
JINA_V3 = dict.fromkeys(("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"), "p")
QWEN = {"query": "Instruct: Find the answer\nQuery:", "document": ""}


def body(**fields: str) -> EmbeddingRequest:
    return EmbeddingRequest(input=["a"], **fields)


def call(engine: Any, default_prompt_name: str | None = None, adapter: str | None = None) -> ModelCall:
    settings, table = ServerSettings(), ModelTable(ModelManager([], ModelLimits()))
    context = ServerContext(settings, None, table, 0, AdmissionController(settings))
    return ModelCall(REQUEST, context, ModelTarget(engine, "m", default_prompt_name, adapter), 0.0)


@pytest.mark.parametrize("field", ["input_type", "task"])
def test_purpose_chooses_a_prompt(make_engine, field: str) -> None:
    for prompts, value, expected in table(__file__, "test_purpose_chooses_a_prompt"):
        options = call(make_engine(prompts=prompts)).embed_options(body(**{field: value}))
        assert (options.prompt_name, options.prompt) == (expected, None), (prompts, value)


def test_prompt_name_wins_over_input_type_and_task(make_engine) -> None:
    made = call(make_engine(prompts=E5))
    for fields, expected in table(__file__, "test_prompt_name_wins_over_input_type_and_task"):
        assert made.embed_options(body(**fields)).prompt_name == expected


def test_default_prompt_is_for_requests_without_a_purpose(make_engine) -> None:
    made = call(make_engine(prompts=QUERY_ONLY), "query")
    assert made.embed_options(body()).prompt_name == "query"
    assert made.embed_options(body(input_type="document")).prompt_name is None


def test_instruction_replaces_that_of_the_query_prompt(make_engine) -> None:
    made = call(make_engine(prompts=QWEN))
    for arguments in ({}, {"input_type": "search_query"}, {"prompt_name": "query"}):
        options = made.embed_options(body(instruction="Find the law", **arguments))
        assert (options.prompt, options.instruction) == ("Instruct: Find the law\nQuery:", None)
    made = call(make_engine(prompts={"web": QWEN["query"]}, default_prompt_name="web"))
    assert made.embed_options(body(instruction="Find the law")).prompt == "Instruct: Find the law\nQuery:"


def adapters(names: Iterable[str], folder: str | None = "lora") -> tuple[AdapterSpec, ...]:
    return tuple(AdapterSpec(name=name, folder=folder, is_task=True) for name in names)


@pytest.mark.parametrize("field", ["input_type", "task"])
@cases(__file__, "names", "purpose", "expected")
def test_purpose_selects_the_task_adapter(make_engine, names, purpose: str, expected: str, field: str) -> None:
    made = call(make_engine(prompts=dict.fromkeys(names, "p"), adapters=adapters(names)))
    options = made.embed_options(body(**{field: purpose}))
    assert options.adapter == expected
    assert made.embed_options(body()).adapter is None
    assert made.embed_options(body(prompt_name=expected)).adapter is None


@pytest.mark.parametrize(("folder", "purpose"), [(None, "retrieval.query"), ("lora", "nl2code")])
def test_task_without_an_adapter_is_rejected(make_engine, folder: str | None, purpose: str) -> None:
    made = call(make_engine(name="jina", prompts=JINA_V3, adapters=adapters(JINA_V3, folder)))
    with pytest.raises(InvalidRequestError, match=f"task is '{purpose}'; jina has a LoRA adapter for each task"):
        made.embed_options(body(task=purpose))


def test_single_adapter_is_not_selected_by_tasks(make_engine) -> None:
    made = call(make_engine(prompts=E5, adapters=adapters(["query"])))
    options = made.embed_options(body(task="retrieval.query"))
    assert (options.prompt_name, options.adapter) == ("query", None)


def test_task_and_model_name_must_agree(make_engine) -> None:
    made = call(make_engine(prompts=JINA_V3, adapters=adapters(JINA_V3)), adapter="separation")
    assert made.embed_options(body()).adapter == "separation"
    assert made.embed_options(body(task="separation")).adapter == "separation"
    with pytest.raises(InvalidRequestError, match=r"'retrieval\.query', and the model name selects 'separation'"):
        made.embed_options(body(task="retrieval.query"))


@cases(__file__, "prompts", "arguments", "param", "part")
def test_unknown_purpose_or_instruction_is_rejected(make_engine, prompts, arguments, param: str, part: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call(make_engine(prompts=prompts)).embed_options(body(**arguments))
    assert caught.value.param == param
    assert part in caught.value.message


@pytest.mark.parametrize("field", ["input_type", "task", "prompt_name"])
def test_long_name_of_a_purpose_is_not_split(make_engine, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    separators = Mock(split=Mock(side_effect=str.split))
    monkeypatch.setattr(prompt_names, "_SEPARATORS", separators)
    with contextlib.suppress(InvalidRequestError):
        call(make_engine(prompts=E5)).embed_options(body(**{field: "query " * 100_000}))
    assert all(len(each.args[0]) < 1_000 for each in separators.split.call_args_list)
