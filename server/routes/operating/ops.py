"""For operators and orchestrators: health, metrics, version."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from ...calls.context import context_of
from ...wire.json_route import json_response
from ...wire.version import penstock_version

router = APIRouter(tags=["operations"])


class ReplicaHealth(BaseModel):
    """One of several replicas of an engine: where it is in its life, and where it runs."""

    state: str = Field(examples=["ready"])
    place: str = Field(examples=["cuda:0"])


class Health(BaseModel):
    """Whether the server works, and the state of each model by its shown name: ready while one of its replicas is."""

    status: str = Field(examples=["ok"])
    engines: dict[str, str] = Field(examples=[{"all-MiniLM-L6-v2": "ready"}])
    replicas: dict[str, list[ReplicaHealth]] | None = Field(
        None, description="Of engines that have several; absent where none has."
    )


class Version(BaseModel):
    """The version of penstock."""

    version: str = Field(examples=["0.1.0"])


_UNHEALTHY: Final[dict[int | str, dict[str, Any]]] = {503: {"model": Health, "description": "Not healthy."}}


@router.get("/health/live", response_model=Health, responses=_UNHEALTHY)
@router.head("/health/live", include_in_schema=False)
async def live(request: Request) -> Response:
    """200 while the process works: an engine that is being loaded does not count, but all given up do."""
    return _health(request, is_good=context_of(request).models.is_alive)


@router.get("/health/ready", response_model=Health, responses=_UNHEALTHY)
@router.get("/health", response_model=Health, responses=_UNHEALTHY)
@router.get("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
@router.head("/health/ready", include_in_schema=False)
@router.head("/health", include_in_schema=False)
async def ready(request: Request) -> Response:
    """200 when a model takes requests, or will be loaded for them; 503 while the server starts or drains.

    Of several models one may be down: `engines` tells which.
    """
    return _health(request, is_good=context_of(request).models.is_ready)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Figures in Prometheus' text format."""
    return Response(await context_of(request).metrics.scrape(), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/version", response_model=Version)
async def get_version() -> Response:
    """The version of penstock."""
    return json_response({"version": penstock_version()})


def _health(request: Request, *, is_good: bool) -> Response:
    models = context_of(request).models
    body: dict[str, Any] = {"status": "ok" if is_good else "unavailable", "engines": models.states()}
    replicas = {
        name: [{"state": replica.state, "place": replica.place} for replica in engine.replicas]
        for engine, name in models.named_engines()
        if engine.replicas
    }
    response = json_response(body | {"replicas": replicas} if replicas else body)
    response.status_code = 200 if is_good else 503
    return response
