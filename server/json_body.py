"""Bodies whose schema is known only when they have been looked at."""

from __future__ import annotations

from typing import TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

Body = TypeVar("Body", bound=BaseModel)


def parsed(schema: type[Body], body: object) -> Body:
    """Returns a body by `schema`.

    Raises:
        RequestValidationError: As FastAPI raises it for the bodies that it checks itself.
    """
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        errors = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(errors, body=body) from error
