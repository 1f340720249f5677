"""Small HTTP servers that answer like other embedding servers."""

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple


class Received(NamedTuple):
    """A request. `body` is None for a GET."""

    path: str
    headers: dict[str, str]
    body: Any


class Answered(NamedTuple):
    """A response. `body` is bytes or a value for JSON."""

    body: Any
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


Answer = Callable[[Received], Answered]
Serve = Callable[..., str]


class Handler(BaseHTTPRequestHandler):
    """Answers with the server's `answer`, in chunks."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send(None)

    def do_POST(self) -> None:
        self.send(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def send(self, body: Any) -> None:
        answered = self.server.answer(Received(self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        content = answered.body if isinstance(answered.body, bytes) else json.dumps(answered.body).encode()
        self.send_response(answered.status)
        for name, value in (*answered.headers, ("Transfer-Encoding", "chunked")):
            self.send_header(name, value)
        self.end_headers()
        half = len(content) // 2
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client was interrupted
            for part in filter(None, (content[:half], content[half:])):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Prints no traceback if a client does not trust the certificate or is interrupted."""


@contextlib.contextmanager
def serving() -> Iterator[Serve]:
    """Yields a function that starts a server and returns its URL: `serve(answer, certificate=(cert, key))`."""
    servers: list[Server] = []

    def serve(answer: Answer, certificate: tuple[Path, Path] | None = None) -> str:
        server = Server(("127.0.0.1", 0), Handler)
        server.answer = answer  # type: ignore[attr-defined]
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http{'s' * (certificate is not None)}://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def openai_server(received: Received) -> Answered:
    """Lists a model and embeds texts; 7 tokens a request."""
    if received.path == "/v1/models":
        return Answered({"data": [{"id": "m"}]})
    if received.path != "/v1/embeddings":
        return Answered({"error": {"message": "no such route"}}, 404)
    rows = [{"embedding": [0.5, 1.0]}] * len(received.body["input"])
    return Answered({"data": rows, "model": received.body["model"], "usage": {"prompt_tokens": 7}})
