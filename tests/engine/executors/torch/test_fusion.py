"""Fused models give what the others give: on a GPU, or in triton's interpreter, in a process of its own.

The rest is of what needs no kernel: GELU inside the product, what torch.compile takes, and who decides.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.executors.torch.layers.experts import ExpertStack, SortedExperts
from penstock.engine.executors.torch.layers.linear import GatedLinear, Linear
from penstock.engine.executors.torch.layers.norm import LayerNorm, Residual, RmsNorm
from penstock.engine.executors.torch.layers.weights import Fusion
from penstock.engine.executors.torch.spec_model import Layer
from penstock.engine.model_files.resolve import with_device

from ....interpreter import IS_INTERPRETED, needs_triton, num_passed_interpreted
from ..parity import DISTILBERT_SIZES, ENCODER_SIZES as SIZES, assert_close, unit_error

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not IS_INTERPRETED, reason="needs a GPU, or triton's interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
MODERNBERT = SIZES | {"local_attention": 16, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
MODERNBERT |= {"bos_token_id": 1, "eos_token_id": 2}
DECODER = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16}
GEMMA = DECODER | {"sliding_window": 8, "query_pre_attn_scalar": 24}
MAMBA = {"vocab_size": 200, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}
MAMBA2 = MAMBA | {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 32}
HYBRID = SIZES | {"num_key_value_heads": 2, "mamba_d_state": 8, "pad_token_id": 0}
JAMBA = HYBRID | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4}
GRANITE = HYBRID | {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "num_local_experts": 4}
GRANITE |= {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 64}
GRANITE |= {"residual_multiplier": 0.3}
ENCODERS = [
    pytest.param("Bert", SIZES, id="bert"),
    pytest.param("Bert", SIZES | {"type_vocab_size": 1, "hidden_act": "relu"}, id="bert-one-type-relu"),
    pytest.param("Roberta", SIZES | {"type_vocab_size": 1}, id="roberta"),
    pytest.param("Electra", SIZES | {"embedding_size": 24}, id="electra"),
    pytest.param("DistilBert", DISTILBERT_SIZES, id="distilbert"),
    pytest.param("MPNet", SIZES, id="mpnet"),
    pytest.param("ModernBert", MODERNBERT, id="modernbert"),
    pytest.param("ModernBert", MODERNBERT | {"norm_bias": True, "mlp_bias": True}, id="modernbert-biased"),
]
DECODERS = [
    pytest.param("Llama", DECODER, id="llama"),
    pytest.param("Llama", DECODER | {"hidden_act": "relu"}, id="llama-unfused-gate"),
    pytest.param("Qwen3", DECODER, id="qwen3"),
    pytest.param("Phi3", SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}, id="phi3"),
    pytest.param("Gemma", DECODER, id="gemma"),
    pytest.param("Gemma2", GEMMA, id="gemma2"),
    pytest.param("Gemma3Text", GEMMA, id="gemma3"),
]
RECURRENT = [
    pytest.param("Mamba", MAMBA, id="mamba"),
    pytest.param("Mamba2", MAMBA2, id="mamba2"),
    pytest.param("Mamba2", MAMBA2 | {"residual_in_fp32": False}, id="mamba2-short-sums"),
    pytest.param("Jamba", JAMBA, id="jamba"),
    pytest.param("GraniteMoeHybrid", GRANITE, id="granite-scaled-terms"),
]
# Distance of unit vectors that the tanh form of GELU may add in three layers; measured: less than 1e-4.
TANH_ERROR = 5e-4

devices = pytest.mark.parametrize("device", DEVICES)


@needs_triton
@pytest.mark.timeout(1200)
@pytest.mark.skipif(IS_INTERPRETED, reason="this is the process that it starts")
@pytest.mark.parametrize(
    ("chosen", "least"),
    [
        ("float32 and (bert-cpu or qwen3-cpu) or fused_gate or fused_norms", 7),
        pytest.param("fused", 30, marks=pytest.mark.slow),
    ],
)
def test_fused_models_through_the_interpreter(chosen: str, least: int) -> None:
    assert num_passed_interpreted(Path(__file__), chosen=chosen) >= least


def forwards(folder, resolve, pack, device, dtype, sequences, *, need_attention=False):
    """Outputs of the model as it is, with the epilogue, and fused; on the CPU."""
    info = with_device(resolve(folder, dtype), device, dtype)
    batch = pack(sequences, device=device)
    models = [load_model(info, fusion=fusion) for fusion in Fusion]
    return [model.forward(batch, need_attention=need_attention) for model in models]


@devices
@pytest.mark.parametrize(("family", "config"), ENCODERS + DECODERS)
def test_fused_models_equal_the_others_in_float32(family, config, save_model, resolve, pack, sequences, device):
    folder, _ = save_model(f"{family}Model", **config)
    plain, epilogue, fused = forwards(folder, resolve, pack, device, "float32", sequences)
    assert torch.equal(epilogue.hidden_states, plain.hidden_states)
    assert_close(fused.hidden_states, plain.hidden_states)
    # The kernels are in use: another order of sums shows in some bit.
    assert not torch.equal(fused.hidden_states, plain.hidden_states)


@devices
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "config"), RECURRENT)
def test_fused_recurrent_models_equal_the_others(
    family, config, dtype, save_recurrent, resolve, pack, sequences, device
):
    folder, _ = save_recurrent(f"{family}Model", **config)
    exact = forwards(folder, resolve, pack, device, "float32", sequences)[0].hidden_states
    plain, _, fused = (output.hidden_states for output in forwards(folder, resolve, pack, device, dtype, sequences))
    assert fused.dtype is plain.dtype
    assert not torch.equal(fused, plain)
    if dtype == "float32":
        assert_close(fused, plain)
    else:
        assert unit_error(fused, exact) <= 1.25 * unit_error(plain, exact)


@devices
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("family", "config"), [ENCODERS[0], ENCODERS[6], DECODERS[2], DECODERS[6]])
def test_fused_models_are_as_exact_as_the_others_in_16_bits(
    family, config, dtype, save_model, resolve, pack, sequences, device
):
    folder, _ = save_model(f"{family}Model", **config)
    exact = forwards(folder, resolve, pack, device, "float32", sequences)[0].hidden_states
    plain, epilogue, fused = (
        output.hidden_states for output in forwards(folder, resolve, pack, device, dtype, sequences)
    )
    # The interpreter cuts a float32 to bfloat16, where a GPU rounds it.
    factor = 2.5 if dtype == "bfloat16" and device == "cpu" else 1.25
    limit = factor * unit_error(plain, exact) + TANH_ERROR
    assert unit_error(epilogue, exact) <= limit
    assert unit_error(fused, exact) <= limit


@devices
@pytest.mark.parametrize(("family", "config"), [ENCODERS[0], ENCODERS[6], DECODERS[0], DECODERS[5]])
def test_fused_models_give_attention_weights(family, config, save_model, resolve, pack, sequences, device):
    folder, _ = save_model(f"{family}Model", **config)
    plain, _, fused = forwards(folder, resolve, pack, device, "float32", sequences, need_attention=True)
    assert_close(fused.attention_weights, plain.attention_weights)


@devices
@pytest.mark.parametrize(("family", "config"), [DECODERS[2], *DECODERS[5:]])
def test_fused_decoders_keep_what_chunks_need(family, config, save_model, resolve, sequences, chunked_run, device):
    """Chunks that begin, go on and end in one batch; some of their tokens are stored and some are not."""
    folder, _ = save_model(f"{family}Model", **config)
    info = with_device(resolve(folder, "float32"), device, "float32")
    runs = []
    for fusion in (Fusion.NONE, Fusion.FUSED):
        run = chunked_run(load_model(info, fusion=fusion), sequences, device=device)
        run.step([(n, 0, min(9, len(s))) for n, s in enumerate(sequences[1:], 1)])
        run.step([(0, 0, len(sequences[0])), *((n, 9, len(s)) for n, s in enumerate(sequences) if n and len(s) > 9)])
        runs.append(run)
    plain, fused = runs
    for expected, actual in zip(plain.rows, fused.rows, strict=True):
        assert_close(torch.cat(actual), torch.cat(expected))
    for name in ("k", "v"):
        for expected, actual in zip(getattr(plain.kv, name), getattr(fused.kv, name), strict=True):
            assert torch.equal(expected.isnan(), actual.isnan()), "other slots are written"


@devices
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new"])
def test_fused_gate_equals_torch(activation, device):
    weight, bias, x = (torch.randn(*shape, device=device) for shape in ((2 * 24, 40), (48,), (11, 40)))
    gate, value = F.linear(x, weight, bias).chunk(2, dim=-1)
    functions = {"silu": F.silu, "gelu": F.gelu, "gelu_new": lambda x: F.gelu(x, approximate="tanh")}
    actual = GatedLinear(weight, bias, activation, fusion=Fusion.FUSED)(x)
    assert_close(actual, functions[activation](gate) * value)


@devices
def test_fused_gates_of_experts_equal_the_others(device):
    both, down, x = (torch.randn(*shape, device=device) / 4 for shape in ((3, 48, 16), (3, 16, 24), (9, 16)))
    expert = torch.tensor([[0, 2], [2, 1], [1, 0]], device=device).repeat(3, 1)
    sums = [torch.zeros(9, 16, device=device) for _ in range(2)]
    for sum_, fusion in zip(sums, (Fusion.NONE, Fusion.FUSED), strict=True):
        experts = SortedExperts(ExpertStack(both, down), "silu", fusion=fusion)
        experts.add_to(sum_, x, expert, torch.ones(9, 2, device=device))
    assert_close(sums[1], sums[0])


@devices
@pytest.mark.parametrize(
    "make", [LayerNorm, lambda w, b, eps, **options: RmsNorm(w, eps, **options)], ids=["ln", "rms"]
)
def test_fused_norms_equal_the_sum_and_the_norm(make, device):
    weight, bias, x, hidden = (torch.randn(*shape, device=device) for shape in ((40,), (40,), (11, 40), (11, 40)))
    stream = Residual(hidden, x, is_fused=True)
    plain = make(weight, bias, 1e-6)(x + hidden)
    fused = make(weight, bias, 1e-6, fusion=Fusion.FUSED)
    assert_close(stream.normed(fused), plain)
    normed, rest = stream.normed_and_sum(fused)
    assert_close(normed, plain)
    assert_close(rest.hidden, x + hidden)
    assert rest.term is None
    assert rest.normed_and_sum(fused)[1] is rest


def test_the_device_says_how_far_models_are_fused(monkeypatch):
    assert Fusion.of_device(torch.device("cpu")) is Fusion.NONE
    cuda = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", {cuda: (7, 5)}.__getitem__)
    assert Fusion.of_device(cuda) is Fusion.EPILOGUE
    monkeypatch.setattr(torch.cuda, "get_device_capability", {cuda: (8, 0)}.__getitem__)
    assert Fusion.of_device(cuda) is (Fusion.FUSED if find_spec("triton") else Fusion.EPILOGUE)
    monkeypatch.setattr("penstock.engine.executors.torch.layers.weights.find_spec", lambda _: None)
    assert Fusion.of_device(cuda) is Fusion.EPILOGUE


def test_norms_too_wide_for_a_program_take_torch():
    assert LayerNorm(torch.ones(8193), None, 1e-5, fusion=Fusion.FUSED).backend == "torch"
    assert LayerNorm(torch.ones(8192), None, 1e-5, fusion=Fusion.FUSED).backend == "triton"
    assert LayerNorm(torch.ones(8192), None, 1e-5, fusion=Fusion.EPILOGUE).backend == "torch"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("num_rows", [1, 7, 130])
def test_gelu_in_the_product(activation, num_rows, dtype, device):
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((64, 48), (64,), (num_rows, 48)))
    weight, bias, x = (part.to(device, dtype) for part in (weight / 4, bias, x))
    made = Linear(weight, bias, activation=activation, fusion=Fusion.EPILOGUE)
    exact = Linear(weight.float(), bias.float(), activation=activation)(x.float())
    # One rounding before the activation and one after it, and the distance of the two forms.
    rounding = torch.finfo(dtype).eps * F.linear(x.float(), weight.float(), bias.float()).abs()
    assert ((made(x).float() - exact).abs() <= 1.1 * rounding + 5e-4).all()


def test_the_tanh_form_is_as_near_as_said():
    x = torch.linspace(-12, 12, 1_000_001, dtype=torch.float64)
    error = (F.gelu(x) - F.gelu(x, approximate="tanh")).abs()
    assert error.max() < 4.8e-4
    assert x[error.argmax()].abs().item() == pytest.approx(2.7, abs=0.01)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_bear_the_tanh_form(dtype, save_model, resolve, pack, sequences, monkeypatch):
    # What CUDA computes, on a CPU, where the same operation is exact.
    def addmm_tanh(bias, x, weight, *, use_gelu):
        assert use_gelu
        return F.gelu(torch.addmm(bias, x, weight), approximate="tanh")

    monkeypatch.setattr(torch.ops.aten._addmm_activation, "default", addmm_tanh)
    folder, _ = save_model("BertModel", **SIZES)
    batch = pack(sequences)
    exact = load_model(resolve(folder)).forward(batch).hidden_states
    plain, epilogue = (
        load_model(resolve(folder, dtype), fusion=fusion).forward(batch).hidden_states
        for fusion in (Fusion.NONE, Fusion.EPILOGUE)
    )
    assert not torch.equal(plain, epilogue)
    assert unit_error(epilogue, exact) <= 1.25 * unit_error(plain, exact) + TANH_ERROR


@pytest.mark.parametrize(
    ("dtype", "activation", "has_bias"),
    [(torch.float32, "gelu", True), (torch.bfloat16, "gelu", False), (torch.bfloat16, "silu", True)],
)
def test_other_products_stay_bit_for_bit(dtype, activation, has_bias):
    weight, x = torch.randn(64, 48).to(dtype), torch.randn(9, 48).to(dtype)
    bias = torch.randn(64).to(dtype) if has_bias else None
    plain, made = (
        Linear(weight, bias, activation=activation, fusion=fusion)(x) for fusion in (Fusion.NONE, Fusion.EPILOGUE)
    )
    assert torch.equal(made, plain)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param("Bert", SIZES, id="bert"),
        pytest.param("ModernBert", MODERNBERT, id="modernbert"),
        pytest.param("Qwen3", DECODER, id="qwen3"),
    ],
)
def test_torch_compile_takes_what_is_between_two_attentions_once_for_all_blocks(
    family, config, save_model, resolve, pack, sequences, monkeypatch
):
    folder, _ = save_model(f"{family}Model", **config)
    model, batch = load_model(resolve(folder)), pack(sequences)
    expected = model.forward(batch).hidden_states
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(Layer.after_attention, backend=count, dynamic=True, fullgraph=True)
    monkeypatch.setattr(Layer, "after_attention", compiled)
    actual = model.forward(batch).hidden_states
    actual_of_others = model.forward(pack(sequences[2:])).hidden_states
    assert torch.equal(actual, expected)
    assert_close(actual_of_others, expected[-len(actual_of_others) :])
    assert len(graphs) == 1
