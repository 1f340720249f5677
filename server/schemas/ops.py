"""Answers of the operator's routes."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Health(BaseModel):
    """Whether the server works, and the state of each engine by its shown name."""

    status: str = Field(examples=["ok"])
    engines: dict[str, str] = Field(examples=[{"all-MiniLM-L6-v2": "ready"}])


class Version(BaseModel):
    """The version of penstock."""

    version: str = Field(examples=["0.1.0"])
