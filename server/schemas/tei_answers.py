"""What TEI's routes answer with; most of them with bare lists of these."""

from __future__ import annotations

from pydantic import BaseModel, Field


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
