"""Request fields for the encoding of vectors, with the names of OpenAI, vLLM, Jina and Voyage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field

from penstock.engine.protocol.errors import InvalidRequestError

from ..http.quantization import EmbedDtype, Endianness, Quantization
from ..http.vectors import Encoding, EncodingFormat
from .options import FailFastList, contradiction

EmbeddingType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]

_RequestedFormat = Literal["float", "base64", "bytes", "bytes_only", "int8", "uint8", "binary", "ubinary"]
"""An EncodingFormat, or a Quantization in JSON numbers."""
_PLAIN_ENCODINGS: Final[Mapping[str | None, Mapping[str, Encoding]]] = {
    None: {"embedding": Encoding()},
    EncodingFormat.FLOAT: {"embedding": Encoding()},
    EncodingFormat.BASE64: {"embedding": Encoding(format=EncodingFormat.BASE64)},
}
"""The encodings of most requests: without the other options."""
_ENCODING_FIELDS: Final = ("embed_dtype", "endianness", "embedding_type", "encoding_type", "output_dtype")
QUANTIZATIONS: Final[dict[str, Quantization]] = {kind: kind for kind in get_args(Quantization)}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


EmbeddingTypes = Annotated[
    FailFastList[EmbeddingType], BeforeValidator(_listed, json_schema_input_type=EmbeddingType | list[EmbeddingType])
]
"""One type or a list of types, for Jina and Cohere."""


class EncodingOptions(BaseModel):
    """OpenAI's `encoding_format` and vLLM's additional fields."""

    encoding_format: _RequestedFormat | None = Field(
        None,
        description=(
            "'float' (default); 'base64'; 'bytes': a binary body and a `metadata` header that describes it; "
            "'bytes_only': the body alone; 'int8', 'uint8', 'binary', 'ubinary': JSON integers."
        ),
    )
    embed_dtype: EmbedDtype | None = Field(
        None, description="Number format in base64 and bytes. Absent: float32. It does not affect JSON numbers."
    )
    endianness: Endianness | None = Field(None, description="Byte order in base64 and bytes. Absent: little.")

    def encoding(self) -> Encoding:
        """Returns the encoding of the vectors.

        Raises:
            InvalidRequestError: Fields contradict each other.
        """
        requested = self.encoding_format or "float"
        base = Encoding(
            format=EncodingFormat.FLOAT if requested in QUANTIZATIONS else EncodingFormat(requested),
            dtype=self.embed_dtype or EmbedDtype.FLOAT32,
            endianness=self.endianness or Endianness.LITTLE,
        )
        return self._quantized(base, QUANTIZATIONS.get(requested), "encoding_format")

    def _quantized(self, base: Encoding, kind: Quantization | None, param: str) -> Encoding:
        if kind is not None and self.embed_dtype is not None:
            raise InvalidRequestError(
                f"embed_dtype is {self.embed_dtype.value!r}, but {param} asks for {kind!r}; give one of them.",
                param="embed_dtype",
            )
        return base if kind is None else replace(base, quantization=kind)


class EmbeddingTypeOptions(EncodingOptions):
    """EncodingOptions with Jina's `embedding_type` and Voyage's `output_dtype`."""

    embedding_type: EmbeddingTypes | None = Field(
        None,
        description=(
            "Field of Jina: one type or a list of types. Integers are JSON numbers unless encoding_format is bytes. "
            "For several types, every `embedding` is an object with one entry per type."
        ),
    )
    encoding_type: EmbeddingType | None = Field(None, description="Older name for `embedding_type`.")
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = Field(
        None, description="Field of Voyage: the type of the numbers. encoding_format selects how they are written."
    )

    def encodings(self) -> Mapping[str, Encoding]:
        """Returns the encoding of the vectors by name, or several encodings.

        Raises:
            InvalidRequestError: Fields contradict each other.
        """
        if self.model_fields_set.isdisjoint(_ENCODING_FIELDS) and self.encoding_format in _PLAIN_ENCODINGS:
            return _PLAIN_ENCODINGS[self.encoding_format]
        self._check_types()
        base = self.encoding()
        requested = self.embedding_type or ([self.encoding_type] if self.encoding_type else [])
        types: dict[EmbeddingType, None] = dict.fromkeys(requested)
        if len(types) > 1 and base.is_bytes:
            raise InvalidRequestError(
                f"embedding_type holds {len(types)} types, but encoding_format is {base.format.value!r}, which holds "
                "one; send one type, or leave encoding_format out.",
                param="embedding_type",
            )
        if len(types) > 1:
            plain = replace(base, format=EncodingFormat.FLOAT, quantization=None)
            return {name: self._typed(plain, name) for name in types}
        if types:
            return {"embedding": self._typed(base, next(iter(types)))}
        kind = QUANTIZATIONS.get(self.output_dtype or "float")
        return {"embedding": self._quantized(base, kind, "output_dtype")}

    def quantization_field(self) -> str:
        """Returns the field that asks for integers, for messages."""
        if self.embedding_type or self.encoding_type:
            return "embedding_type" if self.embedding_type else "encoding_type"
        return "output_dtype" if self.output_dtype in QUANTIZATIONS else "encoding_format"

    def _check_types(self) -> None:
        """Raises InvalidRequestError if two fields ask for different types of numbers, or for different formats."""
        is_integer = self.encoding_format in QUANTIZATIONS
        requested: dict[str, list[str] | None] = {
            "embedding_type": [*self.embedding_type] if self.embedding_type else None,
            "encoding_type": [self.encoding_type] if self.encoding_type else None,
            "output_dtype": [self.output_dtype] if self.output_dtype else None,
            "encoding_format": [str(self.encoding_format)] if is_integer else None,
        }
        given = [(name, types) for name, types in requested.items() if types]
        for name, types in given[1:]:
            first_name, first = given[0]
            # In base64 the numbers are floats: output_dtype names the type of the numbers, not their format.
            wanted = {"float" if kind == "base64" else kind for kind in first} if name == "output_dtype" else {*first}
            if wanted != {*types}:
                raise contradiction(first_name, ", ".join(first), name, ", ".join(types))
        if given and given[0][1] == ["base64"] and self.encoding_format not in (None, "base64"):
            raise contradiction(given[0][0], "base64", "encoding_format", self.encoding_format)

    def _typed(self, base: Encoding, name: EmbeddingType) -> Encoding:
        if name == "float":
            return base
        if name == "base64":
            return replace(base, format=EncodingFormat.BASE64, quantization=None)
        # The OpenAI SDKs request base64 by default and would decode integers as floats.
        base = base if base.is_bytes else replace(base, format=EncodingFormat.FLOAT)
        return self._quantized(base, QUANTIZATIONS[name], "embedding_type")
