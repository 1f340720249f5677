"""Sends a request to each server of a release: `helm test` runs it. Arguments: base URLs.

It uses the first key of /etc/penstock/api-keys, if there is one. The exit code is 1 if a request fails.
"""

import json
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

KEYS = Path("/etc/penstock/api-keys")
TIMEOUT_S = 60.0
POOLING = ("/pooling", {"input": "test"})
RERANK = ("/rerank", {"query": "test", "documents": ["test"]})


def api_key(file: Path) -> str | None:
    """Returns the first key of a file; None if there is no file or no key."""
    lines = file.read_text("utf-8-sig").splitlines() if file.exists() else []
    return next((line.strip() for line in lines if line.strip() and not line.startswith("#")), None)


def send(url: str, key: str | None, body: object = None) -> Any:
    """Sends a GET, or a POST with a JSON body, and returns the JSON response. Raises OSError for an error status."""
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, headers), timeout=TIMEOUT_S) as response:
        return json.load(response)


def check(url: str, key: str | None) -> str:
    """Checks a server. Returns a line for the log. Raises OSError if a request fails."""
    send(f"{url}/health/ready", None)
    (model, *_) = send(f"{url}/v1/models", key)["data"]
    endpoints = model["endpoints"]
    path, body = RERANK if "rerank" in endpoints and "embed" not in endpoints else POOLING
    send(url + path, key, body)
    return f"{url}: {model['id']} responds on {path}"


if __name__ == "__main__":
    for base_url in sys.argv[1:]:
        print(check(base_url, api_key(KEYS)), flush=True)
