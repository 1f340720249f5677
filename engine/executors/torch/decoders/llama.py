"""Llama and the families that differ from it by their values; these are in engine/executors/cpu/decoders/llama.py."""

from __future__ import annotations

from ...cpu.decoders.llama import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config
from .decoder import DecoderModel


class LlamaModel(DecoderModel):
    """Llama; also LlamaBidirectional, whose attention looks both ways."""

    config_class = LlamaConfig


class MistralModel(DecoderModel):
    """Mistral."""

    config_class = MistralConfig


class Qwen2Model(DecoderModel):
    """Qwen2 and Qwen2.5."""

    config_class = Qwen2Config


class Qwen3Model(DecoderModel):
    """Qwen3."""

    config_class = Qwen3Config


class Phi3Model(DecoderModel):
    """Phi-3, Phi-3.5 and Phi-4-mini."""

    config_class = Phi3Config
