"""The servers of all clients, and small models."""

import base64
import json
import shutil
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

sys.path.append(str(Path(__file__).resolve().parents[2]))

from penstock.server.commands.model_arguments import default_model_folder
from tests.engine.images.pictures import encoded, picture
from tests.random_models import save_random_model, save_two_tower_model
from tests.servers import launching

KEY = "key-of-the-clients"
LABELS = ("joy", "anger", "fear")
TEXTS = [
    "A gate holds the water.",
    "short",
    "naïve café 東京 😀",
    "A longer text that goes on about pipes, gates, dams and the people who look after them. " * 6,
]
HEADERS = {408: {"x-should-retry": "false"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}
"""Headers of penstock's rejections."""


@contextmanager
def serving(folder: Path) -> Iterator[dict[str, str]]:
    """Start the servers with models and logs in `folder`. Yields the variables of plain_http.py."""
    flags = {
        "SERVER_URL": [],
        "PROTECTED_URL": ["--api-key", KEY, "--max-queued-tokens", "2000"],
        "RERANKER_URL": [str(save_classifier(folder / "reranker", ("LABEL_0",)))],
        "CLASSIFIER_URL": [str(save_classifier(folder / "classifier", LABELS))],
    }
    images = folder / "two-tower"
    shutil.rmtree(images, ignore_errors=True)
    save_two_tower_model(images, "CLIP", default_model_folder())
    flags["IMAGES_URL"] = [str(images), "--dtype", "float32"]
    with contextmanager(launching)() as launch:
        servers = {name: launch(*given, log=folder / f"{name.lower()}.log") for name, given in flags.items()}
        urls = {name: server.url for name, server in servers.items()}
        rows = servers["SERVER_URL"].embed(TEXTS).json()["data"]
        expected = folder / "expected.json"
        embeddings = [row["embedding"] for row in rows]
        expected.write_text(json.dumps({"texts": TEXTS, "embeddings": embeddings, "images": make_images()}))
        with rejecting(urls["SERVER_URL"]) as url:
            yield {**urls, "REJECTING_URL": url, "PROTECTED_KEY": KEY, "EXPECTED_FILE": str(expected)}


def make_images() -> list[str]:
    """PNG files of images of odd sizes, in base64."""
    images = (picture("RGB", width, height) for width, height in ((28, 28), (17, 61), (90, 33)))
    return [base64.b64encode(encoded(image, "PNG")).decode() for image in images]


@contextmanager
def rejecting(target: str) -> Iterator[str]:
    """Yields the URL of a server that rejects requests and counts them.

    A POST to /STATUS/TIMES/NAME/PATH gets STATUS and an error body of penstock for the first TIMES requests. Later
    requests get the response of `target` to PATH. A GET of /STATUS/TIMES/NAME returns the number of POSTs and
    forgets them.
    """
    counts: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {}, str(counts.pop(self.path.rstrip("/"), 0)).encode())

        def do_POST(self) -> None:
            _, status, times, name, path = self.path.split("/", 4)
            case = f"/{status}/{times}/{name}"
            counts[case] += 1
            body = self.rfile.read(int(self.headers["content-length"]))
            if counts[case] <= int(times):
                error = {"message": "rejected", "type": "server_error", "param": None, "code": None}
                answer = json.dumps({"error": error, "message": "rejected", "detail": "rejected"}).encode()
                self._send(int(status), HEADERS.get(int(status), {}), answer)
                return
            request = urllib.request.Request(f"{target}/{path}", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                self._send(200, {}, response.read())

        def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in {"content-type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def save_classifier(folder: Path, labels: tuple[str, ...]) -> Path:
    """A random BertForSequenceClassification with the tokenizer of the embedded model."""
    shutil.rmtree(folder, ignore_errors=True)
    names = dict(enumerate(labels))
    config = {"id2label": names, "label2id": {label: i for i, label in names.items()}, "initializer_range": 0.5}
    return save_random_model(folder, "BertForSequenceClassification", default_model_folder(), **config)
