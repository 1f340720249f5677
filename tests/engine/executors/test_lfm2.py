"""LFM2 as an encoder equals the layers of transformers with a centred convolution and attention in both directions."""

import json
from types import MethodType

import pytest
import torch.nn.functional as F

from penstock.engine.executors.cpu.array_encoder import read_spec
from penstock.engine.protocol.errors import ModelLoadError

from ...tables import table
from .families import DECODER_SIZES, assert_rows_equal

SIZES = DECODER_SIZES | {"block_multiple_of": 8, "layer_types": ["conv", "full_attention", "conv"], "is_causal": False}
CODE, CONFIGS = table(__file__, "config_json_of_lfm2_on_the_hub"), table(__file__, "configs_of_lfm2")


def centred(self, hidden_states, **_):
    """The forward of Lfm2ShortConv with padding on both sides."""
    b, c, x = self.in_proj(hidden_states).transpose(1, 2).chunk(3, dim=1)
    width = self.conv.weight.shape[-1]
    rows = F.conv1d(b * x, self.conv.weight, self.conv.bias, padding=width // 2, groups=x.shape[1])
    return self.out_proj((c * rows[..., : x.shape[2]]).transpose(1, 2))


@pytest.fixture
def save_encoder(save_model):
    def save(**config):
        folder, reference = save_model("Lfm2Model", **(SIZES | config))
        for layer in reference.layers:
            if not layer.is_attention_layer:
                layer.conv.forward = MethodType(centred, layer.conv)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | CODE))
        return folder, reference

    return save


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("trusts", [False, True])
def test_hidden_states_equal_reference(config, trusts, load_on_torch, save_encoder, resolve, pack, sequences):
    folder, reference = save_encoder(**config)
    info = resolve(folder, trust_remote_code=trusts)
    assert (info.packed, info.is_causal, read_spec(info)) == (True, False, None), "the C library has no convolution"
    model = load_on_torch(info, trust_remote_code=trusts)
    assert_rows_equal(model, reference, pack, sequences, 2e-6)
    assert model.cache_spec is None


def test_causal_model_runs_on_transformers(save_model, resolve):
    folder, _ = save_model("Lfm2Model", **(SIZES | {"is_causal": True}))
    assert not resolve(folder).packed


@pytest.mark.parametrize("types", [["conv"] * 3, ["full_attention"], ["full_attention", "linear", "conv"]], ids=str)
def test_unknown_layers_are_rejected(types, load_on_torch, save_encoder, resolve):
    folder, _ = save_encoder()
    with pytest.raises(ModelLoadError, match="layer_types"):
        load_on_torch(resolve(folder, hf_overrides={"layer_types": types}))
