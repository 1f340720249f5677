"""Configs of tiny random models of every family, and comparisons with transformers."""

import pytest
import torch

from ...tables import table

# Configs without a family, by name. A config has a base and changes.
BASES = {None: {}}
for _name, (_base, _changes) in table(__file__, "bases_of_configs").items():
    BASES[_name] = BASES[_base] | _changes
ENCODER_SIZES, DISTILBERT, MODERNBERT = (BASES[name] for name in ("encoder", "distilbert", "modernbert"))
DECODER_SIZES, WIDE, GEMMA2 = (BASES[name] for name in ("decoder", "wide decoder", "gemma2"))
MAMBA, MAMBA2, BAMBA = (BASES[name] for name in ("mamba", "mamba2", "bamba"))


def models(name):
    """Parameters (family, config, values after the config) of a table of models."""
    return [
        pytest.param(family, BASES[base] | changes, *values, id=model)
        for model, (family, base, changes, *values) in table(__file__, name).items()
    ]


ENCODERS, CAUSAL = models("encoders"), models("causal_decoders")
# transformers reads one key of "gemma-two-way" in the mask and the other in attention.
TWO_WAY, RECURRENT, HYBRID = models("two_way_decoders"), models("recurrent_models"), models("hybrid_models")
NOT_ON_CPU = frozenset(table(__file__, "not_on_the_cpu"))
"""The length of the text changes their rotary positions or queries, or a part of each head is rotated."""


def chosen(*names):
    """Parameters (family, config) of the models with these ids."""
    known = {case.id: case for case in ENCODERS + CAUSAL + TWO_WAY + RECURRENT + HYBRID}
    return [known[name] for name in names]


EXECUTORS = pytest.mark.parametrize("executor", ["torch", "cpu"])
PLAIN = chosen("llama", "mistral-window", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
"""One config of each family of decoders."""


def on_executors(cases, not_on_cpu=()):
    """Parametrizes (executor, family, config); models in `not_on_cpu` (ids) run on torch only."""
    values = [
        pytest.param(executor, *case.values, id=f"{executor}-{case.id}")
        for executor in ("torch", "cpu")
        for case in cases
        if executor == "torch" or case.id not in not_on_cpu
    ]
    return pytest.mark.parametrize(("executor", "family", "config"), values)


def boundaries_of(family, config, sequences):
    """First token of type 1 of each sequence; 0 for models without token types."""
    default = {"Bert": 2, "Electra": 2, "NomicBert": 2, "DebertaV2": 0}.get(family)
    has_types = default is not None and config.get("type_vocab_size", default) > 1
    return [len(s) // 2 if has_types else 0 for s in sequences]


def arguments(sequence, boundary=0):
    """Arguments of a transformers encoder for one sequence."""
    ids = torch.tensor(sequence)[None]
    types = {"token_type_ids": (torch.arange(len(sequence)) >= boundary).long()[None]} if boundary else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types}


def rows_of(reference, sequences, **options):
    """Hidden states of transformers, one forward for each sequence: [T, D]."""
    network = reference.base_model
    return torch.cat([network(torch.tensor(s)[None], **options).last_hidden_state[0] for s in sequences])


def logits_of(reference, sequences):
    """Logits of transformers for each sequence: [N, L]."""
    return torch.cat([reference(**arguments(s)).logits for s in sequences])


def assert_close(actual, expected, tolerance=1e-5):
    """Fails if an error is above `tolerance` times the largest expected value or 1."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


def relative_error(actual, expected):
    """Largest error of a value, as a share of the norm of its row."""
    return ((actual - expected) / expected.norm(dim=1, keepdim=True)).abs().max()


def assert_rows_equal(model, reference, pack, sequences, max_batch_error):
    """Fails if rows differ from transformers, or by more than `max_batch_error` from those of each sequence alone."""
    hidden = model.forward(pack(sequences)).hidden_states
    assert_close(hidden, rows_of(reference, sequences))
    alone = torch.cat([model.forward(pack([sequence])).hidden_states for sequence in sequences])
    assert relative_error(hidden, alone) <= max_batch_error


def unit_error(rows, exact):
    """Mean distance of the rows as unit vectors."""
    rows, exact = (torch.nn.functional.normalize(part.float(), dim=1) for part in (rows, exact))
    return (rows - exact).norm(dim=1).mean()


def first_row_logits(model, sequences, pack):
    hidden = model.forward(pack(sequences)).hidden_states
    return model.classify(torch.stack([rows[0] for rows in hidden.split([len(s) for s in sequences])]))
