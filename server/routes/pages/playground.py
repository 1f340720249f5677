"""The root path: the playground for browsers, health for everybody else.

The playground is one page, put together from the files of parts/, that takes nothing from elsewhere: its own style and
script are allowed by their hashes, requests go to this server alone, and text becomes part of the page as text only
(Trusted Types).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response

from ..operating import ops

router = APIRouter(include_in_schema=False)

_SCRIPTS: Final = (
    *("elements", "requests", "colors", "embed", "rank", "vectors", "tokens", "code", "model", "examples", "start"),
)


def content_security_policy(page: bytes) -> str:
    """Returns the policy under which nothing runs but the `<style>` and `<script>` elements of `page`."""
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
    """Returns the hashes, as a policy names them, of what stands inside the elements `tag` without attributes."""
    contents = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'" for content in contents)


def page_of(parts: Path) -> bytes:
    """Returns the frame of the page with the style and the scripts in it, the one that begins it all last."""
    scripts = [parts / f"{name}.js" for name in _SCRIPTS]
    style, script = _joined([parts / "style.css"]), b'"use strict";\n' + _joined(scripts)
    frame = (parts / "frame.html").read_bytes()
    return frame.replace(b"<style></style>", b"<style>\n%b</style>" % style).replace(
        b"<script></script>", b"<script>\n%b</script>" % script
    )


def _joined(files: Iterable[Path]) -> bytes:
    return b"\n".join(file.read_bytes() for file in files)


PAGE: Final = page_of(Path(__file__).parent / "parts")
ETAG: Final = f'"{hashlib.sha256(PAGE).hexdigest()[:16]}"'
_HEADERS: Final = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": content_security_policy(PAGE),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
    "etag": ETAG,
    "vary": "accept",
}


@router.get("/")
@router.head("/")
async def root(request: Request) -> Response:
    """Shows the playground where HTML is asked for by name; otherwise tells health, as TEI's root path does."""
    if prefers_html(",".join(request.headers.getlist("accept"))):
        is_known = ETAG in request.headers.get("if-none-match", "")
        return Response(status_code=304, headers=_HEADERS) if is_known else Response(PAGE, headers=_HEADERS)
    response = await ops.ready(request)
    response.headers["vary"] = "accept"
    return response


def prefers_html(accept: str) -> bool:
    """Returns whether an Accept header names HTML and likes it no less than JSON. `*/*` is what curl sends."""
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
