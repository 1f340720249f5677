"""For whoever runs a server of several models: load one now, or let one go. On with --admin-key."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ...calls.context import context_of
from ...calls.model_cards import model_card
from ...schemas.admin import ModelRequest
from ...schemas.errors import ERROR_RESPONSES
from ...schemas.openai import ModelCard
from ...wire.json_route import JsonRoute, json_response

router = APIRouter(route_class=JsonRoute, tags=["operations"], responses=ERROR_RESPONSES)


@router.post("/models/load", response_model=ModelCard)
async def load(body: ModelRequest, request: Request) -> Response:
    """Loads a model and answers when it can serve. What it takes may make others go."""
    context = context_of(request)
    await context.models.load_now(body.model)
    return json_response(model_card(context, context.models.describe(body.model)))


@router.post("/models/unload", response_model=ModelCard)
async def unload(body: ModelRequest, request: Request) -> Response:
    """Unloads a model, a pinned one too, once the requests that it runs have ended. The next request loads it again."""
    context = context_of(request)
    await context.models.unload_now(body.model)
    return json_response(model_card(context, context.models.describe(body.model)))
