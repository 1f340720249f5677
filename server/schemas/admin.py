"""What is said about models to a server that runs, in llama.cpp's words."""

from __future__ import annotations

from pydantic import Field

from ..wire.json_bodies import JsonBody
from ..wire.json_schema import documented


class ModelRequest(JsonBody):
    """Body of POST /models/load and /models/unload."""

    model_config = documented({"model": "all-MiniLM-L6-v2"})

    model: str = Field(description="One of its names.")
