"""The only table of keys that are let pass although nothing here depends on them: what a dialect's clients send.

A key that is neither here nor a field of the schema is refused with its name, be it misspelt or a parameter that the
task has no use for: nobody should take an answer for what it is not. That is so in the dialects, too, whose own servers
overlook unknown keys (vLLM, TEI, Infinity); OpenAI's, Cohere's, Jina's and Voyage's refuse them as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Dialect = Literal["openai", "jina", "voyage", "vllm", "infinity", "cohere", "xinference", "tei", "ollama", "penstock"]

_USER: Final = "names the end user to a vendor that watches for abuse."
_DROP_PARAMS: Final = "LiteLLM's word to itself, which RAGFlow sends to every server."

PASSED_KEYS: Final[Mapping[Dialect, Mapping[str, str]]] = {
    "openai": {
        "user": _USER,
        "safety_identifier": "the newer name of `user`.",
        "service_tier": "chooses a price; gateways add it to every request.",
        "metadata": "a note for the vendor's dashboard; gateways add it to every request.",
        "drop_params": _DROP_PARAMS,
    },
    "jina": {"user": _USER},
    "voyage": {"user": _USER},
    "vllm": {
        "user": _USER,
        "cache_salt": "keeps vLLM's prefix caches apart; no answer depends on it.",
    },
    "infinity": {"user": _USER},
    "cohere": {"user": _USER, "drop_params": _DROP_PARAMS},
    "xinference": {
        "user": _USER,
        "return_len": "asks for the number of tokens, which is in `usage` always; RAGFlow sends it.",
    },
    "tei": {
        "user": _USER,
        "options": "whether the Inference API waits for a model and uses its cache; Weaviate and LiteLLM send it.",
    },
    "ollama": {"user": _USER},
    "penstock": {"user": _USER},
}


def let_pass(*dialects: Dialect) -> Mapping[str, str]:
    """Returns the keys that are let pass in a body that may be of any of these dialects, and why."""
    return {key: reason for dialect in dialects for key, reason in PASSED_KEYS[dialect].items()}
