"""Decoders on both executors give the results of transformers, whole and in chunks."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import save_file

from penstock.engine.protocol.errors import UnsupportedModelError, UnsupportedTaskError, WeightError
from penstock.engine.protocol.model_info import ClassifierMethod, ModelKind
from penstock.engine.scheduling import CacheSpec, KvLayerSpec

from ...tables import table
from .families import (
    CAUSAL,
    DECODER_SIZES as SIZES,
    GEMMA2,
    NOT_ON_CPU,
    PLAIN,
    TWO_WAY,
    WIDE,
    assert_close,
    assert_rows_equal,
    chosen,
    logits_of,
    models,
    on_executors,
    rows_of,
)

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
TRAINED = "minimind2"
TEXTS = ["Hi", "The quick brown fox jumps over the lazy dog.", "A penstock leads water to a turbine. " * 12]


@on_executors(CAUSAL + TWO_WAY, NOT_ON_CPU)
def test_hidden_states_equal_transformers(executor, family, config, load, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    info = resolve(folder)
    assert info.packed
    model = load(info)
    assert model.forward(pack(sequences)).attention_weights is None
    assert_rows_equal(model, reference, pack, sequences, 0 if executor == "cpu" else 2e-6)


@pytest.mark.parametrize(
    ("family", "config"), chosen("llama-two-way", "llama", "qwen3", "rope-dynamic", "rope-longrope")
)
def test_only_causal_models_cache_keys_and_values(family, config, load_on_torch, save_model, resolve):
    folder, _ = save_model(f"{family}Model", **config)
    info = resolve(folder)
    expected = None
    if info.is_causal:
        layer = KvLayerSpec(config["num_key_value_heads"], config.get("head_dim", 12))
        rope_type = config.get("rope_parameters", {}).get("rope_type")
        shares_prefixes = rope_type not in ("dynamic", "longrope")
        expected = CacheSpec(kv_layers=(layer,) * config["num_hidden_layers"], shares_prefixes=shares_prefixes)
    assert load_on_torch(info).cache_spec == expected


@pytest.mark.parametrize(("family", "config"), CAUSAL)
def test_chunks_on_torch_equal_whole(family, config, load_on_torch, save_model, resolve, pack, sequences, run_chunked):
    folder, _ = save_model(f"{family}Model", **config)
    model = load_on_torch(resolve(folder))
    whole = model.forward(pack(sequences)).hidden_states
    for size, block_size in ((7, 16), (64, 4)):
        assert_close(torch.cat(run_chunked(model, sequences, size, block_size=block_size)), whole)


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
    rows = model.forward(pack(sequences)).hidden_states
    with pytest.raises(UnsupportedTaskError):
        model.classify(rows)
    logits = model.classify_tokens(rows)
    assert_close(logits, torch.cat([reference(torch.tensor(s)[None]).logits[0] for s in sequences]))


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


@pytest.mark.parametrize(("family", "config", "older"), models("older_configs_of_decoders"))
def test_older_config_equals_transformers(family, config, older, load_on_torch, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    info = resolve(folder, hf_overrides={"rope_parameters": None, "transformers_version": "4.50.0", **older})
    assert_close(load_on_torch(info).forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


def test_gemma3_layers_follow_the_older_pattern(load_on_torch, save_model, resolve, pack, sequences):
    folder, reference = save_model("Gemma3TextModel", **GEMMA2 | {"num_hidden_layers": 7})
    for pattern in ({}, {"sliding_window_pattern": 6}):
        model = load_on_torch(resolve(folder, hf_overrides={"layer_types": None, **pattern}))
        assert_close(model.forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


@pytest.mark.parametrize(("override", "message"), table(__file__, "decoders_unknown_option_is_named"))
def test_unknown_option_is_named(override, message, load_on_torch, save_model, resolve):
    folder, _ = save_model("Qwen2Model", **SIZES)
    with pytest.raises(UnsupportedModelError, match=message):
        load_on_torch(resolve(folder, hf_overrides=override))


@pytest.mark.parametrize("name", ["Llama", "Ministral3"])
def test_two_way_model_needs_no_code_of_its_repository(name, load_on_torch, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{name}Model", **WIDE | {"is_causal": False})
    code = {"AutoModel": f"{name.lower()}_bidirectional_model.{name}BidirectionalModel"}
    override = {"architectures": [f"{name}BidirectionalModel"], "model_type": f"{name.lower()}_bidirec"}
    override |= {"auto_map": code}
    info = resolve(folder, hf_overrides={**override, "is_causal": None})
    assert (info.packed, info.is_causal) == (True, False)
    assert_close(load_on_torch(info).forward(pack(sequences)).hidden_states, rows_of(reference, sequences))


def save_reranker(save_model, resolve, method, changes=None, **config):
    """Saves a language model with two answer tokens. Returns (folder, info, weights of the checkpoint)."""
    folder, model = save_model("Qwen3ForCausalLM", **SIZES | config)
    fields = {"kind": ModelKind.CROSS_ENCODER, "classifier_tokens": (7, 4), "classifier_method": method}
    return folder, replace(resolve(folder, hf_overrides=changes or {}), **fields), model.state_dict()


@pytest.mark.parametrize("method", list(ClassifierMethod))
@pytest.mark.parametrize("is_nested", [False, True])
def test_reranker_logits_are_scaled_capped_and_shifted(method, is_nested, load_on_torch, save_model, resolve):
    changes = {"logit_scale": 0.5, "logits_scaling": 4.0, "final_logit_softcapping": 2.0}
    changes = {"text_config": changes} if is_nested else changes
    folder, info, weights = save_reranker(save_model, resolve, method, changes, tie_word_embeddings=False)
    bias = torch.randn(SIZES["vocab_size"])
    save_file(weights | {"lm_head.bias": bias}, folder / "model.safetensors")
    rows = torch.randn(3, SIZES["hidden_size"])
    logits = (rows @ weights["lm_head.weight"].T + bias) * 0.125
    logits = (2 * torch.tanh(logits / 2))[:, [7, 4]]
    is_difference = method is ClassifierMethod.FROM_2_WAY_SOFTMAX
    expected = logits[:, 1:] - logits[:, :1] if is_difference else logits
    torch.testing.assert_close(load_on_torch(info).classify(rows), expected)


@pytest.mark.parametrize(
    ("is_tied", "has_head", "expected"),
    [(None, False, EMBEDDING), (None, True, OUTPUT), (True, True, EMBEDDING), (False, False, None)],
)
def test_tied_reranker_reads_the_input_embedding(is_tied, has_head, expected, load_on_torch, save_model, resolve):
    method = ClassifierMethod.NO_POST_PROCESSING
    changes = {"tie_word_embeddings": is_tied}
    folder, info, weights = save_reranker(save_model, resolve, method, changes, tie_word_embeddings=False)
    if not has_head:
        save_file({name: weight for name, weight in weights.items() if name != OUTPUT}, folder / "model.safetensors")
    if expected is None:
        with pytest.raises(WeightError, match=r"no weight 'lm_head\.weight'"):
            load_on_torch(info)
        return
    rows = torch.randn(3, SIZES["hidden_size"])
    torch.testing.assert_close(load_on_torch(info).classify(rows), rows @ weights[expected][[7, 4]].T)


@pytest.mark.parametrize("executor", ["cpu"])
@pytest.mark.parametrize("method", list(ClassifierMethod))
@pytest.mark.parametrize(("is_tied", "scales"), [(True, {}), (False, {"logit_scale": 0.5, "logits_scaling": 4.0})])
def test_reranker_head_on_cpu_equals_torch(
    executor, method, is_tied, scales, load, load_on_torch, save_model, resolve, pack, sequences
):
    _, info, _ = save_reranker(save_model, resolve, method, scales, tie_word_embeddings=is_tied)
    on_cpu, on_torch = load(info), load_on_torch(info)
    rows = on_torch.forward(pack(sequences)).hidden_states[[0, 5, 70]]
    with pytest.raises(UnsupportedTaskError):
        on_cpu.classify_tokens(rows)
    assert_close(on_cpu.classify(rows), on_torch.classify(rows))


@pytest.mark.parametrize("executor", ["torch", "cpu"])
def test_trained_model_equals_transformers(executor, model_folder, load, needs_formats, resolve, pack):
    folder = model_folder(TRAINED)
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]
    model = load(resolve(folder))
    expected = rows_of(reference, sequences)
    assert_close(model.forward(pack(sequences)).hidden_states, expected)
    for dtype, min_cosine in [("bfloat16", 0.999)] if executor == "torch" else [("bfloat16", 0.9995), ("int8", 0.99)]:
        arithmetic = None if executor == "torch" else "bfloat16"
        needs_formats(dtype, arithmetic)
        reduced = load(replace(resolve(folder, dtype), arithmetic=arithmetic)).forward(pack(sequences)).hidden_states
        assert torch.cosine_similarity(reduced.float(), expected, dim=1).min() > min_cosine
