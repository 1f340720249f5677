"""Fused models give the results of models without Triton kernels."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.executors.torch.layers.experts import ExpertStack, SortedExperts
from penstock.engine.executors.torch.layers.linear import Linear
from penstock.engine.executors.torch.layers.norm import LayerNorm
from penstock.engine.executors.torch.layers.weights import Fusion
from penstock.engine.model_files.resolve import with_device

from ....interpreter import IS_INTERPRETED
from ..families import DECODER_SIZES, ENCODER_SIZES, ENCODERS, MAMBA2, PLAIN, assert_close, chosen, unit_error

devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(
                not IS_INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1 from the start"
            ),
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
RELU = [
    pytest.param("Bert", ENCODER_SIZES | {"hidden_act": "relu"}, id="bert-relu"),
    pytest.param("Llama", DECODER_SIZES | {"hidden_act": "relu"}, id="llama-unfused-gate"),
]
SHORT_SUMS = [pytest.param("Mamba2", MAMBA2 | {"residual_in_fp32": False}, id="mamba2-short-sums")]
# Distance of unit vectors that the tanh form of GELU may add in three layers; measured: less than 1e-4.
TANH_ERROR = 5e-4


def forwards(folder, resolve, pack, device, dtype, sequences, *, need_attention=False):
    """Outputs of the model without fusion, with the epilogue, and fused."""
    info = with_device(resolve(folder, dtype), device, dtype)
    batch = pack(sequences, device=device)
    return [load_model(info, fusion=fusion).forward(batch, need_attention=need_attention) for fusion in Fusion]


@devices
@pytest.mark.parametrize(("family", "config"), ENCODERS + PLAIN + RELU)
def test_fused_model_equals_plain_in_float32(family, config, save_model, resolve, pack, sequences, device):
    folder, _ = save_model(f"{family}Model", **config)
    plain, epilogue, fused = forwards(folder, resolve, pack, device, "float32", sequences[:4])
    assert torch.equal(epilogue.hidden_states, plain.hidden_states)
    assert_close(fused.hidden_states, plain.hidden_states)
    assert not torch.equal(fused.hidden_states, plain.hidden_states), "the kernels did not run: no bit differs"


@devices
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "config"), chosen("mamba", "mamba2", "jamba", "granite") + SHORT_SUMS)
def test_fused_recurrent_model_equals_plain(family, config, dtype, save_recurrent, resolve, pack, sequences, device):
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
@pytest.mark.parametrize(("family", "config"), chosen("bert", "modernbert", "qwen3", "gemma3"))
def test_16_bit_fused_error_is_close_to_unfused(family, config, dtype, save_model, resolve, pack, sequences, device):
    folder, _ = save_model(f"{family}Model", **config)
    exact = forwards(folder, resolve, pack, device, "float32", sequences)[0].hidden_states
    plain, *others = (output.hidden_states for output in forwards(folder, resolve, pack, device, dtype, sequences))
    # The interpreter truncates float32 to bfloat16; a GPU rounds.
    factor = 2.5 if dtype == "bfloat16" and device == "cpu" else 1.25
    for rows in others:
        assert unit_error(rows, exact) <= factor * unit_error(plain, exact) + TANH_ERROR


@devices
@pytest.mark.parametrize(("family", "config"), chosen("bert", "modernbert", "llama", "gemma2"))
def test_fused_model_returns_attention_weights(family, config, save_model, resolve, pack, sequences, device):
    folder, _ = save_model(f"{family}Model", **config)
    plain, _, fused = forwards(folder, resolve, pack, device, "float32", sequences, need_attention=True)
    assert_close(fused.attention_weights, plain.attention_weights)


@devices
@pytest.mark.parametrize(("family", "config"), chosen("qwen3", "gemma2", "gemma3"))
def test_fused_decoder_writes_the_same_cache_slots(family, config, save_model, resolve, sequences, chunked_run, device):
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
def test_fused_gates_of_experts_equal_plain(device):
    both, down, x = (torch.randn(*shape, device=device) / 4 for shape in ((3, 48, 16), (3, 16, 24), (9, 16)))
    expert = torch.tensor([[0, 2], [2, 1], [1, 0]], device=device).repeat(3, 1)
    sums = [torch.zeros(9, 16, device=device) for _ in range(2)]
    for sum_, fusion in zip(sums, (Fusion.NONE, Fusion.FUSED), strict=True):
        experts = SortedExperts(ExpertStack(both, down), "silu", fusion=fusion)
        experts.add_to(sum_, x, expert, torch.ones(9, 2, device=device))
    assert_close(sums[1], sums[0])


def test_fusion_depends_on_device_and_triton(monkeypatch):
    assert Fusion.of_device(torch.device("cpu")) is Fusion.NONE
    cuda = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", {cuda: (7, 5)}.__getitem__)
    assert Fusion.of_device(cuda) is Fusion.EPILOGUE
    monkeypatch.setattr(torch.cuda, "get_device_capability", {cuda: (8, 0)}.__getitem__)
    assert Fusion.of_device(cuda) is (Fusion.FUSED if find_spec("triton") else Fusion.EPILOGUE)
    monkeypatch.setattr("penstock.engine.executors.torch.layers.weights.find_spec", lambda _: None)
    assert Fusion.of_device(cuda) is Fusion.EPILOGUE


def test_norm_wider_than_a_program_uses_torch():
    assert LayerNorm(torch.ones(8193), None, 1e-5, fusion=Fusion.FUSED).backend == "torch"
    assert LayerNorm(torch.ones(8192), None, 1e-5, fusion=Fusion.FUSED).backend == "triton"
    assert LayerNorm(torch.ones(8192), None, 1e-5, fusion=Fusion.EPILOGUE).backend == "torch"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("num_rows", [1, 130])
def test_activation_in_the_product_is_exact(activation, num_rows, dtype, device):
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((64, 48), (64,), (num_rows, 48)))
    weight, bias, x = (part.to(device, dtype) for part in (weight / 4, bias, x))
    actual = Linear(weight, bias, activation=activation, fusion=Fusion.EPILOGUE)(x)
    exact = Linear(weight.float(), bias.float(), activation=activation)(x.float())
    # One rounding before the activation and one after it, and the distance of the two forms of GELU.
    rounding = torch.finfo(dtype).eps * F.linear(x.float(), weight.float(), bias.float()).abs()
    assert ((actual.float() - exact).abs() <= 1.1 * rounding + 5e-4).all()


@pytest.mark.parametrize(
    ("dtype", "activation", "has_bias"),
    [(torch.float32, "gelu", True), (torch.bfloat16, "gelu", False), (torch.bfloat16, "silu", True)],
)
def test_other_products_have_no_epilogue(dtype, activation, has_bias):
    weight, x = torch.randn(64, 48).to(dtype), torch.randn(9, 48).to(dtype)
    bias = torch.randn(64).to(dtype) if has_bias else None
    plain, epilogue = (
        Linear(weight, bias, activation=activation, fusion=fusion)(x) for fusion in (Fusion.NONE, Fusion.EPILOGUE)
    )
    assert torch.equal(epilogue, plain)
