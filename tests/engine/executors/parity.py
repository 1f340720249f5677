"""Sizes of tiny models, and how models are compared with those of transformers."""

import torch

ENCODER_SIZES = {
    "vocab_size": 200,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 160,
    "num_labels": 3,
}
DISTILBERT_SIZES = {
    "vocab_size": 200,
    "dim": 48,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 80,
    "max_position_embeddings": 160,
    "num_labels": 3,
}
DECODER_SIZES = ENCODER_SIZES | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def rows_of(reference, sequences, **options):
    """What transformers gives for one sequence after the other, each by itself: [T, D]."""
    network = reference.base_model
    return torch.cat([network(torch.tensor(s)[None], **options).last_hidden_state[0] for s in sequences])


def assert_close(actual, expected, tolerance=1e-5):
    """Compares to the scale of the expected values."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


def unit_error(rows, exact):
    """Mean distance of the rows as unit vectors."""
    rows, exact = (torch.nn.functional.normalize(part.float(), dim=1) for part in (rows, exact))
    return (rows - exact).norm(dim=1).mean()
