"""Bodies of Text Embeddings Inference (TEI) and of the Inference API.

Most responses are bare lists. Options are fields of the body or, as in the Inference API, of `parameters`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from penstock.engine import PoolingParams

from ..dialects import TEI, keys_ignored_by
from ..errors import TEI_TAG
from ..http.json_body import NO_UNKNOWN_KEYS
from .inputs import (
    IdBatches,
    NonEmptyInputs,
    NonEmptyText,
    NonEmptyTexts,
    SequenceInputs,
    TextOrObject,
    TextOrTexts,
    Texts,
    TruncationSide,
)
from .json_schema import body_config
from .options import PRIORITY, Count, Flag, Priority, RequestBody, Width, contradiction


class TeiBody(RequestBody):
    """Base of TEI's bodies."""

    tag: ClassVar[str] = TEI_TAG
    param_names: ClassVar = {"input": "inputs"}
    ignored_keys: ClassVar = keys_ignored_by(TEI)


class TeiModelBody(TeiBody):
    """Options of all routes that run the model."""

    param_names: ClassVar = {
        "input": "inputs",
        "truncate_prompt_tokens": "truncate",
        "truncation_side": "truncation_direction",
        "cut_to_fit": "truncate to true",
    }

    truncate: Flag | None = Field(
        None, description="Truncate inputs that are too long (default). False rejects such inputs."
    )
    truncation_direction: TruncationSide | None = Field(None, description="Side at which inputs are truncated.")
    parameters: dict[str, Any] | None = Field(None, description="The options in the form of the Inference API.")
    priority: Priority | None = PRIORITY

    @model_validator(mode="before")
    @classmethod
    def _with_parameters(cls, body: Any) -> Any:
        if not isinstance(body, dict) or not isinstance(parameters := body.get("parameters"), dict):
            return body
        fields, others = (
            {name: value for name, value in part.items() if value is not None} for part in (body, parameters)
        )
        for name in fields.keys() & others.keys():
            if fields[name] != others[name] or isinstance(fields[name], bool) != isinstance(others[name], bool):
                raise contradiction(name, fields[name], f"parameters.{name}", others[name])
        return {**others, **fields}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns the JSON Schema. `parameters` has the optional fields of the body."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        fields = schema["properties"]
        options = {name: fields[name] for name in fields if name not in (*schema["required"], "parameters")}
        fields["parameters"]["anyOf"][0] = {
            "type": "object",
            "properties": copy.deepcopy(options),
            **NO_UNKNOWN_KEYS,
        }
        return schema

    def pooling_params(self) -> PoolingParams:
        """Returns parameters that truncate long inputs unless `truncate` is false."""
        is_cut = self.truncate is not False
        return PoolingParams(
            truncate_prompt_tokens=-1 if is_cut else None,
            reject_too_long=not is_cut,
            truncation_side=self.truncation_direction,
        )


class TeiTokenEmbedRequest(TeiModelBody):
    """Body of POST /embed_all and /embed_sparse."""

    model_config = body_config({"inputs": ["A gate holds the water."]})
    nested_keys: ClassVar[Mapping[str, Collection[str]]] = {"inputs": ("text",)}

    inputs: NonEmptyInputs = Field(
        description="A text, a list of texts, the token ids of one text, or a list of such lists. No text may be empty."
    )
    prompt_name: str | None = Field(None, description="Name of a prompt of the model. It is put before every text.")


class TeiEmbedRequest(TeiTokenEmbedRequest):
    """Body of POST /embed."""

    model_config = body_config(
        {"inputs": ["A gate holds the water.", "A pipe carries it."], "truncate": True},
        {"inputs": "One text is fine too.", "normalize": False},
    )

    normalize: Flag | None = Field(None, description="L2-normalise (default), independent of the model's files.")
    dimensions: Width | None = Field(
        None,
        description=(
            "Number of dimensions of the embeddings. As in TEI, any model accepts it, but only Matryoshka models "
            "support it well."
        ),
    )
    encoding_format: Literal["float"] | None = Field(
        None, description="Sent by Hugging Face's client. Responses are always numbers."
    )

    def pooling_params(self) -> PoolingParams:
        """Adds the width, which may be any for every model, and the normalisation, which is on by default."""
        normalize = self.normalize is not False
        return super().pooling_params().clone(dimensions=self.dimensions, any_dimensions=True, normalize=normalize)


class TeiSentences(BaseModel):
    """A sentence and the sentences to compare with it."""

    model_config = ConfigDict(json_schema_extra=NO_UNKNOWN_KEYS)

    source_sentence: NonEmptyText
    sentences: NonEmptyTexts = Field(min_length=1)


class TeiSimilarityRequest(TeiModelBody):
    """Body of POST /similarity."""

    model_config = body_config({"inputs": {"source_sentence": "A gate.", "sentences": ["A dam.", "A song."]}})

    nested_keys: ClassVar = {"inputs": ("source_sentence", "sentences")}

    inputs: TeiSentences
    prompt_name: str | None = Field(None, description="Name of a prompt of the model. It is put before every sentence.")


class TeiPredictRequest(TeiModelBody):
    """Body of POST /predict."""

    model_config = body_config(
        {"inputs": "I love this."},
        {"inputs": [["I love this."], ["It rains.", "The street is wet."]], "raw_scores": True},
    )

    inputs: SequenceInputs = Field(description="A text, a pair [text, text], or a list of [text] and [text, text].")
    raw_scores: Flag | None = Field(None, description="Return logits instead of probabilities.")
    top_k: Count | None = Field(None, description="Number of classes to return, best first. 0 or absent: all.")
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None,
        description=(
            "Activation of the scores. none is the same as `raw_scores`. Other values must match the model's own "
            "activation."
        ),
    )

    @property
    def is_raw(self) -> bool:
        """Whether the response holds logits."""
        return bool(self.raw_scores) if self.function_to_apply is None else self.function_to_apply == "none"

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters. Raises InvalidRequestError if `function_to_apply` and `raw_scores` differ."""
        if None not in (self.raw_scores, self.function_to_apply) and self.is_raw is not self.raw_scores:
            raise contradiction("raw_scores", self.raw_scores, "function_to_apply", self.function_to_apply)
        return super().pooling_params().clone(use_activation=False if self.is_raw else None)


class TeiRerankRequest(TeiModelBody):
    """TEI's body of POST /rerank, with `texts` instead of `documents`."""

    param_names: ClassVar = {
        **TeiModelBody.param_names,
        "input": "texts",
        "text_1": "query",
        "text_2": "texts",
        "use_activation": "raw_scores",
    }
    model_config = body_config(
        {"query": "What holds back the water?", "texts": ["A gate.", "A song."], "return_text": True}
    )

    nested_keys: ClassVar = {"query": ("text",), "texts": ("text",)}

    query: TextOrObject = Field(description="The query.")
    texts: Texts = Field(description="Texts.")
    raw_scores: Flag | None = Field(None, description="Return logits.")
    return_text: Flag | None = Field(None, description="Return each text.")
    top_n: Count | None = Field(
        None, description="Number of ranks to return. Absent, 0 or more than the number of texts: all."
    )
    instruction: str | None = Field(None, description="Ranking instruction, for models that take one.")

    def pooling_params(self) -> PoolingParams:
        """Adds the activation: scores are logits with `raw_scores`."""
        return super().pooling_params().clone(use_activation=False if self.raw_scores else None)


class TeiTokenizeRequest(TeiBody):
    """TEI's body of POST /tokenize."""

    model_config = body_config({"inputs": "A gate holds the water."})
    nested_keys: ClassVar = {"inputs": ("text",)}

    inputs: TextOrTexts = Field(description="A text or a list of texts.")
    add_special_tokens: Flag | None = Field(None, description="Add the model's special tokens (default).")
    prompt_name: str | None = Field(None, description="Name of a prompt of the model. It is put before every text.")


class TeiDecodeRequest(TeiBody):
    """Body of POST /decode."""

    param_names: ClassVar = {"input": "ids"}
    model_config = body_config({"ids": [7, 8, 9]})

    ids: IdBatches = Field(description="Token ids of the served model, or a list of such lists.")
    skip_special_tokens: Flag | None = Field(None, description="Leave special tokens out (default).")


class TeiPrediction(BaseModel):
    """The score of one class."""

    score: float
    label: str


class TeiRank(BaseModel):
    """The rank of one text."""

    index: int = Field(description="Index of the text in the request.")
    score: float
    text: str | None = Field(None, description="With return_text only.")


class TeiSparseValue(BaseModel):
    """One entry of a sparse vector that is not zero."""

    index: int
    value: float


class TeiToken(BaseModel):
    """A token and its characters in the text."""

    id: int
    text: str = Field(description="The characters of the token. For a special token, its name.")
    special: bool = Field(description="Whether it is a special token that the tokenizer added.")
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
    """The type of the model, as the only key."""

    embedding: TeiEmbeddingType | None = None
    classifier: TeiClassifierType | None = None
    reranker: TeiClassifierType | None = None


class TeiInfo(BaseModel):
    """Response of GET /info."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: TeiModelType
    max_concurrent_requests: int = Field(description="Number of inputs of maximum length that fit in the queue.")
    max_input_length: int = Field(description="Longest input in tokens.")
    max_batch_tokens: int = Field(description="Maximum tokens in one forward.")
    max_batch_requests: int | None = Field(description="Maximum inputs in one forward.")
    max_client_batch_size: int = Field(description="Maximum inputs in one request.")
    auto_truncate: bool = Field(description="Whether inputs that are too long are truncated by default.")
    tokenization_workers: int
    version: str = Field(description="Version of penstock.")
    sha: str | None
    docker_label: str | None
