"""Cuts texts to a number of their own tokens, before they meet the model."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.async_engine import AsyncEngine


async def cut_texts(engine: AsyncEngine, texts: Sequence[str], max_num_tokens: int | None) -> list[str]:
    """Returns the texts with those above `max_num_tokens` cut to it.

    Args:
        engine: Knows the tokens.
        texts: Texts.
        max_num_tokens: Tokens, special ones aside; None or 0 leaves the texts as they are.
    """
    if not max_num_tokens or max_num_tokens >= engine.info.max_model_len:
        return list(texts)
    token_ids = await engine.tokenize(texts, add_special_tokens=False)
    too_long = [i for i, ids in enumerate(token_ids) if len(ids) > max_num_tokens]
    cut = await engine.detokenize([token_ids[i][:max_num_tokens] for i in too_long])
    replaced = dict(zip(too_long, cut, strict=True))
    return [replaced.get(i, text) for i, text in enumerate(texts)]
