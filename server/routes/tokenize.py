"""Text to tokens and back on the paths that vLLM, TEI and Cohere share: a key of the body tells its dialect."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response
from pydantic import Tag

from penstock.engine import AsyncEngine

from ..calls.call import Call
from ..calls.inputs import check_messages
from ..calls.sizes import FEWER_IDS, check_num_chars, check_num_ids, check_num_tokens, size_of_texts, size_of_tokens
from ..dialects import TEI, VLLM
from ..routing import Router
from ..schemas.cohere import CohereTokenizeRequest, CohereTokenizeResponse
from ..schemas.tei import TeiToken, TeiTokenizeRequest
from ..schemas.vllm import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from ..wire.json_bodies import COHERE_TAG, OWN_TAG, TEI_TAG, by_keys
from . import cohere, tei

router = Router(VLLM, tag="tokenize")

TokenizeBody = Annotated[
    Annotated[TokenizeRequest, Tag(OWN_TAG)]
    | Annotated[TeiTokenizeRequest, Tag(TEI_TAG)]
    | Annotated[CohereTokenizeRequest, Tag(COHERE_TAG)],
    by_keys({"inputs": TEI_TAG, "text": COHERE_TAG}, otherwise=OWN_TAG),
]


@router.post(
    "/tokenize",
    by_key={"inputs": TEI},
    response_model=TokenizeResponse | list[list[TeiToken]] | CohereTokenizeResponse,
)
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Returns the tokens of a text. `prompt` and `messages` get vLLM's answer, `inputs` TEI's, `text` Cohere's."""
    match body:
        case TeiTokenizeRequest():
            return await tei.tokenize_texts(body, request)
        case CohereTokenizeRequest():
            return await cohere.tokenize(body, request)
    call = await Call.start(request, body.model)
    body.check_given()
    check_messages(call, body)
    ids, strings = await call.watch(_tokens(call.engine, body))
    call.reserve(size_of_tokens(len(ids)), param="prompt" if body.messages is None else "messages")
    content = {"count": len(ids), "max_model_len": call.info.max_model_len, "tokens": ids, "token_strs": strings}
    return call.respond(content)


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Returns the text of tokens, in vLLM's answer; /v1/detokenize gives Cohere's and /decode TEI's."""
    call = await Call.start(request, body.model)
    check_num_ids(len(body.tokens), "tokens")
    text = ""
    if body.tokens:
        (text,) = await call.watch(call.engine.detokenize([body.tokens], skip_special_tokens=False))
    call.reserve(size_of_texts([text]), param="tokens", way_out=FEWER_IDS)
    return call.respond({"prompt": text})


async def _tokens(engine: AsyncEngine, body: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    """Returns the ids and, if they are asked for, the strings of the tokens."""
    text, adds_special = body.prompt or "", body.add_special_tokens is not False
    if body.messages is not None:
        (text,) = await engine.render_chats(body.messages, body.chat_options())
        adds_special = bool(body.add_special_tokens)
    param = "prompt" if body.messages is None else "messages"
    check_num_chars(len(text), param)

    def check(num_tokens: int) -> None:
        check_num_tokens(num_tokens, param)

    if not body.return_token_strs:
        (ids,) = await engine.tokenize([text], add_special_tokens=adds_special, on_count=check)
        return ids, None
    (details,) = await engine.tokenize_details([text], add_special_tokens=adds_special, on_count=check)
    return details.token_ids, details.tokens
