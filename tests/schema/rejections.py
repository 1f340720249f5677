"""A check for schemathesis: a valid request succeeds, or is rejected for a reason that a schema cannot express.

It replaces positive_data_acceptance of schemathesis, which expects success.
"""

from __future__ import annotations

import re

import schemathesis

OF_THE_MODEL = (
    r"does not support the task '\w+'; it supports",
    r" is a \w+; similarity needs embeddings",
    r"^outputs holds '\w+', but .* gives ",
    r"^The task '\w+' takes the parameters? ",
    r"has no chat template",
    r"^prompt_name is .*; the model has",
    r"^(prompt_name|input_type) selects a prompt for embedding, but the task '\w+' uses no prompt",
    r"^(input_type|task) is .*; send query, document, classification",
    r"so it accepts no instruction|does not accept an instruction for pairs",
    r"without an instruction; leave instruction out|instruction applies to queries",
    r"^token id \d+ is out of vocabulary",
    r"^(dimensions|output_dimension) is \d+(; .* gives|; .* declares|, but .* does not declare Matryoshka)",
    r"value is greater than max_(model|embed)_len",
    r"maximum context length is \d+ tokens",
    r"^The limit is \d+ tokens, but the model adds",
    r"^Input \d+ is empty: the tokenizer of .* returns no token for it",
    r"^step_tag_id and returned_token_ids need STEP pooling",
    r"^(use_activation|raw_scores) belongs to scores of a cross-encoder",
    r"is an embedding model without classes. Send labels",
    r"labels and examples need an embedding model",
    r"classifies tokens",
    r"is an image, but .* reads text only|^messages has an image, but only texts have tokens",
    r"which was trained for|^function_to_apply is '\w+', but",
    r", which packs \d dimensions into a byte, but the embeddings have",
)
"""Features that the served model lacks. The OpenAPI document is the same for every model."""

OF_TWO_FIELDS = (
    r"^late_chunking ",
    r"^embedding_type holds \d+ types, but encoding_format is",
    r"^embed_dtype is '\w+', but \w+ asks for",
    r"^\w+ is \w+ and use_activation is \w+, but for embeddings they are two names",
    r"but class scores are floats",
    r"^return_token_ids needs multi_vector, which is not in outputs",
    r"^encoding_format is '\w+', which (holds only one output|puts a line)",
    r"^Give labels \(zero-shot\) or examples \(few-shot\)",
    r"^messages need a classifier",
    r"^messages holds several chats",
    r"^chat_template is not taken from requests",
    r"^documents: entry \d+ is an object without",
    r"^\d+ texts cannot be paired with \d+",
    r"^(labels|examples) must name at least two different labels",
)
"""Fields that contradict each other."""

OF_INVOCATIONS = (
    r"^truncate: Input should be|^inputs(\[\d+\])?:? must |^input(\[\d+\])?:? must |is missing; the body has",
    r"^task: Input should be 'embed', 'classify', 'token_embed' or 'token_classify', not ",
    r"^inputs holds an empty text|^inputs is a flat list of \d+; a flat list is",
    r"^[a-z0-9_]+ (has no use here; leave it out\. This request takes|is not known here; did you mean)",
)
"""The served model decides which bodies /invocations accepts."""


def _is_known(path: str, message: str) -> bool:
    reasons = (*OF_THE_MODEL, *OF_TWO_FIELDS, *(OF_INVOCATIONS if path == "/invocations" else ()))
    return any(re.search(reason, message) for reason in reasons)


@schemathesis.check
def rejected_with_reason(ctx, response, case) -> None:
    """Fails on a 4xx for a valid request without a known reason."""
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code not in (400, 422, 424):
        return
    message = response.json()["message"]
    assert _is_known(case.operation.path, message), f"A valid request was rejected: {message}"
