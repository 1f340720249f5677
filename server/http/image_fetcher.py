"""Fetches images from https URLs of allowed hosts, and never from the network of the server itself.

A client chooses the URL, so a fetch must not reach an address that the client cannot reach (server-side request
forgery). Each host is resolved once; if any of its addresses is not public, the fetch fails. The connection goes to
exactly a checked address, while the TLS certificate is checked for the name. Redirects pass the same checks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import httptools

FETCH_TIMEOUT_S: Final = 10.0
"""Seconds for one image, redirects included."""
MAX_REDIRECTS: Final = 3
MAX_URL_CHARS: Final = 8_192
_MAX_HEAD_BYTES: Final = 32 * 1024
"""Bytes of all heads and trailers of one response, interim responses included."""
_CONNECT_TIMEOUT_S: Final = 3.0
"""Seconds for one address, if a host has several."""
_READ_BYTES: Final = 64 * 1024
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_PUBLIC_IPV6: Final = ipaddress.IPv6Network("2000::/3")
_EMBEDDING_IPV6: Final = tuple(map(ipaddress.IPv6Network, ("2001::/32", "2002::/16", "3fff::/20")))
"""Teredo and 6to4, which embed an IPv4 address, and documentation. NAT64 and mapped addresses are outside 2000::/3."""
_UNSAFE: Final = re.compile(r"[\x00-\x20\x7f\\]")
_URL_CHARS: Final = "".join(map(chr, range(0x21, 0x7F)))

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host. Raises OSError."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str, int, ssl.SSLContext, str], Awaitable[Streams]]
"""Opens a TLS connection to an IP address and a port, and checks the certificate for a host name. Raises OSError."""


class FetchError(Exception):
    """An image cannot be fetched. The message continues a sentence that begins with the field of the URL."""


class AllowedHost(NamedTuple):
    """An entry of --allowed-media-domains.

    Attributes:
        name: Name in lower case.
        has_subdomains: The entry was `*.name`: every host below the name, but not the name itself.
        port: TCP port.
    """

    name: str
    has_subdomains: bool
    port: int

    @classmethod
    def parse(cls, text: str) -> AllowedHost:
        """Returns the host of an entry such as `cdn.example.org`, `*.example.org` or `cdn.example.org:8443`.

        Args:
            text: An entry that the settings have checked.
        """
        name, _, port = text.lower().partition(":")
        return cls(name.removeprefix("*."), name.startswith("*."), int(port or 443))

    def matches(self, host: str, port: int) -> bool:
        """Returns whether the entry allows a host and port."""
        same = host.endswith(f".{self.name}") if self.has_subdomains else host == self.name
        return same and port == self.port


class _Target(NamedTuple):
    """A URL that passed the checks of its text."""

    host: str
    port: int
    path: str


class ImageFetcher:
    """Fetches images for one application.

    Args:
        timeout_s: Seconds for one image.
        resolve: Resolver of host names; default: the system's.
        connect: Opens connections; default: asyncio's.
        trust: Certificates to trust; default: the system's.
    """

    def __init__(
        self,
        hosts: Sequence[AllowedHost],
        max_bytes: int,
        *,
        timeout_s: float = FETCH_TIMEOUT_S,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = tuple(hosts)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve or _resolve
        self._connect = connect or open_tls
        self._trust = trust or ssl.create_default_context()

    async def fetch(self, url: str, on_bytes: Callable[[int], None]) -> bytes:
        """Returns the bytes at a URL.

        Args:
            url: URL with the scheme https.
            on_bytes: Called with the number of bytes of each received part. An error that it raises ends the fetch.

        Raises:
            FetchError: The URL is not allowed, the server fails, is too slow or sends too much.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(MAX_REDIRECTS + 1):
                    response = await self._get(self._target(url), on_bytes)
                    if response.location is None:
                        return bytes(response.body)
                    url = _redirected(url, response.location)
        except TimeoutError:
            raise FetchError(f"cannot be fetched: it took longer than {self._timeout_s:g} s") from None
        raise FetchError(f"cannot be fetched: it has more than {MAX_REDIRECTS} redirects")

    def _target(self, url: str) -> _Target:
        """Checks the text of a URL. Raises FetchError."""
        if len(url) > MAX_URL_CHARS:
            raise FetchError(f"is a URL of {len(url)} characters; the limit is {MAX_URL_CHARS}")
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode("ascii").removesuffix(".")
            port = parts.port or 443
        except ValueError:
            raise FetchError("is not a valid URL") from None
        if _UNSAFE.search(url) or _UNSAFE.search(host):
            raise FetchError("is a URL with a space, a backslash or a control character")
        if parts.scheme != "https":
            raise FetchError("is not an https URL, or redirects to another scheme")
        if parts.username is not None or parts.password is not None:
            raise FetchError("is a URL with a user name or password, which are not sent")
        if not any(allowed.matches(host, port) for allowed in self._hosts):
            raise FetchError(
                "has, or redirects to, a host and port that --allowed-media-domains of this server does not allow"
            )
        path = quote(parts.path or "/", safe=_URL_CHARS)
        query = quote(parts.query, safe=_URL_CHARS)
        return _Target(host, port, f"{path}?{query}" if query else path)

    async def _get(self, target: _Target, on_bytes: Callable[[int], None]) -> _Response:
        """Sends one request and returns its response. Raises FetchError."""
        addresses = await self._public_addresses(target)
        reader, writer = await self._open(target, addresses)
        try:
            host = target.host if target.port == 443 else f"{target.host}:{target.port}"
            writer.write(
                f"GET {target.path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: penstock\r\nAccept: image/*\r\n"
                "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            return await self._receive(reader, on_bytes)
        except OSError:
            raise FetchError("cannot be fetched: the connection to its server broke") from None
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise FetchError("cannot be fetched: its server does not speak HTTP/1.1") from None
        finally:
            writer.transport.abort()

    async def _public_addresses(self, target: _Target) -> Sequence[str]:
        """Returns the addresses of a host. Raises FetchError if any address is not public."""
        try:
            addresses = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise FetchError("cannot be fetched: the name of its host has no address")
        if not all(map(is_public, addresses)):
            raise FetchError("cannot be fetched: its host has an address that is not public")
        return addresses

    async def _open(self, target: _Target, addresses: Sequence[str]) -> Streams:
        """Connects to the first address that accepts the connection. Raises FetchError."""
        for address in addresses:
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S if address != addresses[-1] else None):
                    return await self._connect(address, target.port, self._trust, target.host)
            except ssl.SSLCertVerificationError:
                raise FetchError("cannot be fetched: the certificate of its server is not valid") from None
            except OSError:  # TimeoutError of the inner deadline included
                continue
        raise FetchError("cannot be fetched: no connection to its server")

    async def _receive(self, reader: asyncio.StreamReader, on_bytes: Callable[[int], None]) -> _Response:
        response = _Response(self._max_bytes)
        parser = httptools.HttpResponseParser(response)
        head_bytes = num_counted = 0
        while data := await reader.read(_READ_BYTES):
            parser.feed_data(data)
            is_final = response.has_head and parser.get_status_code() >= 200  # a 1xx precedes the response
            if is_final:
                response.check(parser.get_status_code())
            if len(response.body) > num_counted:
                on_bytes(len(response.body) - num_counted)
                num_counted = len(response.body)
                head_bytes = 0
            else:  # a head, trailers, or the frame of a chunk
                head_bytes += len(data)
            if is_final and (response.is_complete or response.location is not None):
                return response
            if head_bytes > _MAX_HEAD_BYTES:
                raise FetchError(
                    f"cannot be fetched: the head and trailers of the response have over {_MAX_HEAD_BYTES} bytes"
                )
        if not response.ends_with_connection:
            raise FetchError("cannot be fetched: its server closed the connection before the end of the response")
        return response


class _Response:
    """Callbacks of the parser for one response.

    Attributes:
        body: Bytes of the body so far; at most `max_bytes`.
        location: Target of a redirect; None for other responses.
    """

    def __init__(self, max_bytes: int) -> None:
        self.location: str | None = None
        self._max_bytes = max_bytes
        self.on_message_begin()

    def on_message_begin(self) -> None:
        """Starts a response. Interim responses (1xx) precede the final one."""
        self.body = bytearray()
        self.has_head = self.is_complete = self._is_too_large = False
        self._headers: dict[bytes, bytes] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Stores a header of the head. Trailers are ignored."""
        if not self.has_head:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Ends the head."""
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        """Stores a part of the body."""
        if len(self.body) + len(data) > self._max_bytes:
            self._is_too_large = True  # an exception would be wrapped by the parser
        else:
            self.body += data

    def on_message_complete(self) -> None:
        """Ends the response."""
        self.is_complete = True

    @property
    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is the end of the body: neither Content-Length nor chunks delimit it."""
        return self.has_head and b"content-length" not in self._headers and b"transfer-encoding" not in self._headers

    def check(self, status: int) -> None:
        """Checks status, size and encoding of a response, and sets `location`. Raises FetchError."""
        if status in _REDIRECTS and (location := self._headers.get(b"location")):
            self.location = location.decode("utf-8", "replace")
            return
        if status != 200:
            raise FetchError(f"cannot be fetched: its server answered with status {status}")
        coding = self._headers.get(b"content-encoding", b"").strip().lower()
        if coding not in (b"", b"identity"):
            raise FetchError("cannot be fetched: the response is compressed although the request did not allow it")
        length = self._headers.get(b"content-length", b"0")
        if self._is_too_large or (length.isdigit() and len(length) < 20 and int(length) > self._max_bytes):
            raise FetchError(f"is larger than the limit of {self._max_bytes} bytes (--max-image-bytes)")


def _redirected(url: str, location: str) -> str:
    """Returns the target of a redirect. Raises FetchError."""
    try:
        return urljoin(url, location)
    except ValueError:
        raise FetchError("redirects to a URL that is not valid") from None


def is_public(address: str) -> bool:
    """Returns whether an IP address is a global unicast address that embeds no other address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if not ip.is_global or ip.is_multicast or ip.is_reserved:
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return True
    return ip in _PUBLIC_IPV6 and not any(ip in network for network in _EMBEDDING_IPV6)


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def open_tls(address: str, port: int, trust: ssl.SSLContext, host: str) -> Streams:
    """Opens a connection; see Connect."""
    return await asyncio.open_connection(address, port, ssl=trust, server_hostname=host)
