"""`penstock bench` against real HTTP servers."""

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.server.bench.load_generator import UNSENT, Address, Round, run_round
from penstock.server.bench.report import Point, Result, ratios
from penstock.server.bench.workload import BUILT_IN, Workload

from ...servers import COMMAND

Answer = Callable[[str, dict[str, object]], tuple[int, bytes]]


class Handler(BaseHTTPRequestHandler):
    """Lists a model and answers POST requests with the server's `answer`, in chunks."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send((200, b'{"data":[{"id":"m"}]}') if self.path == "/v1/models" else (404, b"{}"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send(self.server.answer(self.path, body))  # type: ignore[attr-defined]

    def send(self, answer: tuple[int, bytes]) -> None:
        self.send_response(answer[0])
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        half = len(answer[1]) // 2
        for part in (answer[1][:half], answer[1][half:], b""):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    servers = []

    def start(answer: Answer) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.answer = answer  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def embeddings(_: str, body: dict[str, object]) -> tuple[int, bytes]:
    texts = body["input"]
    assert isinstance(texts, list)
    return 200, json.dumps({"data": [{"embedding": [0.5]}] * len(texts), "usage": {"prompt_tokens": 7}}).encode()


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, "bench", *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_two_servers_are_compared_in_alternating_rounds(serve: Callable[[Answer], str], tmp_path: Path) -> None:
    urls, file = [serve(embeddings), serve(embeddings)], tmp_path / "result.json"
    short = ("--seconds", "0.3", "--warm-up", "0", "--rounds", "2", "--batch-size", "3")
    done = bench(*urls, *short, "--connections", "1,2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert [(r["url"], r["connections"]) for r in found["results"]] == [(url, n) for n in (1, 2) for url in urls]
    for result in found["results"]:
        assert result["texts"] == 3 * result["requests"] > 0
        assert result["tokens_per_s"] == pytest.approx(7 * result["requests"] / result["seconds"], rel=0.01)
        assert result["errors"] == {}
        assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["p99.9"] <= result["latency_ms"]["max"]
    assert [ratio["connections"] for ratio in found["ratios"]] == [1, 2]
    rounds = [line.rpartition(", ")[0].partition(": ")[0] for line in done.stderr.splitlines()]
    assert [line.rpartition(", ")[2] for line in rounds[:4]] == [urls[0], urls[1], urls[1], urls[0]]


def test_failed_requests_are_counted_by_status(serve: Callable[[Answer], str], tmp_path: Path) -> None:
    calls, file = iter(range(10**9)), tmp_path / "result.json"
    url = serve(lambda path, body: embeddings(path, body) if next(calls) < 5 else (429, b"{}"))
    done = bench(url, "--seconds", "0.2", "--warm-up", "0", "--rounds", "1", "--connections", "1", "--json", str(file))
    (result,) = json.loads(file.read_text())["results"]
    assert done.returncode == 0, done.stderr
    assert result["requests"] == 4  # the fifth was the check before the load
    assert list(result["errors"]) == ["status 429"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "returned 2 results for 1 texts"),
        (("--task", "rerank"), "returned 400"),
        (("--dialect", "tei"), "lists no model: GET /info returned 404"),
        (("--dialect", "ollama", "--model", "m", "--task", "rerank"), "the dialect ollama has no such route"),
        (("--load", "missing.txt"), "cannot be read as a file"),
        (("--connections", "0"), "must be whole numbers above 0"),
    ],
)
def test_unusable_server_or_flag_ends_with_one_line(
    serve: Callable[[Answer], str], flags: tuple[str, ...], message: str
) -> None:
    url = serve(lambda path, _: (200, b'{"data": [1, 2]}') if path == "/v1/embeddings" else (400, b"no such task"))
    done = bench(url, *flags)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


async def test_open_loop_counts_latency_from_the_scheduled_time() -> None:
    """The server answers one request in 0.1 s; 40 requests per second wait for the only connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            await asyncio.sleep(0.1)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    found = await run_round(address, [b"GET / HTTP/1.1\r\n\r\n"], 1, connections=1, seconds=1.0, rate=40)
    await ended.wait()
    server.close()
    assert found.errors.keys() == {UNSENT}
    assert found.latency_ms(0.0) >= 100
    assert found.latency_ms(1.0) > 400  # the queue grows; each response alone takes 100 ms


@pytest.mark.parametrize("name", BUILT_IN)
def test_workload_repeats_for_a_seed_and_keeps_its_limit(name: str) -> None:
    workload = Workload.open(name, 2, 50)
    texts = [text for request in workload.requests(1) for text in request]
    assert texts == [text for request in workload.requests(1) for text in request]
    assert texts != [text for request in workload.requests(2) for text in request]
    assert max(len(text.split()) for text in texts) == len(workload.longest().split()) == 50


def test_jsonl_file_gives_its_texts(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a b"}\n\n{"text": "c"}\n')
    assert Workload.open(str(file), 1, 1).texts == ("a b", "c")


def test_ratio_compares_rounds_with_the_same_number() -> None:
    def result(*rates: int) -> Result:
        return Result(Point(1, None), "u", [Round(rate, 0, 1.0, [1 / rate]) for rate in rates])

    found = ratios(result(10, 30, 40), result(10, 10, 10))
    assert found["texts_per_s"] == (3, 1, 4)
    assert found["p50_latency"] == pytest.approx((1 / 3, 1 / 4, 1))
