"""Rerank as Cohere, Jina, vLLM and Voyage clients send and read it.

Answers hold no key that Elasticsearch's strict Cohere parser does not know. The request tells whether they
hold `document` unasked: vLLM, Jina and SGLang return it, Cohere and Voyage do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field

from penstock.engine import PoolingParams

from ..dialects import COHERE, INFINITY, JINA, VLLM, VOYAGE, XINFERENCE, keys_ignored_by
from ..wire.json_schema import documented
from .inputs import Documents, TextOrObject, document_texts
from .options import Count, Flag, FlagOrWord, Listed, PairBody, Usage, truncated

_NO_DOCUMENTS: Final = {"rank_fields", "max_chunks_per_doc", "top_k"}
"""Keys of dialects that return documents on request only: Cohere's and Voyage's."""


class RerankRequest(PairBody):
    """Body of POST /rerank, /v1/rerank and /v2/rerank."""

    model_config = documented(
        {
            "model": "all-MiniLM-L6-v2",
            "query": "What holds back the water?",
            "documents": ["A gate.", "A song.", {"text": "A dam."}],
            "top_n": 2,
            "return_documents": True,
        },
        {
            "query": "Who wrote about water?",
            "documents": [
                {"title": "Of dams", "author": "A. Lock"},
                {"title": "Of songs", "author": "B. Flat"},
            ],
            "rank_fields": ["author", "title"],
        },
    )

    own_names: ClassVar = {"text_1": "query", "text_2": "documents", "input": "documents"}
    ignored_keys: ClassVar = keys_ignored_by(COHERE, JINA, VOYAGE, VLLM, INFINITY, XINFERENCE)

    query: TextOrObject = Field(description='The query: a text or {"text": ...}.')
    documents: Documents = Field(description='Texts or objects {"text": ...}. Each is cut to fit.')
    rank_fields: Listed[str] | None = Field(
        None, description="Fields of documents that are objects: their values are read as lines, in this order."
    )
    top_n: Count | None = Field(None, description="Results to return; absent, 0 or more than there are documents: all.")
    top_k: Count | None = Field(
        None, description="Voyage's name of `top_n`. A request that has it, be it null, gets Voyage's `data` as well."
    )
    truncation: Flag | None = Field(
        None, description="False refuses a document that is too long with its query; absent: it is cut to fit."
    )
    raw_scores: Flag | None = Field(None, description="True leaves the activation out, as use_activation: false does.")
    return_documents: FlagOrWord | None = Field(
        None,
        description=(
            "Return each document: its text, and what else it was sent with. Absent: yes, as Jina and vLLM do; no on "
            "/v2/rerank, and where the request has a key of Cohere's or Voyage's alone: rank_fields, "
            "max_chunks_per_doc or top_k."
        ),
    )
    max_chunks_per_doc: Count | None = Field(
        None,
        description=(
            "Read a document that does not fit in up to this many pieces, of which the best counts; 0, 1 or absent: "
            "cut it to fit."
        ),
    )

    instruct: str | None = Field(None, description="SGLang's name of `instruction`, which wins.")

    def wanted_instruction(self) -> str | None:
        """Returns the instruction of the request, in whichever place it stands."""
        wanted = super().wanted_instruction()
        return wanted if wanted or self.instruct is None else self.instruct

    def field_names(self) -> Mapping[str, str]:
        """See JsonBody: the instruction is named as the request did."""
        names = dict(super().field_names())
        if self.instruct is not None and self.wanted_instruction() is self.instruct:
            names["instruction"] = "instruct"
        return names

    def texts(self) -> list[str]:
        """Returns the text to rank of each document; see `document_texts`."""
        return document_texts(self.documents, self.rank_fields)

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters. Documents are cut to fit unless the request sets a limit."""
        params = super().pooling_params()
        if self.raw_scores and params.use_activation is None:
            params = params.clone(use_activation=False)
        return truncated(params, self.truncation is not False)

    def num_results(self) -> int | None:
        """Returns how many results to return; None: all."""
        return self.top_n or self.top_k or None

    def wants_documents(self, path: str) -> bool:
        """Returns whether the answer holds the documents: as asked for, or as the dialect of the request does unasked.

        Args:
            path: Of the request. /v2/rerank is Cohere's alone.
        """
        if self.return_documents is not None:
            return self.return_documents
        return not (path.startswith("/v2/") or _NO_DOCUMENTS & self.model_fields_set)

    def is_voyage(self) -> bool:
        """Returns whether a client of Voyage asks, which sends `top_k` always."""
        return "top_k" in self.model_fields_set


class RerankDocument(BaseModel):
    """A document as it was sent; of one without `text`, what was ranked of it stands there."""

    model_config = ConfigDict(extra="allow")

    text: str


class RerankResult(BaseModel):
    """One document's place."""

    index: int = Field(description="Place of the document in the request.")
    relevance_score: float
    document: RerankDocument | None = Field(None, description="Unless return_documents, or its default, says no.")


class VoyageResult(BaseModel):
    """One document's place as Voyage writes it. Present only on request: `document`."""

    index: int
    relevance_score: float
    document: str | None = Field(None, description="With return_documents only.")


class ApiVersion(BaseModel):
    """Cohere's API version."""

    version: str


class SearchUnits(BaseModel):
    """Cohere's unit: a query with up to 100 documents."""

    search_units: int


class VersionMeta(BaseModel):
    """Cohere's meta object where nothing is billed."""

    api_version: ApiVersion


class RerankMeta(VersionMeta):
    """Cohere's meta object."""

    billed_units: SearchUnits


class RerankResponse(BaseModel):
    """Answer of the rerank routes, best first."""

    id: str
    model: str
    results: list[RerankResult]
    data: list[VoyageResult] | None = Field(None, description="The results again; only where the request has top_k.")
    meta: RerankMeta
    usage: Usage
