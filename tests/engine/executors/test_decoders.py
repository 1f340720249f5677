"""Decoders on both executors give the results of transformers, whole and in chunks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from penstock.engine.executors.torch.layers.rotary import prompt_lens
from penstock.engine.executors.torch.packed_batch import BatchCache
from penstock.engine.protocol.errors import UnsupportedModelError
from penstock.engine.protocol.model_info import ClassifierMethod, ModelKind
from penstock.engine.scheduling import CacheSpec, KvLayerSpec

from .families import (
    CAUSAL,
    DECODER_SIZES as SIZES,
    GEMMA2,
    GEMMA3,
    LLAMA3,
    ORIGINAL,
    PHI_FACTORS,
    PHI_LONGROPE,
    PLAIN,
    TWO_WAY,
    WIDE,
    YARN,
    assert_close,
    logits_of,
    on_executors,
    relative_error,
    rope,
    rows_of,
    unit_error,
)

NOT_ON_CPU = {"rope-dynamic", "rope-longrope", "phi3-partial", "phi3-longrope-partial"}
"""The length of the text changes their rotary positions, or a part of each head is rotated."""
ON_CPU = [case for case in CAUSAL if case.id not in NOT_ON_CPU]
TRAINED = "minimind2"
TEXTS = ["Hi", "The quick brown fox jumps over the lazy dog.", "A penstock leads water to a turbine. " * 12]


def random_texts(*lengths):
    numbers = np.random.default_rng(1)
    return [numbers.integers(3, SIZES["vocab_size"] - 1, length).tolist() for length in lengths]


@on_executors(CAUSAL + TWO_WAY, NOT_ON_CPU)
def test_hidden_states_equal_transformers(executor, family, config, load, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    info = resolve(folder)
    assert info.packed
    model = load(info)
    output = model.forward(pack(sequences))
    assert output.attention_weights is None
    assert_close(output.hidden_states, rows_of(reference, sequences))
    alone = torch.cat([model.forward(pack([s])).hidden_states for s in sequences])
    assert relative_error(output.hidden_states, alone) <= (0 if executor == "cpu" else 2e-6)


@on_executors(CAUSAL + TWO_WAY, NOT_ON_CPU)
def test_only_causal_models_cache_keys_and_values(executor, family, config, load, save_model, resolve):
    folder, _ = save_model(f"{family}Model", **config)
    info = resolve(folder)
    expected = None
    if info.is_causal:
        layer = KvLayerSpec(config["num_key_value_heads"], config.get("head_dim", 12))
        rope_type = config.get("rope_parameters", {}).get("rope_type")
        shares_prefixes = rope_type not in ("dynamic", "longrope")
        expected = CacheSpec(kv_layers=(layer,) * config["num_hidden_layers"], shares_prefixes=shares_prefixes)
    assert load(info).cache_spec == expected


@pytest.mark.parametrize(("family", "config"), CAUSAL)
def test_chunks_on_torch_equal_whole(family, config, load_on_torch, save_model, resolve, pack, sequences, run_chunked):
    folder, _ = save_model(f"{family}Model", **config)
    model = load_on_torch(resolve(folder))
    whole = model.forward(pack(sequences)).hidden_states
    for size, block_size in ((7, 16), (64, 4)):
        assert_close(torch.cat(run_chunked(model, sequences, size, block_size=block_size)), whole)


@pytest.mark.parametrize("executor", ["cpu"])
@pytest.mark.parametrize(("family", "config"), ON_CPU)
@pytest.mark.parametrize(
    ("dtype", "arithmetic", "size", "block_size"),
    [
        ("float32", None, 7, 16),
        ("bfloat16", "bfloat16", 64, 4),
        ("bfloat16", "float32", 50, 16),
        ("int8", "bfloat16", 33, 16),
        ("int8", "float32", 33, 16),
    ],
)
def test_chunks_on_cpu_equal_whole_bit_for_bit(
    executor,
    family,
    config,
    dtype,
    arithmetic,
    size,
    block_size,
    load,
    needs_formats,
    save_model,
    resolve,
    pack,
    sequences,
    run_chunked,
):
    needs_formats(dtype, arithmetic)
    folder, _ = save_model(f"{family}Model", **config)
    model = load(replace(resolve(folder, dtype), arithmetic=arithmetic))
    assert model.cache_dtype is (torch.bfloat16 if arithmetic == "bfloat16" else torch.float32)
    whole = model.forward(pack(sequences)).hidden_states
    chunked = run_chunked(model, sequences, size, model.cache_dtype, block_size=block_size)
    assert torch.equal(torch.cat(chunked), whole)


@on_executors(PLAIN)
def test_sequence_head_equals_transformers(executor, family, config, load, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}ForSequenceClassification", **config)
    model = load(resolve(folder))
    rows = model.forward(pack(sequences)).hidden_states.split([len(s) for s in sequences])
    logits = model.classify(torch.stack([r[-1] for r in rows]))
    assert logits.dtype == torch.float32
    assert_close(logits, logits_of(reference, sequences))
    # The head reads one row, so it scores each token as the last token of its prefix (process rewards).
    prefixes = [sequences[2][: end + 1] for end in range(len(sequences[2]))]
    assert_close(model.classify_tokens(rows[2]), logits_of(reference, prefixes))


@on_executors([case for case in PLAIN if case.id != "gemma3"])
def test_token_head_equals_transformers(executor, family, config, load, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}ForTokenClassification", **config)
    model = load(resolve(folder))
    assert model.sequence_head is None
    logits = model.classify_tokens(model.forward(pack(sequences)).hidden_states)
    assert_close(logits, torch.cat([reference(torch.tensor(s)[None]).logits[0] for s in sequences]))


@pytest.mark.parametrize(("family", "config"), PLAIN)
@pytest.mark.parametrize("is_tied", [True, False])
def test_language_model_loads_without_its_head(
    family, config, is_tied, load_on_torch, save_model, resolve, pack, sequences
):
    name = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
    folder, reference = save_model(name, **config, tie_word_embeddings=is_tied)
    model = load_on_torch(resolve(folder))
    assert (model.sequence_head, model.token_head) == (None, None)
    assert_close(model.forward(pack(sequences[:3])).hidden_states, rows_of(reference.model, sequences[:3]))


@pytest.mark.parametrize(("family", "config"), PLAIN + TWO_WAY)
def test_attention_weights_equal_transformers(family, config, load_on_torch, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    info = resolve(folder)
    output = load_on_torch(info).forward(pack(sequences), need_attention=True)
    reference.set_attn_implementation("eager")
    row = -1 if info.is_causal else 0
    maps = [reference(torch.tensor(s)[None], output_attentions=True).attentions[-1][0] for s in sequences]
    assert output.attention_weights.dtype == torch.float32
    assert_close(output.attention_weights, torch.cat([m[:, row].t() for m in maps]))


@pytest.mark.parametrize(("family", "config"), PLAIN)
def test_attention_weights_of_chunks_cover_the_past(
    family, config, load_on_torch, save_model, resolve, pack, sequences, chunked_run
):
    folder, _ = save_model(f"{family}Model", **config)
    model = load_on_torch(resolve(folder))
    run = chunked_run(model, sequences[2:], block_size=4)
    for step in ([(0, 0, 7), (1, 0, 20)], [(1, 20, 41), (2, 0, 100)], [(2, 100, 130), (1, 41, 63)]):
        run.step(step, need_attention=True)
    for (n, end), weights in run.weights.items():
        expected = model.forward(pack([sequences[2 + n][:end]]), need_attention=True).attention_weights
        assert_close(weights, expected)


def test_prompt_lengths_default_to_the_end_of_chunks(pack, sequences):
    batch = pack(sequences)
    assert prompt_lens(batch) == (1, 2, 7, 63, 130)
    cache = BatchCache(num_new_seqs=3, num_new_tokens=10, context_lens=(0, 0, 0, 4, 9))
    assert list(prompt_lens(replace(batch, cache=cache))) == [1, 2, 7, 67, 139]
    assert prompt_lens(replace(batch, cache=replace(cache, prompt_lens=(1, 2, 7, 90, 200)))) == (1, 2, 7, 90, 200)


GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
OLDER_CONFIGS = [
    pytest.param(
        "Llama",
        rope(LLAMA3 | ORIGINAL),
        {"rope_theta": 500.0, "rope_scaling": {**LLAMA3, **ORIGINAL, "rope_theta": None}},
        id="llama",
    ),
    pytest.param(
        "Qwen2",
        rope(YARN | ORIGINAL),
        {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "factor": 4.0, **ORIGINAL}},
        id="qwen2",
    ),
    pytest.param(
        "Gemma3Text",
        rope(GEMMA3_ROPE, GEMMA3),
        {"rope_theta": 500.0, "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        id="gemma3",
    ),
    pytest.param("Gemma", rope({"rope_theta": 500.0}, WIDE), {"rope_theta": 500.0, "hidden_act": "gelu"}, id="gemma"),
    pytest.param("Phi3", PHI_LONGROPE, {"rope_scaling": {"type": "su", **PHI_FACTORS}}, id="phi3"),
]


@pytest.mark.parametrize(("family", "config", "older"), OLDER_CONFIGS)
def test_older_config_equals_transformers(family, config, older, load_on_torch, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    info = resolve(folder, hf_overrides={"rope_parameters": None, "transformers_version": "4.50.0", **older})
    assert_close(load_on_torch(info).forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


def test_gemma3_layers_follow_the_older_pattern(load_on_torch, save_model, resolve, pack, sequences):
    folder, reference = save_model("Gemma3TextModel", **GEMMA2 | {"num_hidden_layers": 7})
    for pattern in ({}, {"sliding_window_pattern": 6}):
        model = load_on_torch(resolve(folder, hf_overrides={"layer_types": None, **pattern}))
        assert_close(model.forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'short_factor'"),
        ({"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
        ({"hidden_act": "swiglu"}, "'swiglu'"),
    ],
)
def test_unknown_option_is_named(override, message, load_on_torch, save_model, resolve):
    folder, _ = save_model("Qwen2Model", **SIZES)
    with pytest.raises(UnsupportedModelError, match=message):
        load_on_torch(resolve(folder, hf_overrides=override))


def test_two_way_llama_needs_no_code_of_its_repository(load_on_torch, save_model, resolve, pack, sequences):
    folder, reference = save_model("LlamaModel", **SIZES | {"is_causal": False})
    code = {"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"}
    override = {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "auto_map": code}
    info = resolve(folder, hf_overrides={**override, "is_causal": None})
    assert (info.packed, info.is_causal) == (True, False)
    assert_close(load_on_torch(info).forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@pytest.mark.parametrize(("family", "config"), PLAIN)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reduced_precision_is_as_exact_as_transformers(
    family, config, dtype, load_on_torch, save_model, resolve, pack, sequences, run_chunked
):
    folder, reference = save_model(f"{family}Model", **config)
    exact = rows_of(reference, sequences)
    limit = 1.2 * unit_error(rows_of(reference.to(getattr(torch, dtype)), sequences), exact)
    model = load_on_torch(resolve(folder, dtype))
    assert unit_error(model.forward(pack(sequences)).hidden_states, exact) <= limit
    assert unit_error(torch.cat(run_chunked(model, sequences, 64, getattr(torch, dtype))), exact) <= limit


@pytest.mark.parametrize("executor", ["cpu"])
@pytest.mark.parametrize("method", list(ClassifierMethod))
@pytest.mark.parametrize(("is_tied", "scales"), [(True, {}), (False, {"logit_scale": 0.5, "logits_scaling": 4.0})])
def test_reranker_head_on_cpu_equals_torch(
    executor, method, is_tied, scales, load, load_on_torch, save_model, resolve, pack, sequences
):
    folder, _ = save_model("Qwen3ForCausalLM", **SIZES | {"tie_word_embeddings": is_tied})
    fields = {"kind": ModelKind.CROSS_ENCODER, "classifier_tokens": (7, 4), "classifier_method": method}
    info = replace(resolve(folder, hf_overrides=scales), **fields)
    on_cpu, on_torch = load(info), load_on_torch(info)
    assert on_cpu.token_head is None
    rows = on_torch.forward(pack(sequences)).hidden_states[[0, 5, 70]]
    assert_close(on_cpu.classify(rows), on_torch.classify(rows))


@pytest.mark.parametrize("executor", ["cpu"])
def test_scaled_positions_reach_the_end_of_long_texts(executor, load, save_model, resolve, pack):
    config = rope({"rope_type": "linear", "factor": 4.0}, SIZES | {"max_position_embeddings": 700})
    folder, reference = save_model("LlamaModel", **config)
    texts = random_texts(700, 513)
    assert_close(load(resolve(folder)).forward(pack(texts)).hidden_states, rows_of(reference, texts))


@pytest.mark.parametrize("executor", ["torch", "cpu"])
def test_trained_model_equals_transformers(executor, model_folder, load, needs_formats, resolve, pack, run_chunked):
    folder = model_folder(TRAINED)
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]
    model = load(resolve(folder))
    expected = rows_of(reference, sequences)
    assert_close(model.forward(pack(sequences)).hidden_states, expected)
    assert_close(torch.cat(run_chunked(model, sequences, 50)), expected)
    for dtype, least in [("bfloat16", 0.999)] if executor == "torch" else [("bfloat16", 0.9995), ("int8", 0.99)]:
        arithmetic = None if executor == "torch" else "bfloat16"
        needs_formats(dtype, arithmetic)
        reduced = load(replace(resolve(folder, dtype), arithmetic=arithmetic)).forward(pack(sequences)).hidden_states
        assert torch.cosine_similarity(reduced.float(), expected, dim=1).min() > least
