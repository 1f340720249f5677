"""ctypes declarations of the structs of csrc/types.h and the functions of csrc/api.c, which describe them."""

from __future__ import annotations

import ctypes
import hashlib
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_long, c_void_p
from pathlib import Path
from typing import Any, Final


class Product(Structure):
    _fields_ = [
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("format", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("padding", c_int32),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
    ]


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("rms", c_int32)]


class LowRank(Structure):
    _fields_ = [("down", Product), ("up", Product)]


class Adapter(Structure):
    _fields_ = [
        ("terms", c_void_p),
        ("embedding_down", c_void_p),
        ("embedding_up", c_void_p),
        ("embedding_rank", c_int64),
    ]


class Layer(Structure):
    _fields_ = [
        ("attention_norm", Norm),
        ("mlp_norm", Norm),
        ("qkv", Product),
        ("attention_out", Product),
        ("mlp_in", Product),
        ("mlp_out", Product),
        ("left", c_int64),
        ("right", c_int64),
        ("rotary", c_void_p),
        ("bias", c_void_p),
        ("bias_reach", c_int64),
        ("distance_keys", c_void_p),
        ("distance_queries", c_void_p),
        ("distance_rows", c_void_p),
        ("distance_reach", c_int64),
        ("num_distances", c_int64),
        ("query_norm", Norm),
        ("key_norm", Norm),
        ("after_attention", Norm),
        ("after_mlp", Norm),
        ("softcap", c_float),
        ("padding", c_int32),
    ]


class Encoder(Structure):
    _fields_ = [
        ("width", c_int64),
        ("num_layers", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_size", c_int64),
        ("pre_norm", c_int32),
        ("table_is_bf16", c_int32),
        ("attention_dot", c_int32),
        ("is_decoder", c_int32),
        ("word_embeddings", c_void_p),
        ("position_embeddings", c_void_p),
        ("embedding_width", c_int64),
        ("embedding_norm", Norm),
        ("projection", Product),
        ("layers", POINTER(Layer)),
        ("final_norm", Norm),
        ("adapters", c_void_p),
        ("max_rank", c_int64),
        ("min_part_tokens", c_int64),
    ]


class KvBlocks(Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_size", c_int64),
        ("context_lens", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int64),
        ("slots", c_void_p),
    ]


class Batch(Structure):
    _fields_ = [
        ("ids", c_void_p),
        ("rows", c_void_p),
        ("positions", c_void_p),
        ("starts", c_void_p),
        ("visible", c_void_p),
        ("num_seqs", c_int64),
        ("kv_blocks", POINTER(KvBlocks)),
        ("hidden", c_void_p),
        ("first_weights", c_void_p),
        ("adapters", c_void_p),
        ("kept", c_int64),
    ]


_PRODUCT = POINTER(Product)
_MACHINE = c_void_p
# Name -> (result, arguments).
_FUNCTIONS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "penstock_sources": (c_char_p, ()),
    "penstock_isa": (c_char_p, (c_char_p,)),
    "penstock_open": (c_void_p, (c_char_p, c_int)),
    "penstock_close": (None, (_MACHINE,)),
    "penstock_formats": (c_int, (_MACHINE,)),
    "penstock_panel_columns": (c_long, (_MACHINE, _PRODUCT)),
    "penstock_packed_bytes": (c_long, (_MACHINE, _PRODUCT)),
    "penstock_pack": (None, (_MACHINE, _PRODUCT, *(c_void_p,) * 6)),
    "penstock_free_lanes": (c_int, (_MACHINE,)),
    "penstock_set_wakeup_fd": (None, (_MACHINE, c_int)),
    "penstock_begin": (c_void_p, (_MACHINE, POINTER(Encoder), POINTER(Batch))),
    "penstock_is_done": (c_int, (c_void_p,)),
    "penstock_end": (c_int, (c_void_p,)),
    "penstock_product": (None, (_MACHINE, _PRODUCT, c_void_p, c_void_p, c_long, *(c_void_p,) * 4)),
    "penstock_pool": (
        None,
        (_MACHINE, c_int, c_void_p, c_long, *(c_void_p,) * 4, c_long, c_long, *(c_void_p,) * 3),
    ),
    "penstock_truncate_rows": (None, (_MACHINE, c_void_p, c_long, c_long, c_long, c_int, c_void_p)),
}


def digest(folder: Path = Path(__file__).parent) -> str | None:
    """Returns the hash of the sources in `folder` that the library contains; None if a source is missing."""
    files = [*sorted(folder.glob("csrc/**/*.[ch]")), folder / "_abi.py", folder / "build.py"]
    if len(files) == 2 or not all(file.is_file() for file in files):
        return None
    sources = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        sources.update(b"%b %d\n" % (file.name.encode(), len(content)))
        sources.update(content)
    return sources.hexdigest()[:16]


def load(path: str, sources: str | None) -> ctypes.CDLL:
    """Loads the library.

    Args:
        path: Path of the shared library.
        sources: Expected hash of its sources; None skips the check.

    Raises:
        OSError: The file cannot be loaded, or was compiled from other sources.
    """
    library = ctypes.CDLL(path)
    try:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
        is_stale = sources is not None and library.penstock_sources() != sources.encode()
    except AttributeError:
        is_stale = True
    if is_stale:
        raise OSError(f"{path} was built from other sources")
    return library
