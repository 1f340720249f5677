"""The functions that a request and a chunk of a long prompt pass, and the specification's classes in use.

Both processes of a server record the call stacks of our functions while one request is served. The path of a request is
the shortest stack to each function that hands the request on: to the engine's process, to the model, back to the
server's process, to the client. Functions that return before that are not on the path, nor are the loops in which
a thread waits for work. `pytest -s` prints the paths.
"""

import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

import penstock.engine
import penstock.kernels
import penstock.server

LOOPS = ("server/commands/serve.py serve", "engine/core/core.py EngineCore.run", "engine/core/core.py EngineCore._wait")
"""Functions in which the processes wait for work."""

TO_ENGINE = (
    "server/http/connection.py Connection.on_headers_complete",
    "engine/tokenization/model_tokenizer.py ModelTokenizer.encode",
    "engine/client/dispatcher.py Replica.run",
    "engine/protocol/message_connection.py MessageConnection.send",
)
IN_ENGINE = (
    "engine/scheduling/scheduler.py Scheduler.add",
    "engine/scheduling/scheduler.py Scheduler.schedule",
    "engine/core/array_runner.py ArrayRunner.begin",
    "engine/pooling/model_pooler.py ModelPooler.pool",
    "engine/protocol/message_connection.py MessageConnection.send",
)
TO_CLIENT = ("engine/client/dispatcher.py Replica.receive", "server/http/response_writer.py ResponseWriter.write")
CHUNK = (
    "engine/scheduling/chunked_prefill.py ChunkedPrefillManager.schedule_chunk",
    "engine/pooling/chunked_manager.py ChunkedPoolingManager.process_batch",
)
"""The functions that hand a request or a chunk on, in their order."""

MOST_FUNCTIONS_OF_REQUEST = 30
MOST_FUNCTIONS_OF_CHUNK = 15

RECORDER = """
    import json, os, signal, sys, threading

    FOLDER, ROOTS, LOOPS = json.loads(os.environ["TRACE"])
    names, stacks, is_on = {}, set(), threading.Event()

    def name_of(code):
        if code not in names:
            root = next((root for root in ROOTS if code.co_filename.startswith(root + os.sep)), None)
            is_ours = root is not None and not code.co_name.startswith("<")
            path = root and os.path.relpath(code.co_filename, os.path.dirname(root))
            names[code] = path + " " + code.co_qualname.replace("<locals>.", "") if is_ours else ""
        return names[code]

    def record(frame, event, argument):
        if event != "call" or not is_on.is_set() or not name_of(frame.f_code):
            return
        stack = []
        while frame is not None and (name := name_of(frame.f_code)) not in LOOPS:
            stack += [name] if name else []
            frame = frame.f_back
        if stack:
            stacks.add(tuple(reversed(stack)))

    def write(suffix, value):
        path = os.path.join(FOLDER, f"{os.getpid()}.{suffix}")
        with open(path + "~", "w") as file:
            json.dump(value, file)
        os.rename(path + "~", path)

    def begin(*_):
        is_on.set()
        sys.setprofile(record)
        write("on", None)

    def end(*_):
        sys.setprofile(None)
        is_on.clear()
        write("stacks", sorted(stacks))

    threading.setprofile(record)  # of threads that start later
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    write("pid", None)
"""
"""Runs as `sitecustomize` when Python starts: SIGUSR1 and SIGUSR2 begin and end a record."""

Stack = tuple[str, ...]
"""Functions of a call stack as "file name", outermost first."""


class Trace(NamedTuple):
    """The call stacks of one process."""

    stacks: list[Stack]

    def path_to(self, functions: Iterable[str]) -> list[str]:
        """Returns the functions on the shortest stacks that end in the given ones, each once."""
        path: dict[str, None] = {}
        for function in functions:
            stacks = [stack for stack in self.stacks if stack[-1] == function]
            assert stacks, f"{function} was not called"
            path |= dict.fromkeys(min(stacks, key=len))
        return list(path)

    def uses(self, class_name: str) -> bool:
        """Returns whether a method of a class was called."""
        return any(f" {class_name}." in stack[-1] for stack in self.stacks)


Record = Callable[..., tuple[Trace, Trace]]


@pytest.fixture
def record(launch, tmp_path: Path) -> Record:
    """Starts a server, sends it a request, and returns the traces of its own process and of the engine's."""
    packages = (penstock.server, penstock.engine, penstock.kernels)
    roots = [str(Path(str(package.__file__)).parent) for package in packages]

    def signal_all(processes: list[int], number: int, suffix: str) -> list[Path]:
        """Sends a signal and returns the files that the processes write then."""
        for process in processes:
            os.kill(process, number)
        while len(files := sorted(tmp_path.glob(f"*.{suffix}"))) < len(processes):
            for process in processes:
                os.kill(process, 0)  # raises if it has ended
            time.sleep(0.01)
        return files

    def run(*flags: str, text: str) -> tuple[Trace, Trace]:
        (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(RECORDER))
        folders = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
        server = launch(*flags, PYTHONPATH=folders, TRACE=json.dumps([str(tmp_path), roots, LOOPS]))
        processes = [int(path.stem) for path in tmp_path.glob("*.pid")]
        signal_all(processes, signal.SIGUSR1, "on")
        headers = {"Authorization": "Bearer key"}
        response = httpx.post(f"{server.url}/v1/embeddings", json={"input": text}, headers=headers, timeout=120)
        assert response.status_code == 200, response.text
        files = signal_all(processes, signal.SIGUSR2, "stacks")
        server.process.kill()
        traces = [Trace([tuple(stack) for stack in json.loads(file.read_text())]) for file in files]
        (engine,) = (trace for trace in traces if trace.uses("EngineCore"))
        (http,) = (trace for trace in traces if trace.uses("Application"))
        return http, engine

    return run


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    """A tiny random decoder, whose prompts run in chunks."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 512, "vocab_size": 30_522}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 2}
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("decoder")
    transformers.Qwen2Model(transformers.Qwen2Config(**sizes, **heads)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((default_model / name).read_bytes())
    return folder


def assert_documented(path: list[str]) -> None:
    """The document on the architecture names every file on the path."""
    text = (Path(__file__).parents[2] / "docs" / "internals" / "architecture.md").read_text("utf-8")
    assert sorted({file for file in (function.split()[0] for function in path) if file not in text}) == []


def report(title: str, path: list[str]) -> None:
    lines = [f"{number:3} {function}" for number, function in enumerate(path, 1)]
    sys.stdout.write("\n".join(["", title, *lines, ""]))


def test_a_request_passes_few_functions(record: Record, default_model: Path) -> None:
    http, engine = record("--api-key", "key", text="What holds back the water?")
    parts = (http.path_to(TO_ENGINE), engine.path_to(IN_ENGINE), http.path_to(TO_CLIENT))
    path = list(dict.fromkeys(function for part in parts for function in part))
    report("a request, from the socket to the response", path)
    assert len(path) <= MOST_FUNCTIONS_OF_REQUEST
    assert_documented(path)
    assert engine.uses("Scheduler")
    assert engine.uses("PoolingMetadata")


def test_a_chunk_passes_few_functions(record: Record, decoder: Path) -> None:
    flags = ("--dtype", "float32", "--max-model-len", "400", "--chunk-size", "64")
    _, engine = record(str(decoder), *flags, text="water " * 60)
    path = engine.path_to(CHUNK)
    report("a chunk of a long prompt, from the scheduler to the pooled state", path)
    assert len(path) <= MOST_FUNCTIONS_OF_CHUNK
    assert_documented(path)
    classes = ("ChunkedPrefillManager", "ChunkedPoolingManager", "SequencePool", "PoolingMetadata", "Scheduler")
    assert [name for name in classes if not engine.uses(name)] == []
