"""Every native family gives what transformers gives, for odd lengths, with every head, alone and in a batch."""

import pytest
import torch

from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.model_files.resolve import with_device
from penstock.engine.protocol.errors import UnsupportedModelError, UnsupportedTaskError

from ..parity import DISTILBERT_SIZES as DISTILBERT, ENCODER_SIZES as SIZES, assert_close

MODERNBERT = (
    SIZES
    | {"local_attention": 16, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    | {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
BIASED = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
FAMILIES = [
    pytest.param("Bert", SIZES, id="bert"),
    pytest.param("Bert", SIZES | {"hidden_act": "gelu_new", "type_vocab_size": 1}, id="bert-tanh-gelu-one-type"),
    pytest.param("Bert", SIZES | {"hidden_act": "quick_gelu"}, id="bert-unfused-activation"),
    pytest.param("Roberta", SIZES | {"type_vocab_size": 1}, id="roberta"),
    pytest.param("XLMRoberta", SIZES | {"type_vocab_size": 1, "pad_token_id": 5}, id="xlm-roberta"),
    pytest.param("Camembert", SIZES, id="camembert"),
    pytest.param("Electra", SIZES | {"embedding_size": 24}, id="electra"),
    pytest.param("Electra", SIZES | {"embedding_size": 48}, id="electra-without-projection"),
    pytest.param("DistilBert", DISTILBERT, id="distilbert"),
    pytest.param("DistilBert", DISTILBERT | {"activation": "relu"}, id="distilbert-relu"),
    pytest.param("MPNet", SIZES, id="mpnet"),
    pytest.param("ModernBert", MODERNBERT, id="modernbert"),
    pytest.param("ModernBert", MODERNBERT | BIASED | {"classifier_pooling": "mean"}, id="modernbert-biased-mean"),
    pytest.param(
        "ModernBert", MODERNBERT | {"global_attn_every_n_layers": 2, "num_hidden_layers": 4}, id="modernbert-last-local"
    ),
]
HAS_TYPES = ("Bert", "Electra")


def boundaries_of(family, config, sequences):
    """First token of type 1 of each sequence."""
    has_types = family in HAS_TYPES and config.get("type_vocab_size", 2) > 1
    return [len(s) // 2 if has_types else 0 for s in sequences]


def arguments(sequence, boundary):
    """What transformers takes for one sequence."""
    ids = torch.tensor(sequence)[None]
    types = {"token_type_ids": (torch.arange(len(sequence)) >= boundary).long()[None]} if boundary else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types}


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_hidden_states_equal_transformers(family, config, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    boundaries = boundaries_of(family, config, sequences)
    output = load_model(resolve(folder)).forward(pack(sequences, boundaries))
    expected = [reference(**arguments(s, b)).last_hidden_state[0] for s, b in zip(sequences, boundaries, strict=True)]
    assert output.attention_weights is None
    assert output.logits is None
    assert_close(output.hidden_states, torch.cat(expected))


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_text_alone_equals_text_in_batch(family, config, save_model, resolve, pack, sequences):
    folder, _ = save_model(f"{family}Model", **config)
    model = load_model(resolve(folder))
    together = model.forward(pack(sequences)).hidden_states
    alone = torch.cat([model.forward(pack([s])).hidden_states for s in sequences])
    # The widest values of these random models are about 5; 1e-6 is of what a caller gets, a unit vector.
    scale = together.norm(dim=1, keepdim=True)
    assert ((together - alone) / scale).abs().max() <= 1e-6


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_sequence_head_equals_transformers(family, config, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}ForSequenceClassification", **config)
    model = load_model(resolve(folder))
    hidden = model.forward(pack(sequences)).hidden_states.split([len(s) for s in sequences])
    is_mean = config.get("classifier_pooling") == "mean"
    pooled = torch.stack([rows.mean(0) if is_mean else rows[0] for rows in hidden])
    expected = torch.cat([reference(**arguments(s, 0)).logits for s in sequences])
    logits = model.classify(pooled)
    assert logits.dtype == torch.float32
    assert_close(logits, expected)
    with pytest.raises(UnsupportedTaskError):
        model.classify_tokens(pooled)


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_token_head_equals_transformers(family, config, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}ForTokenClassification", **config)
    model = load_model(resolve(folder))
    logits = model.classify_tokens(model.forward(pack(sequences)).hidden_states)
    expected = torch.cat([reference(**arguments(s, 0)).logits[0] for s in sequences])
    assert_close(logits, expected)
    with pytest.raises(UnsupportedTaskError):
        model.classify(logits)


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_attention_of_the_first_token_equals_transformers(family, config, save_model, resolve, pack, sequences):
    folder, reference = save_model(f"{family}Model", **config)
    output = load_model(resolve(folder)).forward(pack(sequences), need_attention=True)
    reference.set_attn_implementation("eager")
    expected = [reference(**arguments(s, 0), output_attentions=True).attentions[-1][0, :, 0].t() for s in sequences]
    assert output.attention_weights.dtype == torch.float32
    assert_close(output.attention_weights, torch.cat(expected))


@pytest.mark.parametrize(("family", "config"), FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reduced_precision_stays_close(family, config, dtype, save_model, resolve, pack, sequences):
    folder, _ = save_model(f"{family}Model", **config)
    exact = load_model(resolve(folder)).forward(pack(sequences)).hidden_states
    reduced = load_model(resolve(folder, dtype)).forward(pack(sequences), need_attention=True)
    assert reduced.hidden_states.dtype == getattr(torch, dtype)
    assert reduced.attention_weights.dtype == torch.float32
    similarity = torch.cosine_similarity(reduced.hidden_states.float(), exact, dim=1)
    assert similarity.min() > 0.999


@pytest.mark.parametrize("family", ["Roberta", "MPNet"])
def test_padding_token_inside_a_text_stands_where_transformers_puts_it(family, save_model, resolve, pack):
    folder, reference = save_model(f"{family}Model", **SIZES)
    sequences = [[7, 1, 9], [1, 1, 8, 1, 5, 6], [4, 5]]
    hidden = load_model(resolve(folder)).forward(pack(sequences)).hidden_states
    expected = [reference(**arguments(s, 0)).last_hidden_state[0] for s in sequences]
    assert_close(hidden, torch.cat(expected))


def test_unknown_options_are_named(save_model, resolve):
    folder, _ = save_model("BertModel", **SIZES, hidden_act="relu")
    with pytest.raises(UnsupportedModelError, match="'swiglu'"):
        load_model(resolve(folder, hf_overrides={"hidden_act": "swiglu"}))
    folder, _ = save_model("ModernBertModel", **MODERNBERT)
    rope = {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}
    with pytest.raises(UnsupportedModelError, match="'yarn'"):
        load_model(resolve(folder, hf_overrides={"rope_parameters": rope}))


def test_modernbert_reads_thetas_of_older_configs(save_model, resolve, pack, sequences):
    thetas = {"full_attention": {"rope_type": "default", "rope_theta": 900.0}, "sliding_attention": None}
    thetas["sliding_attention"] = {"rope_type": "default", "rope_theta": 50.0}
    folder, reference = save_model("ModernBertModel", **MODERNBERT, rope_parameters=thetas)
    older = {"rope_parameters": None, "global_rope_theta": 900.0, "local_rope_theta": 50.0}
    hidden = load_model(resolve(folder, hf_overrides=older)).forward(pack(sequences)).hidden_states
    expected = [reference(**arguments(s, 0)).last_hidden_state[0] for s in sequences]
    assert_close(hidden, torch.cat(expected))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "bfloat16"),
        pytest.param("cuda", "float32", marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_devices_and_dtypes_agree(family, config, device, dtype, save_model, resolve, pack, sequences):
    folder, _ = save_model(f"{family}Model", **config)
    boundaries = boundaries_of(family, config, sequences)
    expected = load_model(resolve(folder)).forward(pack(sequences, boundaries)).hidden_states
    info = with_device(resolve(folder), device, dtype)
    rows = load_model(info).forward(pack(sequences, boundaries, device=device)).hidden_states.float().cpu()
    if dtype == "float32":
        assert_close(rows, expected, tolerance=1e-4)
    else:
        # These models have weights four times as wide as trained ones, so that rounding shows.
        assert torch.nn.functional.cosine_similarity(rows, expected, dim=1).min() > 0.98
