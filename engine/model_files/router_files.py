"""Reads a Router of sentence-transformers (before version 5: Asym): other modules for queries than for documents.

The rules are those of the class: a mapping by purpose and modality, then a route with the name of the purpose, then
the default route. All texts have the modality "text".
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from ..protocol.errors import ModelLoadError, UnsupportedModelError
from .model_folder import read_object

_FILES: Final = ("router_config.json", "config.json")
"""The second one is the name in older versions."""
_NAMES: Final = {"query": ("query",), "document": ("document", "doc"), None: ()}
"""Names of the route of a purpose. "doc" is the name in the examples of Asym."""


class Routes(NamedTuple):
    """The modules of each purpose, as entries of modules.json.

    Attributes:
        query: Modules of queries.
        document: Modules of documents.
        default_is_query: Texts without a purpose use the modules of queries.
    """

    query: list[dict[str, Any]]
    document: list[dict[str, Any]]
    default_is_query: bool


def read_routes(root: Path, folder: str) -> Routes:
    """Reads the config of a Router.

    Args:
        root: Folder of the model.
        folder: Folder of the Router in `root`.

    Raises:
        ModelLoadError: The file is missing or invalid.
        UnsupportedModelError: Queries, documents, or texts without a purpose have no route.
    """
    path = next(
        (root / folder / name for name in _FILES if (root / folder / name).is_file()), root / folder / _FILES[0]
    )
    config = read_object(path)
    try:
        types, structure, parameters = config["types"], config["structure"], config.get("parameters") or {}
        modules = {
            route: [{"type": types[name], "path": str(PurePosixPath(folder, name))} for name in names]
            for route, names in structure.items()
        }
        mapped: dict[str, str] = parameters.get("route_mappings") or {}
        default = parameters.get("default_route")
        if default is None and parameters.get("allow_empty_key", True):
            default = next(iter(modules))
        chosen = {purpose: _route_of(purpose, modules, mapped) for purpose in _NAMES}
        chosen[None] = chosen[None] or default
        query, document, other = (modules.get(chosen[purpose]) for purpose in _NAMES)
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ModelLoadError(
            f"{path} is not the config of a Router: it needs types and structure ({error!r})."
        ) from error
    if not query or not document or other not in (query, document):
        raise UnsupportedModelError(
            f"{path} has the routes {', '.join(modules)} and the default {default!r}; penstock needs a route for "
            "queries and one for documents, and one of them as default_route."
        )
    return Routes(query, document, default_is_query=other != document)


def _route_of(purpose: str | None, modules: dict[str, Any], mapped: dict[str, str]) -> str | None:
    """Returns the route of a purpose; None if only the default route fits."""
    for key in ((purpose, "text"), (purpose, None), (None, "text"), (None, None)):
        if str(key) in mapped:
            return mapped[str(key)]
    return next((name for name in (*_NAMES[purpose], "text") if name in modules), None)
