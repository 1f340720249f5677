"""Reference of kernels/cpu: an encoder in plain torch and float64, one sequence and one head at a time."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cpu import ActivationCode, EncoderWeights, Format, LayerWeights, LinearWeights, NormWeights

from .rounding import to_bfloat16
from .specs import Texts

FUNCTIONS = {
    ActivationCode.NONE: lambda x: x,
    ActivationCode.GELU: F.gelu,
    ActivationCode.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    ActivationCode.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    ActivationCode.RELU: F.relu,
    ActivationCode.SILU: F.silu,
    ActivationCode.TANH: torch.tanh,
}


def encode(spec: EncoderWeights, texts: Texts, form: Format = Format.F32) -> tuple[Tensor, Tensor]:
    """Results of CpuEncoder in float64. Only the weights are rounded to the format."""
    rows, weights = [], []
    for number, length in enumerate(texts.lengths):
        text = texts[number]
        hidden_LD = _doubles(spec.word_embeddings)[torch.from_numpy(text.ids)]
        if spec.position_embeddings is not None:
            hidden_LD = hidden_LD + _doubles(spec.position_embeddings)[torch.from_numpy(text.positions)]
        hidden_LD = _norm(hidden_LD, spec.embedding_norm)
        if spec.projection is not None:
            hidden_LD = _map(hidden_LD, spec.projection, form)
        visible = length if text.visible is None else int(text.visible[0])
        for layer in spec.layers:
            hidden_LD, weights_LH = _layer(hidden_LD, layer, spec, visible, form)
        rows.append(_norm(hidden_LD, spec.final_norm))
        weights.append(weights_LH)
    return torch.cat(rows), torch.cat(weights)


def _layer(
    hidden_LD: Tensor, layer: LayerWeights, spec: EncoderWeights, visible: int, form: Format
) -> tuple[Tensor, Tensor]:
    if spec.pre_norm:
        attended_LD, weights_LH = _attend(_norm(hidden_LD, layer.attention_norm), layer, spec, visible, form)
        hidden_LD = hidden_LD + _norm(attended_LD, layer.after_attention)
        return hidden_LD + _norm(_mlp(_norm(hidden_LD, layer.mlp_norm), layer, form), layer.after_mlp), weights_LH
    attended_LD, weights_LH = _attend(hidden_LD, layer, spec, visible, form)
    summed_LD = hidden_LD + attended_LD
    if layer.after_attention is not None:
        summed_LD = hidden_LD + _norm(summed_LD, layer.after_attention)
    hidden_LD = _norm(summed_LD, layer.attention_norm)
    return _norm(hidden_LD + _mlp(hidden_LD, layer, form), layer.mlp_norm), weights_LH


def _mlp(x_LD: Tensor, layer: LayerWeights, form: Format) -> Tensor:
    return _map(_map(x_LD, layer.mlp_in, form), layer.mlp_out, form)


def _attend(
    x_LD: Tensor, layer: LayerWeights, spec: EncoderWeights, visible: int, form: Format
) -> tuple[Tensor, Tensor]:
    length, num_heads, num_kv_heads = len(x_LD), spec.num_heads, spec.num_kv_heads or spec.num_heads
    heads = _map(x_LD, layer.qkv, form).view(length, num_heads + 2 * num_kv_heads, -1)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    if spec.is_decoder:
        q, k = _norm(q, layer.query_norm), _norm(k, layer.key_norm)
    else:
        q = _norm(q.flatten(1), layer.query_norm).view_as(q)
        k = _norm(k.flatten(1), layer.key_norm).view_as(k)
    if layer.rotary is not None:
        cosines, sines = _doubles(layer.rotary)[:length, None].chunk(2, -1)
        q, k = _turn(q, cosines, sines), _turn(k, cosines, sines)
    distance_LL = torch.arange(length) - torch.arange(length)[:, None]
    is_seen_LL = (torch.arange(length) < visible).expand(length, length)
    if layer.window is not None:
        left, right = layer.window
        is_seen_LL = is_seen_LL & (left < 0 or distance_LL >= -left) & (right < 0 or distance_LL <= right)
    attended, weights = [], []
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        scores_LL = q[:, head] @ k[:, kv_head].T
        if layer.softcap:
            scores_LL = layer.softcap * torch.tanh(scores_LL / layer.softcap)
        if layer.distances is not None:
            row_LL = torch.from_numpy(layer.distances.rows).long()[len(layer.distances.rows) // 2 - distance_LL]
            if layer.distances.keys is not None:
                scores_LL = scores_LL + (q[:, head] @ _doubles(layer.distances.keys)[head].T).gather(1, row_LL)
            if layer.distances.queries is not None:
                terms_JR = k[:, kv_head] @ _doubles(layer.distances.queries)[head].T
                scores_LL = scores_LL + terms_JR.gather(1, row_LL.T).T
        if layer.bias is not None:
            reach = layer.bias.shape[1] // 2
            scores_LL = scores_LL + _doubles(layer.bias)[head][distance_LL + reach]
        probabilities_LL = scores_LL.masked_fill(~is_seen_LL, -torch.inf).softmax(1)
        # A query without visible keys gets zeros.
        probabilities_LL = probabilities_LL.masked_fill(~is_seen_LL, 0.0)
        attended.append(probabilities_LL @ v[:, kv_head])
        weights.append(probabilities_LL[0])
    return _map(torch.cat(attended, 1), layer.attention_out, form), torch.stack(weights, 1)


def _turn(x_LHK: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    a, b = x_LHK.chunk(2, -1)
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1)


def _map(x_LD: Tensor, spec: LinearWeights, form: Format) -> Tensor:
    weight = spec.weight if form is Format.F32 else to_bfloat16(spec.weight)
    y = F.linear(x_LD, _doubles(weight), None if spec.bias is None else _doubles(spec.bias))
    if not spec.gated:
        return FUNCTIONS[spec.activation](y)
    gate, values = y.chunk(2, -1)
    return FUNCTIONS[spec.activation](gate) * values


def _norm(x_LD: Tensor, spec: NormWeights | None) -> Tensor:
    if spec is None:
        return x_LD
    weight_D, bias_D = _doubles(spec.weight), 0.0 if spec.bias is None else _doubles(spec.bias)
    if not spec.rms:
        x_LD = x_LD - x_LD.mean(-1, keepdim=True)
    return x_LD / (x_LD.square().mean(-1, keepdim=True) + spec.eps).sqrt() * weight_D + bias_D


def _doubles(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(array, np.float64))
