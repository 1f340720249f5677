"""Every decoder gives what transformers gives: whole and in chunks, alone and in a batch, with each option and head."""

from dataclasses import replace

import pytest
import torch
import transformers

from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.executors.torch.layers.rotary import prompt_lens
from penstock.engine.executors.torch.packed_batch import BatchCache
from penstock.engine.model_files.resolve import with_device
from penstock.engine.protocol.errors import UnsupportedModelError
from penstock.engine.scheduling import CacheSpec, KvLayerSpec

from ..parity import DECODER_SIZES as SIZES, assert_close, rows_of

WIDE = SIZES | {"head_dim": 16}
STRETCHED = SIZES | {"max_position_embeddings": 256}
QWEN_WINDOW = SIZES | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
LAYERS = ["full_attention", "sliding_attention", "full_attention"]
GEMMA = WIDE | {"sliding_window": 8, "query_pre_attn_scalar": 24}
GEMMA3 = GEMMA | {"num_hidden_layers": 4, "sliding_window_pattern": 2}
ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0],
    "long_factor": [2.0] * 3 + [6.0] * 3,
}
PHI_FACTORS = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [2.0, 3.0, 5.0]}
PHI_LONG = ORIGINAL | {
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "longrope", **PHI_FACTORS},
}


def rope(values, config=STRETCHED):
    """A config with these rotary positions."""
    return config | {"rope_parameters": values}


CAUSAL = [
    pytest.param("Llama", SIZES, id="llama"),
    pytest.param("Llama", WIDE | {"attention_bias": True, "mlp_bias": True}, id="llama-biased-wide-heads"),
    pytest.param("Llama", SIZES | {"num_key_value_heads": 4, "hidden_act": "gelu"}, id="llama-ungrouped-gelu"),
    pytest.param("Llama", rope({"rope_type": "linear", "factor": 4.0}), id="rope-linear"),
    pytest.param(
        "Llama",
        rope({"rope_type": "dynamic", "factor": 4.0}, SIZES | {"max_position_embeddings": 64}),
        id="rope-dynamic",
    ),
    pytest.param("Llama", rope(LLAMA3 | ORIGINAL), id="rope-llama3"),
    pytest.param("Llama", rope(YARN | ORIGINAL), id="rope-yarn"),
    pytest.param(
        "Llama",
        rope(YARN | ORIGINAL | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0, "truncate": False}),
        id="rope-yarn-options",
    ),
    pytest.param("Llama", rope(YARN | {"attention_factor": 1.5}), id="rope-yarn-attention-factor"),
    pytest.param("Llama", rope(LONGROPE | ORIGINAL), id="rope-longrope"),
    pytest.param("Mistral", SIZES | {"sliding_window": 8}, id="mistral-window"),
    pytest.param("Mistral", SIZES | {"sliding_window": None}, id="mistral"),
    pytest.param("Qwen2", SIZES, id="qwen2"),
    pytest.param("Qwen2", QWEN_WINDOW, id="qwen2-window"),
    pytest.param("Qwen3", WIDE, id="qwen3"),
    pytest.param(
        "Qwen3",
        WIDE | {"attention_bias": True, "sliding_window": 8, "use_sliding_window": True} | {"layer_types": LAYERS},
        id="qwen3-biased-layers",
    ),
    pytest.param("Gemma", WIDE, id="gemma"),
    pytest.param("Gemma", WIDE | {"attention_bias": True, "sliding_window": 8}, id="gemma-biased-no-window"),
    pytest.param("Gemma2", GEMMA, id="gemma2"),
    pytest.param("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "attention_bias": True}, id="gemma2-low-softcap"),
    pytest.param("Gemma2", GEMMA | {"attn_logit_softcapping": None}, id="gemma2-no-softcap"),
    pytest.param("Gemma3Text", GEMMA3, id="gemma3"),
    pytest.param("Phi3", SIZES, id="phi3"),
    pytest.param("Phi3", SIZES | {"sliding_window": 8, "partial_rotary_factor": 0.5}, id="phi3-window-partial"),
    pytest.param("Phi3", STRETCHED | PHI_LONG, id="phi3-longrope-partial"),
]
TWO_WAY = [
    pytest.param("Llama", SIZES | {"is_causal": False}, id="llama-two-way"),
    pytest.param("Mistral", SIZES | {"is_causal": False, "sliding_window": 8}, id="mistral-two-way-window"),
    pytest.param("Qwen2", QWEN_WINDOW | {"is_causal": False}, id="qwen2-two-way-window"),
    # transformers asks one key in the mask and the other in attention.
    pytest.param("Gemma", WIDE | {"use_bidirectional_attention": True, "is_causal": False}, id="gemma-two-way"),
    pytest.param("Gemma3Text", GEMMA3 | {"use_bidirectional_attention": True}, id="gemma3-two-way"),
]
# One of each family: what does not depend on the options above is tested on these.
FAMILIES = ("llama", "mistral-window", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
PLAIN = [case for case in CAUSAL if case.id in FAMILIES]
TRAINED = "minimind2"


@pytest.mark.parametrize(("family", "config"), CAUSAL + TWO_WAY)
def test_hidden_states_equal_transformers(family, config, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    info = resolve(folder)
    model = load_model(info)
    assert info.packed
    rows = model.forward(pack(sequences)).hidden_states
    assert_close(rows, rows_of(reference, sequences))
    alone = torch.cat([model.forward(pack([s])).hidden_states for s in sequences])
    # Of what a caller gets, a unit vector. Weights four times as wide as trained ones make rounding as much wider.
    assert ((rows - alone) / rows.norm(dim=1, keepdim=True)).abs().max() <= 2e-6


@pytest.mark.parametrize(("family", "config"), CAUSAL)
def test_slices_equal_the_whole(family, config, save_model, resolve, pack, sequences, run_chunked):
    folder, _ = save_model(f"{family}Model", **config)
    model = load_model(resolve(folder))
    whole = model.forward(pack(sequences)).hidden_states
    for size, block_size in ((7, 16), (64, 4)):
        assert_close(torch.cat(run_chunked(model, sequences, size, block_size=block_size)), whole)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_slices_of_one_token_equal_the_whole(family, save_model, resolve, pack, sequences, run_chunked):
    folder, _ = save_model(f"{family}Model", **GEMMA)
    model = load_model(resolve(folder))
    sequences = [s[:30] for s in sequences]
    whole = model.forward(pack(sequences)).hidden_states
    assert_close(torch.cat(run_chunked(model, sequences, 1, block_size=4)), whole)


@pytest.mark.parametrize(("family", "config"), CAUSAL + TWO_WAY)
def test_what_can_be_kept_is_what_looks_back_only(family, config, save_model, resolve):
    folder, _ = save_model(f"{family}Model", **config)
    info = resolve(folder)
    spec = load_model(info).cache_spec
    if not info.is_causal:
        assert spec is None
        return
    layer = KvLayerSpec(config["num_key_value_heads"], config.get("head_dim", 12))
    rope_type = config.get("rope_parameters", {}).get("rope_type")
    shares_prefixes = rope_type not in ("dynamic", "longrope")
    assert spec == CacheSpec(kv_layers=(layer,) * config["num_hidden_layers"], shares_prefixes=shares_prefixes)


@pytest.mark.parametrize(("family", "config"), PLAIN)
def test_sequence_head_equals_transformers(family, config, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}ForSequenceClassification", **config)
    model = load_model(resolve(folder))
    rows = model.forward(pack(sequences)).hidden_states.split([len(s) for s in sequences])
    logits = model.classify(torch.stack([r[-1] for r in rows]))
    assert logits.dtype == torch.float32
    assert_close(logits, torch.cat([reference(torch.tensor(s)[None]).logits for s in sequences]))
    # The head reads one row, so it scores every token as the last one of the text up to there (process rewards).
    starts = [torch.tensor(sequences[0][: end + 1])[None] for end in range(len(sequences[0]))]
    assert_close(model.classify_tokens(rows[0]), torch.cat([reference(start).logits for start in starts]))


@pytest.mark.parametrize(("family", "config"), [case for case in PLAIN if case.id != "gemma3"])
def test_token_head_equals_transformers(family, config, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}ForTokenClassification", **config)
    model = load_model(resolve(folder))
    logits = model.classify_tokens(model.forward(pack(sequences)).hidden_states)
    assert_close(logits, torch.cat([reference(torch.tensor(s)[None]).logits[0] for s in sequences]))


@pytest.mark.parametrize(("family", "config"), PLAIN)
@pytest.mark.parametrize("is_tied", [True, False])
def test_language_models_are_loaded_without_their_head(family, config, is_tied, save_model, resolve, pack, sequences):
    name = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
    folder, reference = save_model(name, **config, tie_word_embeddings=is_tied)
    model = load_model(resolve(folder))
    assert (model.sequence_head, model.token_head) == (None, None)
    assert_close(model.forward(pack(sequences[:3])).hidden_states, rows_of(reference.model, sequences[:3]))


@pytest.mark.parametrize(("family", "config"), PLAIN + TWO_WAY)
def test_attention_weights_equal_transformers(family, config, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    info = resolve(folder)
    output = load_model(info).forward(pack(sequences), need_attention=True)
    reference.set_attn_implementation("eager")
    row = -1 if info.is_causal else 0
    maps = [reference(torch.tensor(s)[None], output_attentions=True).attentions[-1][0] for s in sequences]
    assert output.attention_weights is not None
    assert output.attention_weights.dtype == torch.float32
    assert_close(output.attention_weights, torch.cat([m[:, row].t() for m in maps]))


@pytest.mark.parametrize(("family", "config"), PLAIN)
def test_attention_weights_of_slices_go_back_to_the_start(
    family, config, save_model, resolve, pack, sequences, chunked_run
):
    folder, _ = save_model(f"{family}Model", **config)
    model = load_model(resolve(folder))
    run = chunked_run(model, sequences[2:], block_size=4)
    for step in ([(0, 0, 7), (1, 0, 20)], [(1, 20, 41), (2, 0, 100)], [(2, 100, 130), (1, 41, 63)]):
        run.step(step, need_attention=True)
    for (n, end), weights in run.weights.items():
        expected = model.forward(pack([sequences[2 + n][:end]]), need_attention=True).attention_weights
        assert_close(weights, expected)


def test_slices_that_end_their_sequences_tell_how_long_these_are(pack, sequences):
    batch = pack(sequences)
    lengths = tuple(map(len, sequences))
    assert prompt_lens(batch) == lengths
    pasts = (0, 0, 0, 4, 9)
    cache = BatchCache(num_new_seqs=3, num_new_tokens=10, context_lens=pasts)
    assert list(prompt_lens(replace(batch, cache=cache))) == [
        4 * (n == 3) + 9 * (n == 4) + lengths[n] for n in range(5)
    ]
    assert prompt_lens(replace(batch, cache=replace(cache, prompt_lens=(1, 2, 7, 90, 200)))) == (1, 2, 7, 90, 200)


@pytest.mark.parametrize(
    ("family", "config", "older"),
    [
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
            GEMMA3
            | {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                }
            },
            {"rope_theta": 500.0, "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            id="gemma3",
        ),
        pytest.param(
            "Gemma", rope({"rope_theta": 500.0}, WIDE), {"rope_theta": 500.0, "hidden_act": "gelu"}, id="gemma"
        ),
        pytest.param(
            "Phi3",
            STRETCHED | PHI_LONG,
            {"rope_scaling": {"type": "su", **PHI_FACTORS}},
            id="phi3",
        ),
    ],
)
def test_older_configs_mean_the_same(family, config, older, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    info = resolve(folder, hf_overrides={"rope_parameters": None, "transformers_version": "4.50.0", **older})
    assert_close(load_model(info).forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


def test_gemma3_finds_its_layers_by_the_pattern_of_older_configs(save_model, resolve, pack, sequences):
    folder, reference = save_model("Gemma3TextModel", **GEMMA | {"num_hidden_layers": 7})
    for pattern in ({}, {"sliding_window_pattern": 6}):
        model = load_model(resolve(folder, hf_overrides={"layer_types": None, **pattern}))
        assert_close(model.forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'short_factor'"),
        ({"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
        ({"hidden_act": "swiglu"}, "'swiglu'"),
    ],
)
def test_unknown_options_are_named(override, named, save_model, resolve):
    folder, _ = save_model("Qwen2Model", **SIZES)
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(resolve(folder, hf_overrides=override))


def test_two_way_llama_is_native_without_its_code(save_model, resolve, pack, sequences):
    folder, reference = save_model("LlamaModel", **SIZES | {"is_causal": False})
    code = {"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"}
    override = {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "auto_map": code}
    info = resolve(folder, hf_overrides={**override, "is_causal": None})
    assert (info.packed, info.is_causal) == (True, False)
    assert_close(load_model(info).forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "bfloat16"),
        ("cpu", "float16"),
        pytest.param("cuda", "float32", marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(("family", "config"), PLAIN)
def test_devices_and_dtypes_agree(family, config, device, dtype, save_model, resolve, pack, sequences):
    folder, _ = save_model(f"{family}Model", **config)
    expected = load_model(resolve(folder)).forward(pack(sequences)).hidden_states
    info = with_device(resolve(folder), device, dtype)
    rows = load_model(info).forward(pack(sequences, device=device)).hidden_states
    assert rows.dtype == getattr(torch, dtype)
    if dtype == "float32":
        assert_close(rows.cpu(), expected, tolerance=1e-4)
    else:
        # These models have weights four times as wide as trained ones, so that rounding shows.
        assert torch.cosine_similarity(rows.float().cpu(), expected, dim=1).min() > 0.98


@pytest.mark.parametrize(("family", "config"), PLAIN)
def test_reduced_precision_is_no_worse_than_transformers(
    family, config, save_model, resolve, pack, sequences, run_chunked
):
    folder, reference = save_model(f"{family}Model", **config)
    exact = rows_of(reference, sequences)
    theirs = rows_of(reference.bfloat16(), sequences)
    model = load_model(resolve(folder, "bfloat16"))

    def error(rows):
        return (rows.float() - exact).norm(dim=1).mean().item()

    limit = 1.2 * error(theirs)
    assert error(model.forward(pack(sequences)).hidden_states) <= limit
    assert error(torch.cat(run_chunked(model, sequences, 64, torch.bfloat16))) <= limit


def test_trained_model_equals_transformers(model_folder, resolve, pack, run_chunked):
    folder = model_folder(TRAINED)
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["Hi", "The quick brown fox jumps over the lazy dog.", "A penstock leads water to a turbine. " * 12]
    sequences = tokenizer(texts)["input_ids"]
    model = load_model(resolve(folder))
    expected = rows_of(reference, sequences)
    assert_close(model.forward(pack(sequences)).hidden_states, expected)
    assert_close(torch.cat(run_chunked(model, sequences, 50)), expected)
    reduced = load_model(resolve(folder, "bfloat16")).forward(pack(sequences)).hidden_states.float()
    assert torch.cosine_similarity(reduced, expected, dim=1).min() > 0.999
