"""Text Embeddings Inference (TEI), as its clients and those of the Inference API send and read it.

Most answers are bare lists. Options may stand beside the inputs or, as the Inference API has them, in `parameters`.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from penstock.engine import PoolingParams

from ..dialects import TEI, keys_ignored_by
from ..errors import TEI_TAG
from .inputs import (
    FullInputs,
    FullText,
    FullTexts,
    IdBatches,
    SequenceInputs,
    TextOrObject,
    TextOrTexts,
    Texts,
    TruncationSide,
)
from .json_schema import documented
from .options import PRIORITY, Count, Flag, Priority, RequestBody, Width


class TeiBody(RequestBody):
    """Base of TEI's bodies."""

    tag: ClassVar[str] = TEI_TAG
    own_names: ClassVar = {"input": "inputs"}
    ignored_keys: ClassVar = keys_ignored_by(TEI)


class TeiModelBody(TeiBody):
    """Options of all routes that run the model."""

    own_names: ClassVar = {
        "input": "inputs",
        "truncate_prompt_tokens": "truncate",
        "truncation_side": "truncation_direction",
        "cut_to_fit": "truncate to true",
    }

    truncate: Flag | None = Field(None, description="Cut over-long inputs (default); false refuses them.")
    truncation_direction: TruncationSide | None = Field(None, description="The side that is cut away.")
    parameters: dict[str, Any] | None = Field(None, description="The options, as the Inference API sends them.")
    priority: Priority | None = PRIORITY

    @model_validator(mode="before")
    @classmethod
    def _with_parameters(cls, body: Any) -> Any:
        if not isinstance(body, dict) or not isinstance(parameters := body.get("parameters"), dict):
            return body
        own, others = (
            {name: value for name, value in part.items() if value is not None} for part in (body, parameters)
        )
        if own.keys() & others.keys():  # those of the body win; the others are to be right all the same
            cls.model_validate({**own, **others, "parameters": None})
        return {**others, **own}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns the JSON Schema, whose `parameters` hold what is optional in the body."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        fields = schema["properties"]
        options = {name: fields[name] for name in fields if name not in (*schema["required"], "parameters")}
        fields["parameters"]["anyOf"][0] = {
            "type": "object",
            "properties": copy.deepcopy(options),
            "additionalProperties": schema["additionalProperties"],
        }
        return schema

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters."""
        is_cut = self.truncate is not False
        return PoolingParams(
            truncate_prompt_tokens=-1 if is_cut else None,
            refuse_too_long=not is_cut,
            truncation_side=self.truncation_direction,
        )


class TeiTokenEmbedRequest(TeiModelBody):
    """Body of POST /embed_all and /embed_sparse."""

    model_config = documented({"inputs": ["A gate holds the water."]})

    inputs: FullInputs = Field(
        description="A text, a list of texts, the token ids of one text, or a list of such lists. No text may be empty."
    )
    prompt_name: str | None = Field(None, description="Named prompt of the model to put before every text.")


class TeiEmbedRequest(TeiTokenEmbedRequest):
    """Body of POST /embed."""

    model_config = documented(
        {"inputs": ["A gate holds the water.", "A pipe carries it."], "truncate": True},
        {"inputs": "One text is fine too.", "normalize": False},
    )

    normalize: Flag | None = Field(None, description="L2-normalise (default), whatever the model's files say.")
    dimensions: Width | None = Field(
        None,
        description="Width of the embeddings. As in TEI, of any model; only Matryoshka models were trained for it.",
    )
    encoding_format: Literal["float"] | None = Field(None, description="Hugging Face's client: answers are numbers.")

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters."""
        normalize = self.normalize is not False
        return super().pooling_params().clone(dimensions=self.dimensions, any_dimensions=True, normalize=normalize)


class TeiSentences(BaseModel):
    """A sentence, and those that it is compared with."""

    source_sentence: FullText
    sentences: FullTexts = Field(min_length=1)


class TeiSimilarityRequest(TeiModelBody):
    """Body of POST /similarity."""

    model_config = documented({"inputs": {"source_sentence": "A gate.", "sentences": ["A dam.", "A song."]}})

    inputs: TeiSentences
    prompt_name: str | None = Field(None, description="Named prompt of the model to put before every sentence.")


class TeiPredictRequest(TeiModelBody):
    """Body of POST /predict."""

    model_config = documented(
        {"inputs": "I love this."},
        {"inputs": [["I love this."], ["It rains.", "The street is wet."]], "raw_scores": True},
    )

    inputs: SequenceInputs = Field(description="A text, a pair [text, text], or a list of [text] and [text, text].")
    raw_scores: Flag | None = Field(None, description="Answer with logits instead of probabilities.")
    top_k: Count | None = Field(None, description="Classes to answer with, best first; 0 or absent: all.")
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None, description="What makes scores of logits: none is `raw_scores`; else only the model's own is taken."
    )

    @property
    def is_raw(self) -> bool:
        """Whether the response holds logits."""
        return bool(self.raw_scores) or self.function_to_apply == "none"

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters."""
        return super().pooling_params().clone(use_activation=False if self.is_raw else None)


class TeiRerankRequest(TeiModelBody):
    """TEI's body of POST /rerank: with `texts` in place of `documents`."""

    own_names: ClassVar = {
        **TeiModelBody.own_names,
        "input": "texts",
        "text_1": "query",
        "text_2": "texts",
        "use_activation": "raw_scores",
    }
    model_config = documented(
        {"query": "What holds back the water?", "texts": ["A gate.", "A song."], "return_text": True}
    )

    query: TextOrObject = Field(description="The query.")
    texts: Texts = Field(description="Texts.")
    raw_scores: Flag | None = Field(None, description="Answer with logits.")
    return_text: Flag | None = Field(None, description="Return each text.")
    top_n: Count | None = Field(None, description="Ranks to return; absent, 0 or more than there are texts: all.")
    instruction: str | None = Field(None, description="What to look for, for models that take an instruction.")

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters."""
        return super().pooling_params().clone(use_activation=False if self.raw_scores else None)


class TeiTokenizeRequest(TeiBody):
    """TEI's body of POST /tokenize."""

    model_config = documented({"inputs": "A gate holds the water."})

    inputs: TextOrTexts = Field(description="A text or a list of texts.")
    add_special_tokens: Flag | None = Field(None, description="Put the model's special tokens around (default).")
    prompt_name: str | None = Field(None, description="Named prompt of the model to put before every text.")


class TeiDecodeRequest(TeiBody):
    """Body of POST /decode."""

    own_names: ClassVar = {"input": "ids"}
    model_config = documented({"ids": [7, 8, 9]})

    ids: IdBatches = Field(description="Token ids of the served model, or a list of such lists.")
    skip_special_tokens: Flag | None = Field(None, description="Leave special tokens out (default).")


class TeiPrediction(BaseModel):
    """The score of one class."""

    score: float
    label: str


class TeiRank(BaseModel):
    """One text's place. Present only on request: `text`."""

    index: int = Field(description="Place of the text in the request.")
    score: float
    text: str | None = Field(None, description="With return_text only.")


class TeiSparseValue(BaseModel):
    """One entry of a sparse vector that is not zero."""

    index: int
    value: float


class TeiToken(BaseModel):
    """A token, and the characters of the text that it stands for."""

    id: int
    text: str = Field(description="Those characters; of a special token its name.")
    special: bool = Field(description="Put around the text by the tokenizer.")
    start: int | None
    stop: int | None


class TeiEmbeddingType(BaseModel):
    """An embedding model."""

    pooling: str


class TeiClassifierType(BaseModel):
    """A model with classes."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class TeiModelType(BaseModel):
    """The kind of the model, as the only key."""

    embedding: TeiEmbeddingType | None = None
    classifier: TeiClassifierType | None = None
    reranker: TeiClassifierType | None = None


class TeiInfo(BaseModel):
    """Answer of GET /info."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: TeiModelType
    max_concurrent_requests: int = Field(description="Inputs of full length that fit the queue.")
    max_input_length: int = Field(description="Tokens. Longest input.")
    max_batch_tokens: int = Field(description="Tokens in one forward.")
    max_batch_requests: int | None = Field(description="Inputs in one forward.")
    max_client_batch_size: int = Field(description="Inputs in one request.")
    auto_truncate: bool = Field(description="Whether over-long inputs are cut where a request does not say.")
    tokenization_workers: int
    version: str = Field(description="Of penstock.")
    sha: str | None
    docker_label: str | None
