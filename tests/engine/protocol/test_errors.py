"""Error messages name request fields as the dialect of the client does."""

import pytest

from penstock.engine.protocol.errors import EngineError, InvalidRequestError, RequestTooLongError, drop_tracebacks
from penstock.engine.protocol.model_info import ModelInfo
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask
from penstock.engine.tokenization.model_tokenizer import Truncation

COHERE = {"dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens", "cut_to_fit": "truncate to END"}


def test_message_template_names_fields_of_the_dialect() -> None:
    error = InvalidRequestError("{dimensions} is {value}; {dimensions} must be less.", param="dimensions", value="{9}")
    assert (error.message, error.param) == ("dimensions is {9}; dimensions must be less.", "dimensions")
    error.name_fields(COHERE)
    assert (error.message, error.param) == (
        "output_dimension is {9}; output_dimension must be less.",
        "output_dimension",
    )


@pytest.mark.parametrize("message", ["{dimensions}", '{"is_matryoshka": true}', "{", "100 %"])
def test_message_without_values_is_no_template(message: str) -> None:
    error = EngineError(message)
    error.name_fields(COHERE)
    assert (error.message, error.param) == (message, None)


def test_too_long_error_names_the_setting_of_the_dialect() -> None:
    limit = Truncation(max_num_tokens=4, may_truncate=False, side=None, param="input", name="{truncate_prompt_tokens}")
    with pytest.raises(RequestTooLongError) as caught:
        limit.reject_unless_truncated("input 0 has 5 tokens", 5)
    assert "(truncate_prompt_tokens)" in caught.value.message
    assert "set truncate_prompt_tokens to -1 to cut it" in caught.value.message
    caught.value.name_fields(COHERE)
    assert "4 tokens (max_tokens), but input 0 has 5 tokens" in caught.value.message
    assert "set truncate to END to cut it" in caught.value.message


def test_foreign_parameters_are_named_in_the_dialect() -> None:
    model = ModelInfo.__new__(ModelInfo)
    object.__setattr__(model, "tasks", (PoolingTask.EMBED,))
    with pytest.raises(InvalidRequestError) as caught:
        PoolingParams(dimensions=2, step_tag_id=3).verify(PoolingTask.EMBED, model)
    caught.value.name_fields(COHERE)
    assert "takes the parameters output_dimension, normalize, use_activation" in caught.value.message
    assert "does not take step_tag_id" in caught.value.message


def test_tracebacks_of_causes_and_groups_are_dropped() -> None:
    member, cause, context, other = map(KeyError, "abcd")
    group = ExceptionGroup("several", [member])
    group.__cause__, cause.__context__, context.__cause__ = cause, context, group
    for error in (group, member, cause, context, other):
        with pytest.raises(type(error)):
            raise error
    drop_tracebacks(group)
    assert [error.__traceback__ is None for error in (group, member, cause, context, other)] == [True] * 4 + [False]
