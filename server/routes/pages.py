"""Pages for browsers: the playground at / and the documentation of the routes at /docs.

The playground is one page, built from the files of playground/. Both pages load from this server only: scripts and
styles are allowed by hash or from this origin, requests go to this server, and the playground inserts text as text
only (Trusted Types).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Final

from fastapi import Request, Response
from fastapi.responses import FileResponse

from ..dialects import PENSTOCK
from ..routing import Access, Router
from . import operations

router = Router(PENSTOCK, in_schema=False)

_SCRIPTS: Final = (
    *(
        "elements",
        "images",
        "requests",
        "colors",
        "embed",
        "rank",
        "pages",
        "vectors",
        "tokens",
        "code",
        "model",
        "examples",
        "start",
    ),
)


def content_security_policy(page: bytes) -> str:
    """Returns the policy that allows the `<style>` and `<script>` elements of `page` only."""
    directives = {
        "default-src": "'none'",
        "script-src": element_hashes(page, b"script"),
        "style-src": element_hashes(page, b"style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {value}" for name, value in directives.items())


def element_hashes(page: bytes, tag: bytes) -> str:
    """Returns the hashes of the contents of all `tag` elements without attributes, as a policy names them."""
    contents = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'" for content in contents)


def page_of(parts: Path) -> bytes:
    """Returns the page: its frame with the style and the scripts inserted."""
    scripts = [parts / f"{name}.js" for name in _SCRIPTS]
    style = _joined([parts / "style.css"])
    script = b'"use strict";\n' + _joined(scripts)
    frame = (parts / "frame.html").read_bytes()
    return frame.replace(b"<style></style>", b"<style>\n%b</style>" % style).replace(
        b"<script></script>", b"<script>\n%b</script>" % script
    )


def _joined(files: Iterable[Path]) -> bytes:
    return b"\n".join(file.read_bytes() for file in files)


PAGE: Final = page_of(Path(__file__).parent / "playground")
ETAG: Final = f'"{hashlib.sha256(PAGE).hexdigest()[:16]}"'
_PLAYGROUND_HEADERS: Final = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": content_security_policy(PAGE),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
    "etag": ETAG,
    "vary": "accept",
}


@router.get("/", has_head=True, access=Access.OPEN)
async def root(request: Request) -> Response:
    """Shows the playground if the request names HTML in Accept; otherwise the health, as TEI's root path does."""
    root_path = _root_path(request)
    if prefers_html(",".join(request.headers.getlist("accept"))):
        if root_path and request.scope["raw_path"].decode("latin-1") == root_path:
            return Response(status_code=307, headers={"location": f"{root_path}/", "vary": "accept"})  # for its links
        is_known = ETAG in request.headers.get("if-none-match", "")
        return (
            Response(status_code=304, headers=_PLAYGROUND_HEADERS)
            if is_known
            else Response(PAGE, headers=_PLAYGROUND_HEADERS)
        )
    response = await operations.ready(request)
    response.headers["vary"] = "accept"
    return response


def _root_path(request: Request) -> str:
    """Returns the path prefix of a proxy: that of the ASGI server or else --root-path.

    RequestMiddleware removes --root-path and does not put it in the scope: starlette would remove it a second time, and
    would then find another route than the check of the API key.
    """
    root_path: str = request.scope.get("root_path", "") or request.app.state.routes.root_path
    return root_path


def prefers_html(accept: str) -> bool:
    """Returns whether an Accept header names HTML with at least the weight of JSON. curl sends `*/*`."""
    weights = dict(_weighted(entry) for entry in accept.split(","))
    html = weights.get("text/html", 0.0)
    return html > 0 and html >= weights.get("application/json", 0.0)


def _weighted(entry: str) -> tuple[str, float]:
    media, *parameters = (part.strip().lower() for part in entry.split(";"))
    quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
    try:
        return media, float(quality)
    except ValueError:
        return media, 0.0


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
_DOCUMENTATION_POLICY: Final = {
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
_DOCUMENTATION_HEADERS: Final = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _DOCUMENTATION_POLICY.items()),
    "content-type": "text/html; charset=utf-8",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


@router.get("/docs", has_head=True, access=Access.OPEN)
async def documentation(request: Request) -> Response:
    """Shows every route, with examples that can be sent."""
    here = "../" if request.scope["raw_path"].endswith(b"/") else ""
    return Response(_PAGE.substitute(here=here), headers=_DOCUMENTATION_HEADERS)


@router.get("/openapi.json", has_head=True, access=Access.OPEN)
async def openapi_document(request: Request) -> Response:
    """Returns the OpenAPI document of the routes."""
    document = request.app.encoded_document(_root_path(request))
    return Response(document, media_type="application/json")


@router.get("/docs/swagger-ui-bundle.js", access=Access.OPEN)
async def script() -> Response:
    """Returns the script of Swagger UI."""
    return _asset("swagger-ui-bundle.js", "text/javascript")


@router.get("/docs/swagger-ui.css", access=Access.OPEN)
async def style() -> Response:
    """Returns the stylesheet of Swagger UI."""
    return _asset("swagger-ui.css", "text/css")


@router.get("/docs/favicon-32x32.png", access=Access.OPEN)
async def icon() -> Response:
    """Returns the icon of the browser tab."""
    return _asset("favicon-32x32.png", "image/png")


def _asset(name: str, media_type: str) -> Response:
    headers = {"cache-control": "max-age=3600", "x-content-type-options": "nosniff"}
    return FileResponse(_ASSETS / name, media_type=media_type, headers=headers)
