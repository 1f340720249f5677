"""The peers: which settings each can have, and how it is started with one."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from servers import Server

from .environments import Environment
from .model import Model
from .sides import HttpSide, Side, WorkerSide

FLOAT32, BFLOAT16 = "float32", "bfloat16"

NOT_TO_BE_HAD = {
    "tei": "Text Embeddings Inference is a Rust program; PyPI has clients of it, but no build of the server"
}
"""Rivals that no package index holds, and why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a side is run.

    Attributes:
        dtype: Of weights and hidden states.
        threads: CPU threads of the forward.
        variant: Further option. The first variant of a peer is its default.
    """

    dtype: str
    threads: int
    variant: str

    def __str__(self) -> str:
        return f"{self.dtype}, {self.threads} thread{'s' if self.threads > 1 else ''}, {self.variant}"

    def as_json(self) -> dict[str, Any]:
        """Returns its fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Place:
    """The folders of the peers.

    Attributes:
        model: The model.
        cache: Folder of the environments.
        logs: Folder for the logs of the peers.
        torch_index: A further package index for torch.
        cores: Processors that this process may use.
    """

    model: Model
    cache: Path
    logs: Path
    torch_index: str
    cores: tuple[int, ...]

    def environment(self, name: str) -> Environment:
        """Returns the environment of that name, which may not have been filled yet."""
        return Environment(name, self.cache, self.torch_index)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server or a library that can run the model.

    Attributes:
        name: Name in tables.
        package: Package with the reported version; "" for penstock.
        variants: Settings to try, each with its supported dtypes.
        open: Makes a side that is not running yet.
        over: "HTTP" or "in process".
        environment: Name of its environment; "" for penstock's own.
        graph_variants: Variants that need the model as an ONNX graph.
    """

    name: str
    package: str
    variants: dict[str, tuple[str, ...]]
    open: Callable[[Place, Setting], Side]
    over: str = "HTTP"
    environment: str = ""
    graph_variants: frozenset[str] = field(default_factory=frozenset)

    def first_settings(self, threads: list[int]) -> list[Setting]:
        """Returns its default variant in every dtype with every number of threads."""
        variant, dtypes = next(iter(self.variants.items()))
        return [Setting(dtype, number, variant) for dtype in dtypes for number in threads]

    def further_settings(self, best: Setting) -> list[Setting]:
        """Returns the other variants, each with the values of the best setting so far if it supports them.

        One thread is one stream, so that variants in streams are left out there.
        """
        others = list(self.variants.items())[1:]
        return [
            Setting(best.dtype if best.dtype in dtypes else dtypes[0], best.threads, variant)
            for variant, dtypes in others
            if best.threads > 1 or "streams" not in variant
        ]


def _open_penstock(place: Place, setting: Setting) -> Side:
    """Without its bound of the queue's time: the others queue for as long as clients wait."""
    program = Path(sys.executable).with_name("penstock")
    port = free_port()
    command = (
        f"{_quoted(program)} serve {_quoted(place.model.folder)} --host 127.0.0.1 --port {port} "
        f"--dtype {setting.dtype} --num-threads {setting.threads} --max-queue-s 0"
    )
    return _server("penstock", command, port, place)


def _open_vllm(place: Place, setting: Setting) -> Side:
    """Its threads are bound to processors; like its own choice, from the last one on."""
    environment = place.environment("vllm")
    processors = ",".join(map(str, place.cores[-setting.threads :]))
    port = free_port()
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": processors,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(place.cache / "vllm"),
        "HF_HUB_OFFLINE": "1",
    }
    if setting.variant == "Intel OpenMP":
        variables["LD_PRELOAD"] = str(environment.home / "lib" / "libiomp5.so")
    command = (
        f"{_assignments(variables)} {_quoted(environment.program('vllm'))} serve {_quoted(place.model.folder)} "
        f"--runner pooling --dtype {setting.dtype} --served-model-name m --host 127.0.0.1 --port {port} "
        "--gpu-memory-utilization 0.2 --disable-uvicorn-access-log"
    )
    return _server("vllm", command, port, place)


def _open_infinity(place: Place, setting: Setting) -> Side:
    """From inside the model's folder: with the optimum of today it finds a graph only there."""
    engine = {"torch": "torch", "ONNX Runtime": "optimum"}[setting.variant]
    port = free_port()
    variables = {
        "OMP_NUM_THREADS": str(setting.threads),
        "RAYON_NUM_THREADS": str(setting.threads),
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(place.model.folder.with_name("infinity")),
    }
    command = (
        f"{_assignments(variables)} env -C {_quoted(place.model.folder)} "
        f"{_quoted(place.environment('infinity').program('infinity_emb'))} v2 --model-id . --served-model-name m "
        f"--host 127.0.0.1 --port {port} --engine {engine} --device cpu --dtype {setting.dtype} "
        "--pooling-method mean --no-bettertransformer --no-model-warmup --url-prefix /v1 --log-level warning"
    )
    return _server("infinity", command, port, place)


def _worker(name: str, backend: str) -> Callable[[Place, Setting], Side]:
    def open_worker(place: Place, setting: Setting) -> Side:
        graph = place.model.fused_graph if "fused" in setting.variant else place.model.graph
        options = {
            "backend": backend,
            "model": str(place.model.folder),
            "graph": str(graph),
            "max_tokens": place.model.max_tokens,
            "streams": setting.threads if "streams" in setting.variant else 1,
            "dtype": setting.dtype,
            "threads": setting.threads,
        }
        return WorkerSide(name, place.environment(name).python, options, place.logs / f"{name}.log")

    return open_worker


def _server(name: str, command: str, port: int, place: Place) -> Side:
    return HttpSide(Server(name, command, f"http://127.0.0.1:{port}", place.logs / f"{name}.log"))


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _assignments(variables: dict[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


BOTH = (FLOAT32, BFLOAT16)
PEERS = {
    peer.name: peer
    for peer in (
        Peer("penstock", "", {"queue without bound": BOTH}, _open_penstock),
        Peer(
            "vllm",
            "vllm-cpu",
            {"as it comes": BOTH, "Intel OpenMP": BOTH},
            _open_vllm,
            environment="vllm",
        ),
        Peer(
            "infinity",
            "infinity_emb",
            {"torch": BOTH, "ONNX Runtime": (FLOAT32,)},
            _open_infinity,
            environment="infinity",
            graph_variants=frozenset({"ONNX Runtime"}),
        ),
        Peer(
            "sentence-transformers",
            "sentence-transformers",
            {"as it comes": BOTH},
            _worker("sentence-transformers", "SentenceTransformers"),
            over="in process",
            environment="sentence-transformers",
        ),
        Peer(
            "onnxruntime",
            "onnxruntime",
            {"fused": (FLOAT32,), "plain": (FLOAT32,), "fused, streams": (FLOAT32,)},
            _worker("onnxruntime", "OnnxRuntime"),
            over="in process",
            environment="onnxruntime",
            graph_variants=frozenset({"fused", "plain", "fused, streams"}),
        ),
        Peer(
            "openvino",
            "openvino",
            {"one stream": BOTH, "streams": BOTH},
            _worker("openvino", "OpenVino"),
            over="in process",
            environment="openvino",
            graph_variants=frozenset({"one stream", "streams"}),
        ),
    )
}
