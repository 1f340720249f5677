"""Bodies of several dialects on one path: which one it is, is told by a key of the body.

Body = Annotated[
    Annotated[RerankRequest, Tag(OWN)] | Annotated[TeiRerankRequest, Tag(TEI)], by_keys({"texts": TEI}, otherwise=OWN)
]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Discriminator

OWN: Final = "<own>"
TEI: Final = "<tei>"
COHERE: Final = "<cohere>"

TAGS: Final = frozenset({OWN, TEI, COHERE})
"""Tags are no field names: pydantic puts them into the place of an error, and messages leave them out."""


def embed_dialect(body: Any) -> str:
    """Returns the tag of a body of /embed: Cohere's has `texts`, or `inputs` that are objects of contents."""
    if not isinstance(body, dict):
        return TEI
    inputs = body.get("inputs")
    first = inputs[0] if isinstance(inputs, list) and inputs else None
    has_contents = isinstance(first, dict) and "content" in first
    return COHERE if has_contents or body.get("texts") is not None else TEI


def by_keys(tags: Mapping[str, str], *, otherwise: str) -> Discriminator:
    """Returns the rule: the first of these keys that a body holds, and not as null, gives its tag; else `otherwise`."""

    def tag_of(body: Any) -> str:
        if not isinstance(body, dict):
            return otherwise
        return next((tag for key, tag in tags.items() if body.get(key) is not None), otherwise)

    return Discriminator(tag_of)
