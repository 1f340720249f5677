"""The peers and their settings."""

import pytest
from peers.catalogue import BFLOAT16, FLOAT32, PEERS, Setting
from peers.environments import REQUIREMENTS, Environment


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.environment])
def test_the_version_of_every_peer_is_pinned(name: str, tmp_path) -> None:
    peer = PEERS[name]
    assert (REQUIREMENTS / f"{peer.environment}.txt").is_file()
    assert Environment(peer.environment, tmp_path).version(peer.package)


@pytest.mark.parametrize("name", list(PEERS))
def test_variants_with_graphs_are_variants(name: str) -> None:
    assert PEERS[name].graph_variants <= set(PEERS[name].variants)


def test_first_settings_are_the_default_in_every_dtype_and_number_of_threads() -> None:
    settings = PEERS["vllm"].first_settings([1, 2])
    assert [(s.dtype, s.threads) for s in settings] == [(FLOAT32, 1), (FLOAT32, 2), (BFLOAT16, 1), (BFLOAT16, 2)]
    assert {s.variant for s in settings} == {"as it comes"}


def test_further_settings_are_as_near_to_the_best_as_they_can_be() -> None:
    assert PEERS["infinity"].further_settings(Setting(BFLOAT16, 2, "torch")) == [Setting(FLOAT32, 2, "ONNX Runtime")]
    assert PEERS["vllm"].further_settings(Setting(BFLOAT16, 1, "as it comes")) == [Setting(BFLOAT16, 1, "Intel OpenMP")]


def test_one_thread_is_one_stream() -> None:
    openvino = PEERS["openvino"]
    assert openvino.further_settings(Setting(BFLOAT16, 1, "one stream")) == []
    assert openvino.further_settings(Setting(BFLOAT16, 2, "one stream")) == [Setting(BFLOAT16, 2, "streams")]


def test_a_setting_reads_well() -> None:
    assert str(Setting(FLOAT32, 1, "fused")) == "float32, 1 thread, fused"
    assert str(Setting(BFLOAT16, 2, "streams")) == "bfloat16, 2 threads, streams"
