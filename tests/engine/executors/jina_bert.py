"""Random weights of JinaBERT v2 in both layouts of the hub, and a reference written from its papers."""

import math

import torch
import torch.nn.functional as F

from ...tables import table

HUB = table(__file__, "config_json_of_jina_bert_on_the_hub")
D, I, H = HUB["hidden_size"], HUB["intermediate_size"], HUB["num_attention_heads"]  # noqa: E741


def make_weights(has_norms):
    """Random tensors with the names of the hub."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    weights = {
        f"embeddings.{name}_embeddings.weight": normal(rows, D) for name, rows in (("word", 200), ("token_type", 2))
    }
    maps, norms = {"pooler.dense": (D, D, True)}, ["embeddings.LayerNorm"]
    for layer in (f"encoder.layer.{index}." for index in range(3)):
        names = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
        maps |= {layer + name: (D, D, True) for name in names}
        up, down = ("up_gated_layer", "down_layer") if has_norms else ("gated_layers", "wo")
        maps |= {f"{layer}mlp.{up}": (2 * I, D, False), f"{layer}mlp.{down}": (D, I, True)}
        norms.append(f"{layer}attention.output.LayerNorm")
        more = ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2")
        norms += [layer + name for name in (more if has_norms else ("mlp.layernorm",))]
    for name, (rows, columns, has_bias) in maps.items():
        weights[f"{name}.weight"] = normal(rows, columns) / 6
        if has_bias:
            weights[f"{name}.bias"] = normal(rows) / 3
    for name in norms:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + normal(D) / 3, normal(D) / 3
    return weights


class Reference:
    """One sequence at a time, in float64."""

    def __init__(self, weights, activation=F.gelu):
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.activation = activation
        self.has_norms = "encoder.layer.0.layer_norm_1.weight" in weights

    def linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name, x):
        return F.layer_norm(x, (D,), self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-12)

    def attention(self, layer, x):
        q, k, v = (self.linear(f"{layer}attention.self.{name}", x) for name in ("query", "key", "value"))
        if self.has_norms:
            q, k = (
                self.norm(f"{layer}attention.self.layer_norm_q", q),
                self.norm(f"{layer}attention.self.layer_norm_k", k),
            )
        q, k, v = (part.unflatten(1, (H, -1)).transpose(0, 1) for part in (q, k, v))
        slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8], dtype=torch.float64)
        positions = torch.arange(len(x))
        distance = (positions[:, None] - positions).abs()
        scores = q @ k.transpose(1, 2) / math.sqrt(D // H) - slopes[:, None, None] * distance
        probabilities = scores.softmax(-1)
        return self.linear(
            f"{layer}attention.output.dense", (probabilities @ v).transpose(0, 1).flatten(1)
        ), probabilities

    def __call__(self, sequence, boundary=0):
        types = (torch.arange(len(sequence)) >= (boundary or len(sequence))).long()
        x = self.weights["embeddings.word_embeddings.weight"][sequence]
        x = self.norm("embeddings.LayerNorm", x + self.weights["embeddings.token_type_embeddings.weight"][types])
        for layer in (f"encoder.layer.{index}." for index in range(3)):
            attended, self.last_probabilities = self.attention(layer, x)
            y = self.norm(f"{layer}attention.output.LayerNorm", x + attended)
            if self.has_norms:
                y = self.norm(f"{layer}layer_norm_1", x + y)
                values, gate = self.linear(f"{layer}mlp.up_gated_layer", y).chunk(2, 1)
                mlp = self.linear(f"{layer}mlp.down_layer", values * self.activation(gate))
                x = self.norm(f"{layer}layer_norm_2", y + mlp)
            else:
                gate, values = self.linear(f"{layer}mlp.gated_layers", y).chunk(2, 1)
                x = self.norm(
                    f"{layer}mlp.layernorm", y + self.linear(f"{layer}mlp.wo", self.activation(gate) * values)
                )
        return x
