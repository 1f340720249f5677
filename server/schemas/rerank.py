"""Rerank as Cohere, Jina and vLLM clients send and read it.

Answers hold no key that Elasticsearch's strict Cohere parser does not know: `document` is there only on request.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from penstock.engine.params import PoolingParams

from .common import Count, PairBody, TextOrObject, Texts, Usage


class RerankRequest(PairBody):
    """Body of POST /rerank, /v1/rerank and /v2/rerank."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "all-MiniLM-L6-v2",
                    "query": "What holds back the water?",
                    "documents": ["A gate.", "A song.", {"text": "A dam."}],
                    "top_n": 2,
                    "return_documents": True,
                }
            ]
        }
    )

    query: TextOrObject = Field(description='The query: a text or {"text": ...}.')
    documents: Texts = Field(description='Texts or objects {"text": ...}. Each is cut to fit.')
    top_n: Count | None = Field(None, description="Results to return; absent, 0 or more than there are documents: all.")
    return_documents: bool | None = Field(None, description="Return the text of each document.")
    max_tokens_per_doc: Count | None = Field(
        None, description="Tokens. Cut each document to this many first; 0 or absent: only to fit."
    )

    def pooling_params(self) -> PoolingParams:
        """Returns what the request asks of pooling. Documents are cut to fit unless the request sets a limit."""
        params = super().pooling_params()
        return params if params.truncate_prompt_tokens is not None else params.clone(truncate_prompt_tokens=-1)


class RerankDocument(BaseModel):
    """A document as it was sent."""

    text: str


class RerankResult(BaseModel):
    """One document's place. Present only on request: `document`."""

    index: int = Field(description="Place of the document in the request.")
    relevance_score: float
    document: RerankDocument | None = Field(None, description="With return_documents only.")


class ApiVersion(BaseModel):
    """Cohere's API version."""

    version: str


class SearchUnits(BaseModel):
    """Cohere's unit: a query with up to 100 documents."""

    search_units: int


class RerankMeta(BaseModel):
    """Cohere's meta object."""

    api_version: ApiVersion
    billed_units: SearchUnits


class RerankResponse(BaseModel):
    """Answer of the rerank routes, best first."""

    id: str
    model: str
    results: list[RerankResult]
    meta: RerankMeta
    usage: Usage
