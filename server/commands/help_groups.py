"""How --help shows the settings: in groups, each with a word for its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

HELP_GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Input and output": {
        "output": "FILE",
        "overwrite": "",
        "field": "NAME",
        "batch_size": "ROWS",
        "dimensions": "N",
        "normalize": "",
        "prompt_name": "NAME",
    },
    "Model": {
        "model": "MODEL",
        "config": "FILE",
        "revision": "REVISION",
        "served_model_name": "NAME,...",
        "device": "{auto,cpu,cuda,cuda:N}",
        "devices": "PLACE,...",
        "data_parallel": "N",
        "dtype": "",
        "cpu_kernels": "",
        "trust_remote_code": "",
        "pooler_config": "JSON",
        "hf_overrides": "JSON",
        "chat_template": "FILE",
        "default_prompt_name": "NAME",
        "empty_input": "",
        "auto_truncate": "",
        "num_threads": "N",
        "tokenizer_workers": "N",
        "in_process": "",
        "hang_timeout_s": "SECONDS",
    },
    "Limits": {
        "max_model_len": "TOKENS",
        "max_num_batched_tokens": "TOKENS",
        "max_num_seqs": "N",
        "max_queued_tokens": "TOKENS",
        "max_queue_s": "SECONDS",
        "max_queued_chars": "CHARACTERS",
        "max_inputs_per_request": "N",
        "max_body_bytes": "BYTES",
        "max_json_values": "N",
        "request_timeout_s": "SECONDS",
        "drain_timeout_s": "SECONDS",
    },
    "HTTP": {
        "host": "ADDRESS",
        "port": "PORT",
        "api_key": "KEY,...",
        "api_key_file": "FILE",
        "admin_key": "KEY,...",
        "cors_origins": "ORIGIN,...",
        "operator_routes": "",
        "ssl_certfile": "FILE",
        "ssl_keyfile": "FILE",
    },
    "Several models": {
        "max_loaded_models": "N",
        "model_memory": "SIZE",
        "load_wait_s": "SECONDS",
    },
    "Batches": {
        "data_dir": "FOLDER",
        "max_file_bytes": "SIZE",
        "batch_share": "SHARE",
    },
    "Memory": {
        "answer_memory": "SIZE",
        "kv_cache_memory": "SIZE",
        "cache_memory_fraction": "SHARE",
        "kv_block_size": "TOKENS",
        "enable_chunked_prefill": "",
        "chunk_size": "TOKENS",
        "enable_prefix_caching": "",
    },
    "Logging": {
        "log_level": "",
        "log_format": "",
        "access_log": "",
        "otlp_traces_endpoint": "URL",
    },
}
"""Group -> field -> word for its value; empty for a flag without one and for one whose choices are shown."""
