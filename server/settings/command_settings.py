"""Settings of the commands that serve nothing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from .engine_settings import EngineSettings


class EmbedSettings(EngineSettings):
    """Settings of `penstock embed`."""

    output: str = Field(description="File to write: .parquet, .jsonl or .npy.")
    overwrite: bool = Field(False, description="Replace an output that exists.")
    field: str = Field("text", description="JSONL or Parquet field that holds the text.")
    batch_size: PositiveInt = Field(
        512, description="Rows in flight at once; a killed run loses none that was answered."
    )
    on_bad_row: Literal["fail", "skip"] = Field(
        "fail",
        description=(
            "A row that cannot be read, holds no text, or that the model refuses: end with its line, or leave it out "
            "and list it in OUTPUT.skipped.jsonl."
        ),
    )
    dimensions: PositiveInt | None = Field(
        None, description="Width of the embeddings (Matryoshka); default: the model's own."
    )
    normalize: bool | None = Field(None, description="L2-normalise; default: as the model's files say.")
    prompt_name: str | None = Field(None, description="Named prompt of the model that is put before every text.")


class InfoSettings(EngineSettings):
    """Settings of `penstock info`."""
