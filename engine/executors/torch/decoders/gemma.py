"""Gemma 1 to 3, which differ from Llama by their values; these are in engine/executors/cpu/decoders/gemma.py."""

from __future__ import annotations

from ...cpu.decoders.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from .decoder import DecoderModel


class GemmaModel(DecoderModel):
    """Gemma 1."""

    config_class = GemmaConfig


class Gemma2Model(DecoderModel):
    """Gemma 2."""

    config_class = Gemma2Config


class Gemma3Model(DecoderModel):
    """The text model of Gemma 3, and EmbeddingGemma."""

    config_class = Gemma3Config
