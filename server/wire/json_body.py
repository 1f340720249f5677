"""Checks bodies against their schema without FastAPI, whose error it raises."""

from __future__ import annotations

from typing import TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

Body = TypeVar("Body", bound=BaseModel)


def parsed(schema: type[Body], body: object) -> Body:
    """Returns a body by `schema`.

    Raises:
        RequestValidationError: See `invalid_body`.
    """
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise invalid_body(error, body) from error


def invalid_body(error: ValidationError, body: object) -> RequestValidationError:
    """Returns what FastAPI raises for the bodies that it checks itself."""
    errors = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors(include_url=False)]
    return RequestValidationError(errors, body=body)
