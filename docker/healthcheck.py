"""Succeed when the server in this container is ready: its model is loaded and its engine answers."""

import os
import ssl
import sys
import urllib.error
import urllib.request

COMPAT_PORTS = {"tei": "PORT", "infinity": "INFINITY_PORT"}
"""The variable with the port of a server whose variables --env-compat reads."""


def port() -> str:
    """Return the port of the server."""
    compat = COMPAT_PORTS.get(os.environ.get("PENSTOCK_ENV_COMPAT", ""), "")
    return os.environ.get("PENSTOCK_PORT") or os.environ.get(compat) or "8000"


def main() -> int:
    """Ask /health/ready once.

    Returns:
        The exit status: 0 where the answer was 200, 1 otherwise.
    """
    scheme = "https" if os.environ.get("PENSTOCK_SSL_CERTFILE") else "http"
    url = f"{scheme}://127.0.0.1:{port()}/health/ready"
    # The certificate names another host than 127.0.0.1, and the request never leaves the container: no proxy either.
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
    )
    try:
        with opener.open(url, timeout=4) as response:
            return 0 if response.status == 200 else 1
    except (urllib.error.URLError, OSError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
