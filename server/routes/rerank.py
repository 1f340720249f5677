"""Rerank routes for Cohere, Jina, vLLM, Voyage and TEI clients, and score routes for vLLM clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from fastapi import Request, Response
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, Tag

from penstock.engine import PoolingParams, PoolingTask
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.params import TextOrImage

from ..calls.images import read_images
from ..calls.limits import check_num_inputs
from ..calls.model_call import RERANKERS, ModelCall
from ..dialects import COHERE, INFINITY, JINA, SGLANG, SILICONFLOW, TEI, VLLM, VOYAGE, XINFERENCE, keys_ignored_by
from ..errors import DEFAULT_TAG, TEI_TAG, quote
from ..http.json_body import by_keys
from ..response_size import size_of_scores, size_of_texts
from ..routing import BatchUse, RouteOptions, Router
from ..schemas import json_schema
from ..schemas.images import OBJECT_KEYS, Image, MixedContent, parse_content
from ..schemas.inputs import Documents, document_contents, parse_rank_fields, parse_text_or_image, parse_texts
from ..schemas.json_schema import Parsed, body_config
from ..schemas.options import (
    Count,
    FailFastList,
    Flag,
    FlagOrText,
    ListResponse,
    PairBody,
    Usage,
    VersionMeta,
    one_value,
    truncated,
    with_raw_scores,
)
from ..schemas.tei_bodies import TeiRank, TeiRerankRequest
from .tei import RERANK, TEI_HEADERS, rerank_texts

_NO_DOCUMENTS: Final = {"rank_fields", "max_chunks_per_doc", "top_k"}
"""Keys of Cohere and Voyage: these dialects return documents on request only."""


def parse_query(value: Any) -> str | Image:
    """Returns the text or the images of a query."""
    content = parse_text_or_image(value, "")
    if not isinstance(content, str | Image):
        raise ValueError(f'must be a text, {{"text": ...}} or {{"image": ...}}, not {quote(value)}')
    return content


Query = Annotated[str | Image, Parsed(parse_query, json_schema.QUERY)]


class RerankRequest(PairBody):
    """Body of POST /rerank, /v1/rerank and /v2/rerank."""

    model_config = body_config(
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

    param_names: ClassVar = {"text_1": "query", "text_2": "documents", "input": "documents"}
    ignored_keys: ClassVar = keys_ignored_by(COHERE, JINA, VOYAGE, VLLM, INFINITY, XINFERENCE, SGLANG, SILICONFLOW)

    # The objects in `documents` may have any keys: `rank_fields` names some, and the response returns all.
    nested_keys: ClassVar = {"query": OBJECT_KEYS}

    query: Query = Field(description='The query: a text, {"text": ...}, {"image": ...} or {"content": [...]}.')
    documents: Documents = Field(
        description='Texts or objects {"text": ...} or {"image": ...}. Long documents are truncated.'
    )
    rank_fields: Annotated[FailFastList[str], AfterValidator(parse_rank_fields)] | None = Field(
        None,
        description=(
            "Up to 64 fields to rank of documents that are objects. Each value becomes one line of the text, in this "
            "order."
        ),
    )
    top_n: Count | None = Field(
        None, description="Number of results. Absent, 0 or more than the number of documents: all."
    )
    top_k: Count | None = Field(
        None,
        description=(
            "Voyage's name for `top_n`. If the key is present, even as null, the response also has Voyage's `data`."
        ),
    )
    truncation: Flag | None = Field(
        None,
        description=(
            "False rejects a document that does not fit together with the query. Absent: documents are truncated."
        ),
    )
    raw_scores: Flag | None = Field(None, description="True returns logits, as `use_activation: false` does.")
    return_documents: FlagOrText | None = Field(
        None,
        description=(
            "Return each document with all of its fields. Absent: true as in Jina and vLLM, but false on /v2/rerank "
            "and if the request has a key that only Cohere or Voyage uses: rank_fields, max_chunks_per_doc or top_k."
        ),
    )
    max_chunks_per_doc: Count | None = Field(
        None,
        description=(
            "Split a document that does not fit into up to this many chunks; the score is that of the best chunk. 0, 1 "
            "or absent: truncate the document. new-api's name is `max_chunk_per_doc`."
        ),
        validation_alias=AliasChoices("max_chunks_per_doc", "max_chunk_per_doc"),
    )
    instruct: str | None = Field(None, description="SGLang's name for `instruction`.")

    def instructions(self) -> dict[str, str | None]:
        """Adds SGLang's name."""
        return {**super().instructions(), "instruct": self.instruct or None}

    def field_names(self) -> Mapping[str, str]:
        """Maps `instruction` to the first name that the request uses."""
        used = (name for name, value in self.instructions().items() if value is not None)
        return {**super().field_names(), "instruction": next(used, "instruction")}

    def contents(self) -> list[str | Image]:
        """Returns the text or image of each document; see `document_contents`."""
        return document_contents(self.documents, self.rank_fields)

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters. Documents are truncated to fit unless the request sets a limit."""
        params = with_raw_scores(super().pooling_params(), self.raw_scores)
        return truncated(params, self.truncation is not False, "truncation")

    def num_results(self) -> int | None:
        """Returns the number of results; None: all. Raises InvalidRequestError if `top_n` and `top_k` differ."""
        return one_value({"top_n": self.top_n or None, "top_k": self.top_k or None})

    def wants_documents(self, path: str) -> bool:
        """Returns whether the response holds the documents: as the request states, or else the dialect's default.

        Args:
            path: Path of the request. Only Cohere uses /v2/rerank.
        """
        if self.return_documents is not None:
            return self.return_documents
        return not (path.startswith("/v2/") or _NO_DOCUMENTS & self.model_fields_set)

    def is_voyage(self) -> bool:
        """Returns whether the client is Voyage's: it always sends `top_k`."""
        return "top_k" in self.model_fields_set


class RerankDocument(BaseModel):
    """A document as it was sent. If it has neither `text` nor an image, `text` is the text that was ranked."""

    model_config = ConfigDict(extra="allow")

    text: str | None = None


class RerankResult(BaseModel):
    """The score of one document."""

    index: int = Field(description="Index of the document in the request.")
    relevance_score: float
    document: RerankDocument | None = Field(None, description="Absent if return_documents or its default is false.")


class VoyageResult(BaseModel):
    """The score of one document in Voyage's format."""

    index: int
    relevance_score: float
    document: str | None = Field(None, description="With return_documents only. Absent for an image.")


class SearchUnits(BaseModel):
    """Cohere's unit: a query with up to 100 documents."""

    search_units: int


class RerankMeta(VersionMeta):
    """Cohere's meta object."""

    billed_units: SearchUnits


class RerankResponse(BaseModel):
    """Response of the rerank routes, best first."""

    id: str
    model: str
    results: list[RerankResult]
    data: list[VoyageResult] | None = Field(
        None, description="The results in Voyage's format, only if the request has top_k."
    )
    meta: RerankMeta
    usage: Usage


_PAIRS: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def parse_score_side(value: Any) -> list[str | Image]:
    """Returns the texts and images of one side. Entries may also be vLLM's objects `{"content": [...]}`.

    A single object with several parts and an image becomes one entry per part, as in vLLM.
    """
    if not isinstance(value, list):
        content = parse_text_or_image(value, "")
        if isinstance(content, MixedContent) and isinstance(value.get("content"), list):
            return [parse_content([part], f".content[{i}]") for i, part in enumerate(value["content"])]
        if isinstance(content, str | Image):
            return [content]
        return [*parse_texts(content)]
    entries = [parse_text_or_image(entry, f"[{i}]") for i, entry in enumerate(value)]
    texts = parse_texts(["" if isinstance(entry, Image) else entry for entry in entries])
    return [entry if isinstance(entry, Image) else text for entry, text in zip(entries, texts, strict=True)]


ScoreSide = Annotated[list[str | Image], Parsed(parse_score_side, json_schema.SCORE_SIDE)]


class ScoreRequest(PairBody):
    """Body of POST /score: one pair of fields with 1 and 1, 1 and N, or N and N texts."""

    model_config = body_config(
        {"text_1": "What holds back the water?", "text_2": ["A gate.", "A song."]},
        {"queries": ["red", "blue"], "documents": ["a red door", "a blue door"]},
        exactly_one=(*_PAIRS,),
    )

    ignored_keys: ClassVar = keys_ignored_by(VLLM, SGLANG)
    nested_keys: ClassVar = {side: OBJECT_KEYS for pair in _PAIRS for side in pair}

    text_1: ScoreSide | None = Field(None, description="Queries. Used with `text_2`.")
    text_2: ScoreSide | None = Field(None, description="Documents.")
    queries: ScoreSide | None = Field(None, description="Other name for `text_1`. Used with `documents` or `items`.")
    documents: ScoreSide | None = Field(None, description="Other name for `text_2`.")
    items: ScoreSide | None = Field(None, description="Other name for `text_2`.")
    data_1: ScoreSide | None = Field(None, description="Other name for `text_1`. Used with `data_2`.")
    data_2: ScoreSide | None = Field(None, description="Other name for `text_2`.")
    encoding_format: Literal["float"] | None = Field(
        None, description="Accepted because vLLM's documentation shows it. Scores are JSON numbers."
    )

    def field_names(self) -> Mapping[str, str]:
        """Names the sides of a pair as the body does, such as `text_1`."""
        pairs = self._given_pairs()
        return dict(zip(_PAIRS[0], pairs[0], strict=True)) if len(pairs) == 1 else {}

    def sides(self) -> tuple[str, str]:
        """Returns the field names of the two sides.

        Raises:
            InvalidRequestError: The body does not have exactly one pair, or a further name has another value.
        """
        pairs = self._given_pairs()
        if len(pairs) != 1:
            names = "; ".join(f"{a} and {b}" for a, b in _PAIRS)
            raise InvalidRequestError(f"Give exactly one of these pairs of fields: {names}.", param="text_1")
        for names_of_side in zip(*_PAIRS, strict=True):
            one_value({name: getattr(self, name) or None for name in names_of_side})
        return pairs[0]

    def _given_pairs(self) -> list[tuple[str, str]]:
        return [(a, b) for a, b in _PAIRS if getattr(self, a) and getattr(self, b)]


class ScoreRow(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(ListResponse[ScoreRow]):
    """Response of POST /score, in the order of the pairs."""


router = Router(COHERE, tag="rerank")

RerankBody = Annotated[
    Annotated[RerankRequest, Tag(DEFAULT_TAG)] | Annotated[TeiRerankRequest, Tag(TEI_TAG)],
    by_keys({"texts": TEI_TAG}, otherwise=DEFAULT_TAG),
]

_RERANK: Final[RouteOptions] = {
    "by_key": {"texts": TEI},
    "batch_use": BatchUse.TASK,
    "response_model": RerankResponse | list[TeiRank],
    "responses": TEI_HEADERS,
}
DOCUMENTS_PER_SEARCH_UNIT: Final = 100
_MAX_CHARS_PER_TOKEN: Final = 64
_MIN_CHARS: Final = 65_536
"""Minimum number of characters to tokenize of a text before truncation: it may start with many blanks."""
_TEXTS_PER_CALL: Final = 32
_FEWER_DOCUMENTS: Final = "Send fewer documents at once, or set return_documents to false."


@router.task("/v2/rerank", **_RERANK)
@router.task("/v1/rerank", **_RERANK)
@router.task("/rerank", **_RERANK)
async def rerank(body: RerankBody, request: Request) -> Response:
    """Sorts documents by relevance to a query, best first. A body with `texts` instead of `documents` is TEI's."""
    if isinstance(body, TeiRerankRequest):
        return await rerank_texts(body, request)
    check_num_inputs(request, body.documents, "documents")
    contents = body.contents()
    call = await ModelCall.start(request, body.model, RERANKERS)
    path = request.scope["path"]
    with_documents = body.wants_documents(path)
    if not body.return_documents:  # images are returned on request only
        pairs = zip(contents, body.documents, strict=True)
        body.documents[:] = ["" if isinstance(content, Image) else document for content, document in pairs]
    call.reserve(size_of_scores(len(contents)), param="documents")
    if with_documents:
        size = size_of_texts(body.documents, body.num_results(), num_encodings=2 if body.is_voyage() else 1)
        call.reserve(size, param="documents", remedy=_FEWER_DOCUMENTS)
    inputs = await read_images(call, contents, "documents")
    texts = [document if isinstance(document, str) else None for document in inputs]
    if not with_documents:
        # Free the other fields of documents early: the body may stay in the queue for seconds.
        body.documents[:] = [text or "" for text in texts]
    options = replace(
        call.options(instruction=body.requested_instruction(), priority=body.priority),
        max_passages=body.max_chunks_per_doc or 1,
    )
    queries = await _truncate_texts(call, await read_images(call, [body.query], "query"), body.max_tokens_per_query)
    documents = await _truncate_texts(call, inputs, body.max_tokens_per_doc)
    result = await call.engine.score(queries, documents, body.pooling_params(), options)
    num_tokens = call.record_usage(RERANK, result)
    best = np.argsort(-result.scores, kind="stable")[: body.num_results()].tolist()
    scores: list[np.float32] = list(result.scores)
    version = "2" if path.startswith("/v2") else "1"
    units = math.ceil(len(body.documents) / DOCUMENTS_PER_SEARCH_UNIT)
    fields = call.response_fields("rerank", num_tokens)
    response: dict[str, Any] = {
        **{key: fields[key] for key in ("id", "model", "usage")},
        "results": (
            _row(body, texts, i, scores[i], with_document=with_documents and _is_returned(body, texts[i])) for i in best
        ),
        "meta": {
            "api_version": {"version": version},
            "billed_units": {"search_units": units},
            **call.truncation_warnings(),
        },
    }
    if body.is_voyage():
        response["data"] = (_voyage_row(texts, i, scores[i], with_document=with_documents) for i in best)
    return call.respond(response)


@router.task("/v1/score", dialect=VLLM, tags=["score"], batch_use=BatchUse.TASK, response_model=ScoreResponse)
@router.task("/score", dialect=VLLM, tags=["score"], batch_use=BatchUse.TASK, response_model=ScoreResponse)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Scores pairs of texts, with a cross-encoder or by the cosine of embeddings."""
    left, right = sides = body.sides()
    for side in sides:
        check_num_inputs(request, getattr(body, side), side)
    call = await ModelCall.start(request, body.model, RERANKERS)
    options = call.options(instruction=body.requested_instruction(), priority=body.priority)
    call.reserve(size_of_scores(max(len(getattr(body, side)) for side in sides)), param=right)
    queries: Sequence[TextOrImage] = await read_images(call, getattr(body, left), left)
    documents: Sequence[TextOrImage] = await read_images(call, getattr(body, right), right)
    queries = await _truncate_texts(call, queries, body.max_tokens_per_query)
    documents = await _truncate_texts(call, documents, body.max_tokens_per_doc)
    result = await call.engine.score(queries, documents, body.pooling_params(), options)
    num_tokens = call.record_usage(PoolingTask.SCORE, result)
    rows = ({"index": i, "object": "score", "score": value} for i, value in enumerate(result.scores))
    return call.respond({**call.response_fields("score", num_tokens), "data": rows})


async def _truncate_texts(
    call: ModelCall, inputs: Sequence[TextOrImage], max_num_tokens: int | None
) -> Sequence[TextOrImage]:
    """Truncates each text to `max_num_tokens` tokens, and counts the truncated texts. Images stay.

    Args:
        call: Its engine tokenizes.
        inputs: Texts and images.
        max_num_tokens: Limit without special tokens. None or 0: no truncation. Characters far beyond the limit are not
            tokenized.
    """
    if not max_num_tokens or max_num_tokens >= call.info.max_model_len:
        return inputs
    max_chars = max(_MAX_CHARS_PER_TOKEN * max_num_tokens, _MIN_CHARS)
    texts = {i: text for i, text in enumerate(inputs) if isinstance(text, str)}
    read = {i: text[:max_chars] for i, text in texts.items()}
    indices = list(read)
    token_ids: dict[int, list[int]] = {}
    # The ids of all texts at once would take ten times the memory of the texts.
    for start in range(0, len(indices), _TEXTS_PER_CALL):
        some = indices[start : start + _TEXTS_PER_CALL]
        batch = await call.engine.tokenize([read[i] for i in some], add_special_tokens=False)
        token_ids |= {i: ids[: max_num_tokens + 1] for i, ids in zip(some, batch, strict=True)}
    too_long = [i for i, ids in token_ids.items() if len(ids) > max_num_tokens]
    cut = await call.engine.detokenize([token_ids[i][:max_num_tokens] for i in too_long])
    replaced = dict(zip(too_long, cut, strict=True))
    call.truncated.add(sum(i in replaced or len(read[i]) < len(text) for i, text in texts.items()))
    return [replaced.get(i, read.get(i, item)) for i, item in enumerate(inputs)]


def _is_returned(body: RerankRequest, text: str | None) -> bool:
    return text is not None or body.return_documents is True


def _row(
    body: RerankRequest, texts: list[str | None], index: int, score: np.float32, *, with_document: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {"index": index, "relevance_score": score}
    if with_document:
        sent = body.documents[index]
        fields = sent if isinstance(sent, dict) else {}
        is_complete = isinstance(fields.get("text"), str) or texts[index] is None
        row["document"] = fields if is_complete else {**fields, "text": texts[index]}
    return row


def _voyage_row(texts: list[str | None], index: int, score: np.float32, *, with_document: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"index": index, "relevance_score": score}
    return {**row, "document": texts[index]} if with_document and texts[index] is not None else row
