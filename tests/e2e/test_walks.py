"""The walks of docs/structure.md are what happens: every function that they name runs for such a request.

Both processes of a server count the calls of their functions from a signal on: Python imports `sitecustomize` when it
starts, and a folder in PYTHONPATH has one that does it. What else a request passes is printed (`pytest -s`): the walks
leave out small steps.
"""

import json
import os
import re
import shutil
import signal
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx
import pytest

from penstock.kernels.native.machine import LIBRARY

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("server", "engine", "kernels")
NOT_COUNTED = ("engine/models/", "engine/layers/", "kernels/")
STRUCTURE = (ROOT / "docs" / "structure.md").read_text("utf-8")
RECORDER = """
    import collections, json, os, signal, sys, threading

    folder, name = os.environ["WALK_FOLDER"], str(os.getpid())
    calls, is_on = collections.Counter(), threading.Event()

    def count(frame, event, argument):
        if event == "call" and is_on.is_set():
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    def begin(*_):
        is_on.set()
        sys.setprofile(count)

    def end(*_):
        is_on.clear()
        sys.setprofile(None)
        with open(os.path.join(folder, name + ".part"), "w") as file:
            json.dump([[*key, number] for key, number in calls.items()], file)
        os.rename(file.name, os.path.join(folder, name + ".json"))

    threading.setprofile(count)
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    open(os.path.join(folder, name + ".pid"), "w").close()
"""

Calls = Counter[tuple[str, str]]
"""Calls of each function by file and qualified name, in one process."""
Trace = Callable[..., list[Calls]]


@pytest.fixture
def trace(launch, tmp_path: Path) -> Trace:
    """Start a server with `flags`, and count what `send` makes each of its processes call."""

    def run(*flags: str, send: Callable[[httpx.Client], httpx.Response]) -> list[Calls]:
        (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(RECORDER))
        paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
        server = launch(*flags, PYTHONPATH=paths, WALK_FOLDER=str(tmp_path))
        processes = [int(path.stem) for path in tmp_path.glob("*.pid")]
        for process in processes:
            os.kill(process, signal.SIGUSR1)
        time.sleep(0.5)
        with httpx.Client(base_url=server.url, timeout=120) as client:
            answer = send(client)
        assert answer.status_code == 200, answer.text
        for process in processes:
            os.kill(process, signal.SIGUSR2)
        while len(files := list(tmp_path.glob("*.json"))) < len(processes):
            time.sleep(0.05)
        server.process.kill()
        return [calls_in(json.loads(file.read_text())) for file in files]

    return run


def calls_in(rows: Iterable[tuple[str, str, int]]) -> Calls:
    """Returns the calls of our own functions."""
    ours = {path: str(path.relative_to(ROOT)) for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    calls: Calls = Counter()
    for file, name, number in rows:
        if (path := ours.get(Path(file).resolve())) is not None:
            calls[path, name.replace("<locals>.", "")] += number
    return calls


def check(walk: str, named_of: Calls, passed: set[str]) -> None:
    """Fail where a function of a walk was not called; print the files that it leaves out."""
    found = re.search(rf"<!-- walk: {walk},.*?-->\n(.*?)\n(\n|\Z)", STRUCTURE + "\n", re.DOTALL)
    assert found is not None
    walked, missing = set(), []
    for path, names in re.findall(r"^\d+\. `([\w/.]+)` ((?:`[\w.]+`(?:, )?)+):", found[1], re.MULTILINE):
        walked.add(path)
        called = [f"{name}." for file, name in named_of if file == path]
        unseen = [n for n in re.findall(r"`(.+?)`", names) if not any(each.startswith(f"{n}.") for each in called)]
        missing += [f"{path} {name}" for name in unseen]
    counted = sorted(path for path in passed if not path.startswith(NOT_COUNTED))
    print(f"\n{walk}: {len(counted)} files run; not in the walk:", *(p for p in counted if p not in walked), sep="\n  ")
    assert walked
    assert not missing


@pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernels are not built")
def test_one_request(trace: Trace) -> None:
    body = {"input": ["What holds back the water?", "A dam. " * 30]}
    headers = {"Authorization": "Bearer key"}
    calls = trace("--api-key", "key", send=lambda client: client.post("/v1/embeddings", json=body, headers=headers))
    total = sum(calls, Counter())
    check("request", total, {path for path, _ in total})


def test_one_chunk(trace: Trace, tmp_path: Path, default_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "tiny"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.LlamaConfig(vocab_size=30522, max_position_embeddings=32768, **sizes)
        transformers.LlamaModel(config).save_pretrained(folder)
    shutil.copy(default_model / "tokenizer.json", folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    body = {"input": [1000 + i % 5000 for i in range(32_000)]}

    flags = (str(folder), "--pooler-config", '{"pooling_type": "MEAN"}', "--cpu-kernels", "torch")
    calls = trace(*flags, send=lambda client: client.post("/v1/embeddings", json=body))
    step = ("engine/core/core.py", "EngineCore.step")
    (core,) = (each for each in calls if step in each)
    assert core[step] > 8
    check("chunk", core, {path for (path, _), number in core.items() if number >= core[step] - 2})
