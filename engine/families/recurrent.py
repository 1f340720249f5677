"""Families with recurrent layers, which ModelSpec does not describe: torch runs them with classes of their own."""

from __future__ import annotations

from typing import Final

from .family import Family

FAMILIES: Final = (
    Family("mamba", "Mamba", None, "recurrent.mamba.MambaModel"),
    Family("falcon_mamba", "FalconMamba", None, "recurrent.mamba.FalconMambaModel"),
    Family("mamba2", "Mamba2", None, "recurrent.mamba.Mamba2Model"),
    Family("jamba", "Jamba", None, "recurrent.jamba.JambaModel"),
    Family("bamba", "Bamba", None, "recurrent.bamba.BambaModel"),
    Family("granitemoehybrid", "GraniteMoeHybrid", None, "recurrent.bamba.GraniteHybridModel"),
)
