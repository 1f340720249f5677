"""Attacks on a fetch. A real TLS server runs on this machine; the test replaces DNS and routes the addresses."""

import asyncio
import gzip
import ssl
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.server.http.image_fetcher import AllowedHost, FetchError, ImageFetcher, is_public, open_tls

from ...tables import cases, table

PUBLIC = "93.184.215.14"
HOST = "img.example.org"
MAX_BYTES = 100_000
HEAD = b"HTTP/1.1 200 OK\r\n"


def response(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Site:
    """A TLS server for every host, its DNS, and the connections that were opened."""

    def __init__(self, trust: ssl.SSLContext) -> None:
        self.trust = trust
        self.port = 0
        self.parts: list[bytes] = []
        self.by_path: dict[str, bytes] = {}
        self.requests: list[bytes] = []
        self.addresses: dict[str, list[str]] = {}
        self.opened: list[tuple[str, str]] = []
        self.delay_s = 0.0
        self.is_endless = False
        self.resolved: list[str] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            path = head.split(b" ")[1].decode()
            for part in [self.by_path[path]] if path in self.by_path else self.parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(self.delay_s)
            while self.is_endless:
                writer.write(b"x" * 65_536)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client ended the connection, as the test expects
        finally:
            writer.transport.abort()

    async def resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append(host)
        return self.addresses.get(host, [PUBLIC])

    async def connect(self, address: str, port: int, trust: ssl.SSLContext, host: str):
        self.opened.append((address, host))
        return await open_tls("127.0.0.1", self.port, trust, host)

    async def fetch(self, url: str = f"https://{HOST}/a.png", *hosts: str, timeout_s: float = 5.0) -> bytes:
        allowed = [AllowedHost.parse(host) for host in hosts or ("*.example.org",)]
        fetcher = ImageFetcher(
            allowed, MAX_BYTES, timeout_s=timeout_s, resolve=self.resolve, connect=self.connect, trust=self.trust
        )
        return await fetcher.fetch(url, self.on_bytes)

    on_bytes: Callable[[int], None] = staticmethod(lambda num_bytes: None)


@pytest.fixture
async def site(certificate: tuple[Path, Path]) -> AsyncIterator[Site]:
    cert, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    site = Site(ssl.create_default_context(cafile=str(cert)))
    async with await asyncio.start_server(site.answer, "127.0.0.1", 0, ssl=context) as server:
        site.port = server.sockets[0].getsockname()[1]
        yield site


async def test_image_is_fetched_from_the_checked_address(site) -> None:
    site.parts = [response(b"image")]
    counted = []
    site.on_bytes = counted.append
    assert await site.fetch(f"https://{HOST}/ä b!.png?q=ü".replace(" ", "%20")) == b"image"
    assert (site.resolved, site.opened) == ([HOST], [(PUBLIC, HOST)]), "the name is resolved only once"
    assert sum(counted) == 5
    request = site.requests[0].decode("ascii")
    assert request.startswith("GET /%C3%A4%20b!.png?q=%C3%BC HTTP/1.1\r\nHost: img.example.org\r\n")
    assert not {"cookie", "authorization", "referer"} & {
        line.partition(":")[0].lower() for line in request.split("\r\n")
    }


LONG_FRAMES = [part for byte in "image" for part in (f"1;x={'a' * 9_000}\r\n", f"{byte}\r\n")]


@pytest.mark.parametrize(
    "parts",
    [
        *table(__file__, "test_framing_of_http_is_understood"),
        ["HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *LONG_FRAMES, "0\r\n\r\n"],
    ],
)
async def test_framing_of_http_is_understood(site, parts: list[str]) -> None:
    site.parts, site.delay_s, counted = [part.encode() for part in parts], 0.01, []
    site.on_bytes = counted.append
    assert await site.fetch() == b"image"
    assert sum(counted) == 5


PRIVATE = table(__file__, "private")


@pytest.mark.parametrize("address", PRIVATE)
async def test_name_with_an_address_that_is_not_public_is_not_connected(site, address) -> None:
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        site.addresses[HOST] = addresses
        with pytest.raises(FetchError, match="address that is not public") as error:
            await site.fetch()
        assert address not in str(error.value)
    assert not site.opened


def test_public_addresses_are_public() -> None:
    assert all(map(is_public, (PUBLIC, "8.8.8.8", "2606:4700::1111", "2a00:1450:4001::1")))


@pytest.mark.parametrize(
    ("url", "part"),
    [
        *table(__file__, "test_url_is_rejected_before_a_name_is_resolved"),
        ("https://img.example.org/" + "a" * (8193 - 24), "8193 characters; the limit is 8192"),
    ],
)
async def test_url_is_rejected_before_a_name_is_resolved(site, url, part) -> None:
    with pytest.raises(FetchError, match=part):
        await site.fetch(url)
    assert not site.resolved


async def test_host_of_another_alphabet_is_matched_and_connected_in_ascii(site) -> None:
    with pytest.raises(FetchError, match="certificate"):
        await site.fetch("https://\u00fc.EXAMPLE\u3002org/", "xn--tda.example.org")
    assert site.opened == [(PUBLIC, "xn--tda.example.org")]


async def test_port_of_an_entry_is_allowed(site) -> None:
    site.parts = [response(b"image")]
    assert await site.fetch(f"https://{HOST}.:8443/", f"{HOST}:8443") == b"image"
    assert b"Host: img.example.org:8443\r\n" in site.requests[0]


async def test_largest_url_and_body_are_accepted(site) -> None:
    site.parts = [response(bytes(MAX_BYTES))]
    assert await site.fetch(f"https://{HOST}/".ljust(8192, "a")) == bytes(MAX_BYTES)
    site.parts = [HEAD + b"\r\n", bytes(MAX_BYTES)]
    assert await site.fetch() == bytes(MAX_BYTES)
    site.parts.append(b"x")
    with pytest.raises(FetchError, match="larger than the limit of 100000 bytes"):
        await site.fetch()


async def redirect(site: Site, target: str, status: int = 302) -> bytes:
    start = response(b"", f"Location: {target}", status=f"{status} Moved")
    site.by_path = {"/start": start, "/end": response(b"image")}
    return await site.fetch(f"https://{HOST}/start")


@pytest.mark.parametrize("status", range(300, 310))
async def test_only_redirects_with_a_location_are_followed(site, status: int) -> None:
    if status in (301, 302, 303, 307, 308):
        assert await redirect(site, "/end", status) == b"image"
    else:
        with pytest.raises(FetchError, match=f"status {status}"):
            await redirect(site, "/end", status)


@pytest.mark.parametrize("target", ["/end", "https://a.example.org/end", "//a.example.org/end"])
async def test_redirect_is_followed_and_resolved_again(site, target) -> None:
    assert await redirect(site, target) == b"image"
    assert len(site.resolved) == 2


@cases(__file__, "target", "part")
async def test_redirect_is_checked_like_the_url(site, target, part) -> None:
    site.addresses["private.example.org"] = ["169.254.169.254"]
    with pytest.raises(FetchError, match=part) as error:
        await redirect(site, target)
    assert "169.254" not in str(error.value)
    assert "internal" not in str(error.value)
    assert {address for address, _ in site.opened} == {PUBLIC}
    assert len(site.opened) == (4 if target == "/start" else 1)


@pytest.mark.parametrize(
    ("parts", "part"),
    [
        *(([text.encode()], part) for text, part in table(__file__, "test_response_is_rejected")),
        ([response(gzip.compress(b"0" * 10**7), "Content-Encoding: gzip")], "compressed"),
        ([response(zlib.compress(b"0" * 10**7), "Content-Encoding: br, deflate")], "compressed"),
        ([HEAD + b"X-A: " + b"a" * 40_000 + b"\r\nX-B: " + b"b" * 40_000], "the head and trailers of the response"),
        ([HEAD, *[b"X-%d: %s\r\n" % (i, b"a" * 500) for i in range(200)]], "the head and trailers of the response"),
        ([b"HTTP/1.1 103 Early Hints\r\n\r\n" * 5000], "the head and trailers of the response"),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-A: ", *[b"a" * 40_000] * 2], "the head and trailers"),
    ],
)
async def test_response_is_rejected(site, parts, part) -> None:
    site.parts = parts
    with pytest.raises(FetchError, match=part):
        await site.fetch()


@pytest.mark.parametrize("framing", [b"\r\n", b"Content-Length: 99\r\nTransfer-Encoding: identity\r\n\r\n"])
async def test_endless_body_ends_at_the_limit(site, framing) -> None:
    site.parts, site.is_endless = [HEAD + framing], True
    counted = []
    site.on_bytes = counted.append
    with pytest.raises(FetchError, match=r"larger than the limit|does not speak HTTP"):
        await site.fetch()
    assert sum(counted) <= MAX_BYTES


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nX-", HEAD + b"Content-Length: 90000\r\n\r\n"], ids=["head", "body"]
)
async def test_slow_server_ends_at_the_deadline(site, head) -> None:
    site.parts, site.delay_s = [head, *[b"x"] * 1000], 0.01
    with pytest.raises(FetchError, match=r"longer than 0\.1 s"):
        await site.fetch(timeout_s=0.1)


async def test_certificate_of_another_host_is_rejected(site) -> None:
    with pytest.raises(FetchError, match="certificate"):
        await site.fetch("https://other.example.org/")
    site.trust = ssl.create_default_context()
    with pytest.raises(FetchError, match="certificate"):
        await site.fetch()
    assert not site.requests


@pytest.mark.parametrize("hangs", [False, True])
async def test_next_address_is_tried(site, hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.http.image_fetcher._CONNECT_TIMEOUT_S", 0.05)
    site.parts = [response(b"image")]
    site.addresses[HOST] = ["2606:4700::1111", PUBLIC]
    connect = site.connect

    async def unreachable(address: str, *rest: object):
        if address != PUBLIC:
            await asyncio.sleep(3600 * hangs)
            raise OSError("no route")
        await asyncio.sleep(0.1)  # the last address may take longer
        return await connect(address, *rest)

    site.connect = unreachable
    assert await site.fetch() == b"image"


async def test_name_without_address_is_an_error(site) -> None:
    for error in (OSError("no such host"), UnicodeError("label too long")):

        async def resolve(host: str, port: int, error: Exception = error) -> list[str]:
            raise error

        site.resolve = resolve
        with pytest.raises(FetchError, match="has no address"):
            await site.fetch()


async def test_resolver_of_the_system_finds_a_local_name(site) -> None:
    fetcher = ImageFetcher([AllowedHost("localhost", has_subdomains=False, port=site.port)], MAX_BYTES)
    with pytest.raises(FetchError, match="address that is not public"):
        await fetcher.fetch(f"https://localhost:{site.port}/", site.on_bytes)
    assert not site.requests


async def test_error_of_the_counter_ends_the_fetch(site) -> None:
    def full(num_bytes: int) -> None:
        raise MemoryError

    site.parts, site.is_endless, site.on_bytes = [HEAD + b"\r\n"], True, full
    with pytest.raises(MemoryError):
        await site.fetch()
