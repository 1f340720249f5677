"""The OpenAPI document in a browser, at /docs: Swagger UI from an installed package, so that it needs no network.

The page takes its script and its style from this server alone. Its policy lets it ask nobody else, and lets nothing
inline run but the few lines that start Swagger UI.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from string import Template
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse

from .playground import element_hashes

router = APIRouter(include_in_schema=False)

_ASSETS: Final = Path(str(importlib.resources.files("fastapi_swagger.resources")))

# Links are relative, for a proxy that serves all of this below a path of its own.
_PAGE: Final = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>penstock: the routes</title>
<link rel="icon" href="${here}docs/favicon-32x32.png">
<link rel="stylesheet" href="${here}docs/swagger-ui.css">
</head>
<body data-document="${here}openapi.json">
<script src="${here}docs/swagger-ui-bundle.js"></script>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", paint);
paint();
SwaggerUIBundle({
  url: document.body.dataset.document,
  domNode: document.body.appendChild(document.createElement("main")),
  deepLinking: true,
  displayRequestDuration: true,
  filter: true,
  tryItOutEnabled: true,
  validatorUrl: null,
});
</script>
</body>
</html>
""")
_POLICY: Final = {
    "default-src": "'none'",
    "script-src": f"'self' {element_hashes(_PAGE.template.encode(), b'script')}",
    # Swagger UI writes style attributes.
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS: Final = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "content-type": "text/html; charset=utf-8",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


@router.get("/docs")
@router.head("/docs")
async def documentation(request: Request) -> Response:
    """Shows every route, with examples that can be sent."""
    here = "../" if request.scope["raw_path"].endswith(b"/") else ""
    return Response(_PAGE.substitute(here=here), headers=_HEADERS)


@router.get("/docs/swagger-ui-bundle.js")
async def script() -> Response:
    """Swagger UI itself."""
    return _asset("swagger-ui-bundle.js", "text/javascript")


@router.get("/docs/swagger-ui.css")
async def style() -> Response:
    """How Swagger UI looks."""
    return _asset("swagger-ui.css", "text/css")


@router.get("/docs/favicon-32x32.png")
async def icon() -> Response:
    """The picture in the browser's tab."""
    return _asset("favicon-32x32.png", "image/png")


def _asset(name: str, media_type: str) -> Response:
    headers = {"cache-control": "max-age=3600", "x-content-type-options": "nosniff"}
    return FileResponse(_ASSETS / name, media_type=media_type, headers=headers)
