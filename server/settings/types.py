"""What a value of a setting may be, as the command line and the environment give it: lists, sizes, origins, places."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    NonNegativeFloat,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_settings import NoDecode

from penstock.engine.protocol.config import PLACE

_ORIGIN: Final = re.compile(r"https?://[^\s/?#@]+")


def listed(value: object) -> object:
    """Splits `a,b` and flattens repeated flags into one list of names."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return tuple(name.strip() for part in parts for name in str(part).split(",") if name.strip())


def _served_names(value: object) -> object:
    """Refuses a list that was given but names nothing."""
    names = listed(value)
    if not names and value != ():
        raise ValueError("holds no name; give a name, or leave it out to serve the model under its own")
    return names


def _size(value: object, parse: ValidatorFunctionWrapHandler) -> object:
    try:
        return parse(value)
    except ValidationError as error:
        raise ValueError("must be a size such as 2GiB or 500MB") from error


def _template(value: str) -> str:
    """Returns a template, read from its file unless it stands there itself."""
    if "{" in value:
        return value
    try:
        return Path(value).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"is neither a template nor a file of UTF-8 text that can be read: {error}") from error


def _origins(value: tuple[str, ...]) -> tuple[str, ...]:
    """Refuses what no browser sends as an Origin: it would never match."""
    for origin in value:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is no origin; write it as https://host or http://host:port, or * for all")
    return value


def _url(value: str) -> str:
    if not re.match(r"https?://[^\s/]", value):
        raise ValueError("must begin with http:// or https:// and name a host")
    return value


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("must be auto, cpu, cuda or cuda:N, such as cuda:1")
    return value


def _devices(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(PLACE.fullmatch, value)) or len({place.partition(":")[0] for place in value}) > 1:
        raise ValueError("must be all cuda:N, all numa:N or all cpu, such as cuda:0,cuda:1")
    return value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(listed)]
Origins = Annotated[Names, AfterValidator(_origins)]
Seconds = Annotated[NonNegativeFloat, Field(allow_inf_nan=False)]
Bytes = Annotated[ByteSize, WrapValidator(_size), Field(gt=0)]
RateBytes = Annotated[ByteSize, WrapValidator(_size), Field(ge=0)]
ServedNames = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_served_names)]
Url = Annotated[str, AfterValidator(_url)]
Device = Annotated[str, AfterValidator(_device)]
Devices = Annotated[Names, AfterValidator(_devices)]
Template = Annotated[str, AfterValidator(_template)]
