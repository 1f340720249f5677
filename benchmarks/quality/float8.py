"""How near FP8 products would stay to float32: cosines of texts' vectors, with the products' numbers rounded on a CPU.

    python benchmarks/quality/float8.py FOLDER [FOLDER ...] --data path/to/scifact

Simulates row-wise FP8 products of a GPU: weights in e4m3 with a scale for each output, inputs in e4m3 with a scale for
each token, sums in float32, results in bfloat16; attention, norms and the sum of the layers as they are. transformers
runs the model, so that only the numbers of the products differ from the baseline.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from penstock.server.quality.tasks import RetrievalTask

NUM_TEXTS = 48
MAX_TOKENS = 512
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Float8Linear(nn.Module):
    """A linear layer that rounds inputs and weights to e4m3, row by row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight, self._bias = rounded(linear.weight), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., D] float32 of [..., K]."""
        return F.linear(rounded(x), self._weight, self._bias).bfloat16().float()


def rounded(x: Tensor) -> Tensor:
    """Returns the numbers of [..., K] as e4m3 holds them, scaled so that the largest of a row is its largest."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@torch.no_grad()
def cosines(model: str, texts: list[str]) -> Tensor:
    """Returns [N]: cosines between a model's vectors in float32 and with rounded products."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).float().eval()
    is_decoder = "CausalLM" in "".join(network.config.architectures or ())

    def vectors() -> Tensor:
        return torch.stack([vector_of(text) for text in texts])

    def vector_of(text: str) -> Tensor:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=MAX_TOKENS)
        hidden_states = network(**inputs).last_hidden_state[0]
        return F.normalize(hidden_states[-1] if is_decoder else hidden_states.mean(0), dim=0)

    exact = vectors()
    replace(network, Float8Linear)
    return (exact * vectors()).sum(-1)


def replace(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Puts what `make` gives in place of every linear layer."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
        else:
            replace(child, make)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders")
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    task = RetrievalTask.read(args.data)
    kinds = {"abstracts": list(task.corpus.values())[:NUM_TEXTS], "claims": list(task.queries.values())[:NUM_TEXTS]}
    for model in args.models:
        for kind, texts in kinds.items():
            found = cosines(model, texts)
            print(f"{Path(model).name:24} {kind:10} mean {found.mean():.4f}, least {found.min():.4f}", flush=True)


if __name__ == "__main__":
    main()
