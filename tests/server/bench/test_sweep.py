"""`penstock bench` against real HTTP servers."""

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from penstock.server.bench import sweep
from penstock.server.bench.load_generator import UNSENT, Round, _kind, _num_tokens, run_round
from penstock.server.bench.report import LoadPoint, LoadTestResult, check_plot, plot, ratios
from penstock.server.bench.sweep import Sweep
from penstock.server.bench.workload import BUILT_IN_WORKLOADS, Workload
from penstock.server.commands.cli import main
from penstock.server.settings import BenchSettings, UsageError, load_settings
from penstock.server.target_server import Address

from ...clock import Clock
from ...tables import cases, table
from ..fake_server import Answered, Received, Serve, openai_server

SHORT = ("--seconds", "0.1", "--warm-up", "0", "--rounds", "1", "--connections", "1")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in this process, with 64 texts in each round."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr("penstock.server.bench.workload._MOST_TEXTS", 64)
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main(["bench", *arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def test_two_servers_are_compared_in_alternating_rounds(serve: Serve, tmp_path: Path) -> None:
    urls, file, began_s = [serve(openai_server), serve(openai_server)], tmp_path / "result.json", time.time()
    short = ("--seconds", "0.1", "--warm-up", "0", "--rounds", "2", "--batch-size", "3")
    done = bench(*urls, *short, "--connections", "1,2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(text := file.read_text())
    assert text == json.dumps(found, indent=1) + "\n"
    assert re.fullmatch(r"[\d-]+T[\d:]+\+00:00", found["started_at"])
    assert (found["is_complete"], found["client"]["cores"]) == (True, len(os.sched_getaffinity(0)))
    assert abs(datetime.fromisoformat(found["started_at"]).timestamp() - began_s) < 60
    assert found["servers"] == [{"url": u, "dialect": "openai", "path": "/v1/embeddings", "model": "m"} for u in urls]
    assert (found["settings"]["batch_size"], found["settings"]["json"]) == (3, str(file))
    assert "api_key" not in found["settings"]
    heads = [f"{name}: {url}, openai /v1/embeddings, m" for name, url in zip("ab", urls, strict=True)]
    assert done.stdout.splitlines()[:4] == [*heads, "queries, 3 per request, 2 rounds of 0.1 s", ""]
    labels = [line.split("  ")[0] for line in done.stdout.splitlines()[5:9]]
    assert labels == [f"{load}, {name}" for load in ("1 connection", "2 connections") for name in "ab"]
    assert [(r["url"], r["connections"]) for r in found["results"]] == [(url, n) for n in (1, 2) for url in urls]
    for result in found["results"]:
        assert result["texts"] == 3 * result["requests"] > 0
        assert result["tokens_per_s"] == pytest.approx(7 * result["requests"] / result["seconds"], rel=0.01)
        assert result["errors"] == {}
        assert 0.2 <= result["seconds"] < 60
        assert 0 < result["client_share"] < 1.5
        assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["p99.9"] <= result["latency_ms"]["max"]
    assert [ratio["connections"] for ratio in found["ratios"]] == [1, 2]
    order = [(1, urls[0]), (1, urls[1]), (2, urls[1]), (2, urls[0])]
    rounds = [rf"{load}, round {i} of 2, {url}" for load in ("1 connection", "2 connections") for i, url in order]
    assert len(rounds) == done.stderr.count("\n")
    for name, line in zip(rounds, done.stderr.splitlines(), strict=True):
        assert re.fullmatch(rf"{name}: \d+\.\d s, [1-9]\d* texts/s", line)


def others(received: Received) -> Answered:
    """Answers like TEI, Ollama, Cohere and Infinity: two results."""
    replies = table(__file__, "replies_of_other_servers")
    return Answered(replies[received.path]) if received.path in replies else Answered({}, 404)


@cases(__file__, "server", "flags", "line")
def test_each_kind_of_server_is_measured(serve: Serve, server: str, flags: tuple[str, ...], line: str) -> None:
    url = f"{serve(others)}/{server}"
    done = bench(url, *SHORT, "--batch-size", "2", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"{url}, {line}"


def test_tls_and_key_reach_every_request(serve: Serve, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    def answer(received: Received) -> Answered:
        return openai_server(received) if received.headers.get("Authorization") == "Bearer k" else Answered({}, 401)

    url, key = serve(answer, certificate), tmp_path / "key"
    key.write_text("k\n")
    file = tmp_path / "result.json"
    tls = ("--ca-file", str(certificate[0]))
    rate = (*SHORT[:-1], "1,3", "--rate", "100")
    done = bench(url, *rate, *tls, "--api-key-file", str(key), "--json", str(file))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(file.read_text())["results"]
    assert (result["connections"], result["rate"]) == (3, 100)
    assert result["requests"] + result["errors"].pop(UNSENT, 0) == 10  # of the Poisson process in 0.1 s
    assert result["errors"] == {}


def test_interrupted_run_prints_the_rounds_so_far(serve: Serve, tmp_path: Path, monkeypatch) -> None:
    async def interrupt(*_: object, seconds: float, result: Round, **__: object) -> None:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        calls.append(seconds)
        result.seconds, result.latencies_s = 0.125, [0.25]
        if seconds == 0.2:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)

    monkeypatch.setattr(sweep, "run_round", interrupt)
    calls: list[float] = []
    urls, file = [serve(openai_server), serve(openai_server)], tmp_path / "result.json"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell script ignore it
    done = bench(*urls, "--seconds", "0.2", "--warm-up", "0.1", "--rounds", "1", "--json", str(file))
    signal.signal(signal.SIGINT, handler)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "penstock: interrupted")
    assert "1 round of 0.2 s; interrupted, with the rounds so far" in done.stdout
    found = json.loads(file.read_text())
    (result,) = found["results"]
    assert (found["is_complete"], result["url"], result["requests"]) == (False, urls[0], 1)
    assert calls == [0.1, 0.2]


async def test_progress_is_a_changing_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    clock, counted = Clock(), Round(40, errors=Counter(timeout=3))
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=clock))
    first, last = "load: 0.0 s, 40000000000 texts/s, 3 errors", "load: 0.5 s, 80 texts/s, 3 errors"
    for is_terminal, shown in ((False, f"{last}\n"), (True, f"\r{first}\x1b[K\r{last}\x1b[K\n")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda it=is_terminal: it)
        clock.now_s = 0.0
        async with sweep._progress("load", counted):
            await asyncio.sleep(0)
            clock.now_s = 0.5
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert capsys.readouterr().err == shown


@cases(__file__, "flags", "message")
def test_unusable_server_or_flag_ends_with_one_line(serve: Serve, flags: tuple[str, ...], message: str) -> None:
    def answer(received: Received) -> Answered:
        known = {"/v1/models": {"data": [{"id": "m"}]}, "/v1/embeddings": {"data": [1, 2]}, "/classify": b"no JSON"}
        known["/v1/rerank"] = {"results": 5}
        return Answered(known[received.path]) if received.path in known else Answered(b"no such task", 404)

    url = serve(answer)
    done = bench(url, *flags)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@cases(__file__, "urls", "settings", "message")
def test_unusable_arguments_are_rejected_before_the_load(urls: list[str], settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sweep(urls, load_settings(BenchSettings, settings))


def test_run_without_a_successful_request_fails(serve: Serve) -> None:
    calls = iter(range(10**9))
    done = bench(serve(lambda received: openai_server(received) if next(calls) < 2 else Answered({}, 500)), *SHORT)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "penstock: error: no request succeeded")


def test_plot_names_servers_percentiles_and_loads(serve: Serve, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'penstock[plot]'")
    urls, file = [serve(openai_server), serve(openai_server)], tmp_path / "plot.svg"
    done = bench(*urls, *SHORT[:-1], "1,2", "--plot", str(file))
    assert done.returncode == 0, done.stderr
    comments = re.findall("<!-- (.*?) -->", file.read_text())  # matplotlib writes each text as a comment
    assert [text for text in comments if "http" in text] == [f"m, {url}" for url in urls]
    assert (comments.count("1"), comments.count("2"), comments.count("numbers: connections")) == (2, 2, 1)


def test_plot_has_a_line_for_each_percentile_and_a_number_for_each_load(monkeypatch: pytest.MonkeyPatch) -> None:
    figures, text = (pytest.importorskip(f"matplotlib.{name}") for name in ("figure", "text"))
    saved: list[Any] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, _, **options: saved.extend((figure, options)))
    latencies = [number / 1000 for number in range(100, 200)]
    results = [
        LoadTestResult(LoadPoint(8, rate), url, [Round(num_texts, 0, 2.0, [factor * each for each in latencies])])
        for url, rate, num_texts, factor in (("a", 2.5, 100, 1), ("a", 20.0, 300, 2), ("b", None, 100, 1))
    ]
    failed = LoadTestResult(LoadPoint(8, 30.0), "a", [Round()])
    plot([*results, failed], {"a": "first, a"}, "the title", Path("p.png"))
    figure, options = saved
    (axes,) = figure.axes
    expected = table(__file__, "test_plot_has_a_line_for_each_percentile_and_a_number_for_each_load")
    texts = [each for each in figure.findobj(text.Text) if each.get_text()]
    grids = [ticks[0].gridline for ticks in (axes.xaxis.get_major_ticks(), axes.yaxis.get_minor_ticks(1))]
    lines = [
        [each.get_label(), each.get_xydata().tolist(), each.get_color(), each.get_linestyle(), each.get_markersize()]
        for each in axes.lines
    ]
    assert lines == expected["lines"]
    assert {each.get_marker() for each in axes.lines if len(each.get_xydata())} == {"o"}
    assert [[each.get_text(), each.get_fontsize(), each.get_color()] for each in texts] == expected["texts"]
    places = [[[*each.xy], [*each.xyann], each.anncoords, each.get_ha()] for each in axes.texts]
    assert places == expected["places of numbers"]
    assert [[each.get_visible(), each.get_linewidth(), each.get_alpha()] for each in grids] == expected["grids"]
    assert [axes.get_yscale(), axes.get_xlim()[0], axes.yaxis.get_major_formatter().fmt] == ["log", 0, "{x:g}"]
    assert axes.yaxis.get_minor_formatter().minor_thresholds == (1, 0.4)
    assert [legend.get_frame_on() for legend in (axes.get_legend(), *figure.legends)] == [True, False]
    assert (figure.get_size_inches().tolist(), options) == ([8, 5], {"dpi": 150})
    assert figure.get_layout_engine() is not None, "otherwise texts may be cut off"
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().y1 <= axes.get_window_extent().y0, "it is below the axes"


def test_plot_file_is_checked_before_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'penstock[plot]'")
    for name, message in (("plot.txt", "the name of the file must end with"), ("no/plot.png", "does not exist")):
        with pytest.raises(UsageError, match=f"--plot: .*{message}"):
            check_plot(tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"run `pip install 'penstock\[plot\]'`"):
        check_plot(Path("plot.png"))


async def test_open_loop_counts_latency_from_the_scheduled_time() -> None:
    """The server answers one request in 20 ms; 200 requests per second wait for the only connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            await asyncio.sleep(0.02)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")
        writer.close()
        await writer.wait_closed()
        ended.set()
        connections.append(writer)

    ended, connections = asyncio.Event(), list[asyncio.StreamWriter]()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    found = await run_round(address, [b"GET / HTTP/1.1\r\n\r\n"], 1, connections=1, seconds=0.2, timeout_s=60, rate=200)
    await ended.wait()
    server.close()
    assert found.errors.keys() == {UNSENT}
    assert len(found.latencies_s) + found.errors.total() == 31  # of the Poisson process in 0.2 s
    assert len(connections) == 1
    assert found.latency_ms(0.0) >= 20
    assert found.latency_ms(1.0) > 80  # the queue grows; each response alone takes 20 ms


@cases(__file__, "end", "reply", "error")
async def test_failed_requests_are_counted_by_kind(end: str, reply: str, error: str) -> None:
    num_connections = num_requests = 0
    first_reply = b"HTTP/1.1 200 OK\r\nX-Compute-Tokens: 9\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections, num_requests
        num_connections += 1
        while await reader.readline():
            await reader.readline()
            num_requests += 1
            if num_requests == 1 or end == "reply":
                writer.write(first_reply if num_requests == 1 else reply.encode())
                break
            if end == "stop":
                break
        if end == "stop":
            server.close()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    request = [b"GET / HTTP/1.1\r\n\r\n"]
    found = await run_round(address, request, 3, connections=1, seconds=0.1, timeout_s=0.1 if end == "none" else 60)
    server.close()
    assert (found.num_texts, found.num_tokens, len(found.latencies_s)) == (3, 9, 1)
    assert num_connections == num_requests, "a failed request ends its connection"
    assert 0 < found.latencies_s[0] < 60
    (kind,) = found.errors
    assert kind.startswith(error)
    assert end != "reply" or found.errors.total() == num_requests - 1
    assert kind == "status 503" or found.errors.total() <= 4, "a pause follows a lost connection"
    assert _kind(ConnectionResetError(104, "reset")) == "connection reset"


def test_usage_at_either_end_of_a_response_is_read() -> None:
    usage, vectors = b'"usage": {"total_tokens" : 7}', b"0.5," * 2000
    bodies = usage + vectors, vectors + usage, vectors + usage + vectors, usage
    assert [_num_tokens(body) for body in bodies] == [7, 7, 0, 7]
    end = b'"total_tokens": 7'.ljust(2048)
    assert [_num_tokens(vectors + body) for body in (end, end + b" ")] == [7, 0]


DIGESTS = {"queries": "d6b9fc1306b2df4f", "documents": "78e74a3d94c26435", "mixed": "3293d8831d3424f8"}


@pytest.mark.parametrize("name", BUILT_IN_WORKLOADS)
def test_workload_is_the_same_in_every_version_and_keeps_its_limit(name: str) -> None:
    full, limited = Workload.open(name, 2, 10**6), Workload.open(name, 2, 50)
    found = [full.requests(1), full.query(1), full.longest_text()]
    assert hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] == DIGESTS[name]
    texts = [text for request in limited.requests(1) for text in request]
    assert texts != [text for request in limited.requests(2) for text in request]
    assert max(len(text.split()) for text in texts) == len(limited.longest_text().split()) == 50
    assert [len(Workload.open(name, size, 1).requests(0)) for size in (1, 1000)] == [8192, 64]


def test_jsonl_file_gives_its_texts(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a b"}\n\n{"text": "c"}\n')
    workload = Workload.open(str(file), 2, 1)
    assert workload.texts == ("a b", "c")
    assert workload.longest_text() == "a b"
    assert {text for request in workload.requests(0) for text in request} == {"a b", "c"}
    assert len(workload.query(0).split()) == 1


@cases(__file__, "content", "message")
def test_unusable_file_of_texts_is_rejected(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        Workload.open(str(file), 1, 1)


def test_ratio_compares_rounds_with_the_same_number() -> None:
    def result(*rates: int) -> LoadTestResult:
        rounds = [Round(rate, 0, 1.0, [part / rate for part in (0, 1, 9)]) for rate in rates]
        return LoadTestResult(LoadPoint(1, None), "u", rounds)

    found = ratios(result(10, 30, 40, 9), result(10, 10, 10))
    assert found["texts_per_s"] == (3, 1, 4)
    assert found["p50_latency"] == pytest.approx((1 / 3, 1 / 4, 1))
    assert found["p99_latency"] == pytest.approx((1 / 3, 1 / 4, 1))
