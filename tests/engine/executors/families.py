"""Configs of tiny random models of every family, and comparisons with transformers."""

import pytest
import torch

from ...tables import table

ENCODER_SIZES = table(__file__, "sizes of encoders")
DISTILBERT = table(__file__, "sizes of distilbert")
NOT_ON_CPU = {
    "rope-dynamic",
    "rope-longrope",
    "phi3-partial",
    "phi3-longrope-partial",
    "ministral3-long",
    "ministral3-two-way-long",
}
"""The length of the text changes their rotary positions or queries, or a part of each head is rotated."""
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DEBERTA = table(__file__, "deberta")
MODERNBERT = ENCODER_SIZES | SPECIAL_IDS | {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2}
MODERNBERT_BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
DECODER_SIZES = ENCODER_SIZES | SPECIAL_IDS | {"num_key_value_heads": 2}
EUROBERT = DECODER_SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0}}

ENCODERS = [
    pytest.param("Bert", ENCODER_SIZES, id="bert"),
    pytest.param("Bert", ENCODER_SIZES | {"hidden_act": "gelu_new", "type_vocab_size": 1}, id="bert-tanh-gelu"),
    pytest.param("Bert", ENCODER_SIZES | {"hidden_act": "quick_gelu"}, id="bert-unfused-activation"),
    pytest.param("Roberta", ENCODER_SIZES | {"type_vocab_size": 1}, id="roberta"),
    pytest.param("XLMRoberta", ENCODER_SIZES | {"type_vocab_size": 1, "pad_token_id": 5}, id="xlm-roberta"),
    pytest.param("Camembert", ENCODER_SIZES, id="camembert"),
    pytest.param("Electra", ENCODER_SIZES | {"embedding_size": 24}, id="electra"),
    pytest.param("Electra", ENCODER_SIZES | {"embedding_size": 48}, id="electra-without-projection"),
    pytest.param("DistilBert", DISTILBERT, id="distilbert"),
    pytest.param("DistilBert", DISTILBERT | {"activation": "relu"}, id="distilbert-relu"),
    pytest.param("MPNet", ENCODER_SIZES, id="mpnet"),
    pytest.param("ModernBert", MODERNBERT, id="modernbert"),
    pytest.param(
        "ModernBert", MODERNBERT | MODERNBERT_BIASES | {"classifier_pooling": "mean"}, id="modernbert-biased-mean"
    ),
    pytest.param(
        "ModernBert", MODERNBERT | {"global_attn_every_n_layers": 2, "num_hidden_layers": 4}, id="modernbert-last-local"
    ),
    pytest.param("EuroBert", EUROBERT | {"classifier_pooling": "bos"}, id="eurobert"),
    pytest.param("EuroBert", EUROBERT | {"classifier_pooling": "mean"}, id="eurobert-mean"),
    pytest.param("NomicBert", ENCODER_SIZES, id="nomic-bert"),
    pytest.param("DebertaV2", ENCODER_SIZES | DEBERTA, id="deberta-v3"),
    pytest.param(
        "DebertaV2",
        ENCODER_SIZES | DEBERTA | {"share_att_key": False, "position_buckets": -1, "position_biased_input": True},
        id="deberta-own-projections",
    ),
    pytest.param(
        "DebertaV2",
        ENCODER_SIZES | DEBERTA | {"pos_att_type": ["c2p"], "max_relative_positions": 40, "type_vocab_size": 2},
        id="deberta-one-term",
    ),
    pytest.param("JinaEmbeddingsV3", ENCODER_SIZES | {"type_vocab_size": 1}, id="jina-v3"),
    pytest.param("Gte", ENCODER_SIZES, id="gte"),
    pytest.param("Gte", ENCODER_SIZES | {"type_vocab_size": 0}, id="gte-without-token-types"),
]

WIDE = DECODER_SIZES | {"head_dim": 16}
STRETCHED = DECODER_SIZES | {"max_position_embeddings": 256}
QWEN_WINDOW = DECODER_SIZES | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
QWEN_LAYERS = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
GEMMA2 = WIDE | {"sliding_window": 8, "query_pre_attn_scalar": 24}
GEMMA3 = GEMMA2 | {"num_hidden_layers": 4, "sliding_window_pattern": 2}
ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
YARN_OPTIONS = {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0, "truncate": False}
GROWTH = {"llama_4_scaling_beta": 0.3}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0],
    "long_factor": [2.0] * 3 + [6.0] * 3,
}
PHI_FACTORS = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [2.0, 3.0, 5.0]}
PHI_LONGROPE = STRETCHED | ORIGINAL | {"partial_rotary_factor": 0.5}
PHI_LONGROPE |= {"rope_parameters": {"rope_type": "longrope", **PHI_FACTORS}}


def rope(values, config=STRETCHED):
    """A config with these rotary positions."""
    return config | {"rope_parameters": values}


CAUSAL = [
    pytest.param("Llama", DECODER_SIZES, id="llama"),
    pytest.param("Llama", WIDE | {"attention_bias": True, "mlp_bias": True}, id="llama-biased-wide-heads"),
    pytest.param("Llama", DECODER_SIZES | {"num_key_value_heads": 4, "hidden_act": "gelu"}, id="llama-ungrouped-gelu"),
    pytest.param("Llama", rope({"rope_type": "linear", "factor": 4.0}), id="rope-linear"),
    pytest.param(
        "Llama",
        rope({"rope_type": "dynamic", "factor": 4.0}, DECODER_SIZES | {"max_position_embeddings": 64}),
        id="rope-dynamic",
    ),
    pytest.param("Llama", rope(LLAMA3 | ORIGINAL), id="rope-llama3"),
    pytest.param("Llama", rope(YARN | ORIGINAL), id="rope-yarn"),
    pytest.param("Llama", rope(YARN | ORIGINAL | YARN_OPTIONS), id="rope-yarn-options"),
    pytest.param("Llama", rope(YARN | {"attention_factor": 1.5}), id="rope-yarn-attention-factor"),
    pytest.param("Llama", rope(LONGROPE | ORIGINAL), id="rope-longrope"),
    pytest.param("Mistral", DECODER_SIZES | {"sliding_window": 8}, id="mistral-window"),
    pytest.param("Mistral", DECODER_SIZES | {"sliding_window": None}, id="mistral"),
    pytest.param("Ministral3", rope(YARN | {"original_max_position_embeddings": 256} | GROWTH, WIDE), id="ministral3"),
    pytest.param("Ministral3", rope(YARN | ORIGINAL | YARN_OPTIONS | GROWTH, WIDE), id="ministral3-long"),
    pytest.param("Qwen2", DECODER_SIZES, id="qwen2"),
    pytest.param("Qwen2", QWEN_WINDOW, id="qwen2-window"),
    pytest.param("Qwen3", WIDE, id="qwen3"),
    pytest.param("Qwen3", WIDE | {"attention_bias": True} | QWEN_LAYERS, id="qwen3-biased-layers"),
    pytest.param("Gemma", WIDE, id="gemma"),
    pytest.param("Gemma", WIDE | {"attention_bias": True, "sliding_window": 8}, id="gemma-biased-no-window"),
    pytest.param("Gemma2", GEMMA2, id="gemma2"),
    pytest.param("Gemma2", GEMMA2 | {"attn_logit_softcapping": 2.0, "attention_bias": True}, id="gemma2-low-softcap"),
    pytest.param("Gemma2", GEMMA2 | {"attn_logit_softcapping": None}, id="gemma2-no-softcap"),
    pytest.param("Gemma3Text", GEMMA3, id="gemma3"),
    pytest.param("Phi3", DECODER_SIZES, id="phi3"),
    pytest.param("Phi3", DECODER_SIZES | {"sliding_window": 8}, id="phi3-window"),
    pytest.param("Phi3", DECODER_SIZES | {"sliding_window": 8, "partial_rotary_factor": 0.5}, id="phi3-partial"),
    pytest.param("Phi3", PHI_LONGROPE, id="phi3-longrope-partial"),
]
TWO_WAY = [
    pytest.param("Llama", DECODER_SIZES | {"is_causal": False}, id="llama-two-way"),
    pytest.param("Mistral", DECODER_SIZES | {"is_causal": False, "sliding_window": 8}, id="mistral-two-way-window"),
    pytest.param("Qwen2", QWEN_WINDOW | {"is_causal": False}, id="qwen2-two-way-window"),
    pytest.param(
        "Ministral3", rope(YARN | ORIGINAL | GROWTH, WIDE | {"is_causal": False}), id="ministral3-two-way-long"
    ),
    # transformers reads one key in the mask and the other in attention.
    pytest.param("Gemma", WIDE | {"use_bidirectional_attention": True, "is_causal": False}, id="gemma-two-way"),
    pytest.param("Gemma3Text", GEMMA3 | {"use_bidirectional_attention": True}, id="gemma3-two-way"),
]

MAMBA = {"vocab_size": 200, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}
MAMBA2 = MAMBA | {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 32}
MAMBA_BIASES = {"use_bias": True, "use_conv_bias": False}
RECURRENT = [
    pytest.param("Mamba", MAMBA, id="mamba"),
    pytest.param("Mamba", MAMBA | MAMBA_BIASES | {"conv_kernel": 3, "time_step_rank": 5}, id="mamba-biases"),
    pytest.param("Mamba", MAMBA | {"hidden_act": "gelu", "residual_in_fp32": False, "expand": 3}, id="mamba-gelu"),
    pytest.param("FalconMamba", MAMBA | {"expand": 4, "intermediate_size": 96}, id="falcon-mamba"),
    pytest.param("Mamba2", MAMBA2, id="mamba2"),
    pytest.param("Mamba2", MAMBA2 | MAMBA_BIASES | {"n_groups": 3, "time_step_limit": [0.1, 0.4]}, id="mamba2-biases"),
    pytest.param("Mamba2", MAMBA2 | {"n_groups": 6, "hidden_act": "relu", "conv_kernel": 2}, id="mamba2-relu"),
]
HYBRID_SIZES = table(__file__, "sizes of hybrid models")
HYBRID_BIASES = {"mamba_proj_bias": True, "mamba_conv_bias": False}
MAMBA2_HEADS = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2}
JAMBA = HYBRID_SIZES | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "num_hidden_layers": 4}
BAMBA = HYBRID_SIZES | MAMBA2_HEADS | {"attn_layer_indices": [1]}
BAMBA_BIASES = HYBRID_BIASES | {"attention_bias": True, "mlp_bias": True, "mamba_d_head": "auto"}
GRANITE = HYBRID_SIZES | MAMBA2_HEADS | {"shared_intermediate_size": 64, "num_local_experts": 4}
GRANITE |= {"layer_types": ["mamba", "attention", "mamba"]}
GRANITE |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}
HYBRID = [
    pytest.param("Jamba", JAMBA, id="jamba"),
    pytest.param("Jamba", JAMBA | HYBRID_BIASES | {"num_experts": 1, "attn_layer_offset": 0}, id="jamba-dense-biases"),
    pytest.param("Bamba", BAMBA, id="bamba"),
    pytest.param("Bamba", BAMBA | BAMBA_BIASES, id="bamba-biases"),
    pytest.param("GraniteMoeHybrid", GRANITE, id="granite"),
    pytest.param(
        "GraniteMoeHybrid", GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"}, id="granite-dense"
    ),
    pytest.param("GraniteMoeHybrid", GRANITE | {"layer_types": ["attention"] * 3}, id="granite-attention-only"),
]


def chosen(*names):
    """Parameters (family, config) of the models with these ids."""
    models = {case.id: case for case in ENCODERS + CAUSAL + TWO_WAY + RECURRENT + HYBRID}
    return [models[name] for name in names]


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


def unit_error(rows, exact):
    """Mean distance of the rows as unit vectors."""
    rows, exact = (torch.nn.functional.normalize(part.float(), dim=1) for part in (rows, exact))
    return (rows - exact).norm(dim=1).mean()


def first_row_logits(model, sequences, pack):
    hidden = model.forward(pack(sequences)).hidden_states
    return model.classify(torch.stack([rows[0] for rows in hidden.split([len(s) for s in sequences])]))
