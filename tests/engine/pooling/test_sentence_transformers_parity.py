"""Packed pooling against sentence-transformers' own modules on the padded form of the same rows."""

from itertools import combinations

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from torch import Tensor

from penstock.engine.pooling.tensor_ops import tensor_pooler
from penstock.engine.protocol.model_info import DenseSpec
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

from .conftest import HIDDEN_SIZE, LENGTHS, PoolAll, TinyModel, make_info

MODES = {
    "cls": PoolingType.CLS,
    "max": PoolingType.MAX,
    "mean": PoolingType.MEAN,
    "mean_sqrt_len_tokens": PoolingType.MEAN_SQRT_LEN,
    "weightedmean": PoolingType.WEIGHTED_MEAN,
    "lasttoken": PoolingType.LAST,
}
CHAINS = [*((mode,) for mode in MODES), *combinations(MODES, 2), tuple(MODES)]


def padded(hidden_states: Tensor) -> dict[str, Tensor]:
    parts = hidden_states.split(LENGTHS)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.int64) for n in LENGTHS], batch_first=True)
    rows = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=1e6)
    return {"token_embeddings": rows, "attention_mask": mask}


@pytest.mark.parametrize("modes", CHAINS, ids="+".join)
@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalised"])
def test_pooling_and_normalize(
    modes: tuple[str, ...], normalize: bool, pool_all: PoolAll, hidden_states: Tensor
) -> None:
    features = Pooling(HIDDEN_SIZE, modes)(padded(hidden_states))
    expected = (Normalize()(features) if normalize else features)["sentence_embedding"]
    info = make_info(sequence_pooling=tuple(MODES[m] for m in modes), normalize=normalize)
    params = PoolingParams().resolved(PoolingTask.EMBED, info)
    output = pool_all(tensor_pooler(info, TinyModel()), [params] * len(LENGTHS))
    actual = np.stack([arrays["embedding"] for arrays in output.to_numpy()])
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "modes", [("cls",), ("max",), ("mean",), ("mean_sqrt_len_tokens",), ("weightedmean",)], ids=str
)
def test_prompt_is_left_out(modes: tuple[str, ...], pool_all: PoolAll, hidden_states: Tensor) -> None:
    long = [i for i, length in enumerate(LENGTHS) if length > 4]
    features = padded(hidden_states)
    features = {name: value[long] for name, value in features.items()} | {"prompt_length": torch.tensor([4])}
    expected = Pooling(HIDDEN_SIZE, modes, include_prompt=False)(features)["sentence_embedding"]
    info = make_info(sequence_pooling=tuple(MODES[m] for m in modes), normalize=False)
    params = [PoolingParams().resolved(PoolingTask.EMBED, info)] * len(LENGTHS)
    skip_tokens = torch.full((len(LENGTHS),), 4, dtype=torch.int32)
    output = pool_all(tensor_pooler(info, TinyModel()), params, indices=long, skip_tokens=skip_tokens)
    actual = np.stack([arrays["embedding"] for arrays in output.to_numpy()])
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("modes", [("mean",), ("cls", "lasttoken")], ids="+".join)
@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalised"])
def test_dense_chain(modes: tuple[str, ...], normalize: bool, pool_all: PoolAll, hidden_states: Tensor) -> None:
    torch.manual_seed(4)
    width = HIDDEN_SIZE * len(modes)
    chain = [Dense(width, 16, activation_function=torch.nn.GELU()), Dense(16, 8, bias=False)]
    features = Pooling(HIDDEN_SIZE, modes)(padded(hidden_states))
    with torch.no_grad():
        for module in [*chain, *([Normalize()] if normalize else [])]:
            features = module(features)
    specs = tuple(
        DenseSpec(folder="", in_features=d.in_features, out_features=d.out_features, bias=d.bias, activation="")
        for d in chain
    )
    info = make_info(sequence_pooling=tuple(MODES[m] for m in modes), dense=specs, normalize=normalize)
    maps = [lambda rows, d=d: d({"sentence_embedding": rows})["sentence_embedding"] for d in chain]
    params = PoolingParams().resolved(PoolingTask.EMBED, info)
    with torch.inference_mode():
        output = pool_all(tensor_pooler(info, TinyModel(), maps), [params] * len(LENGTHS))
    actual = np.stack([arrays["embedding"] for arrays in output.to_numpy()])
    np.testing.assert_allclose(actual, features["sentence_embedding"], atol=1e-5, rtol=1e-5)
