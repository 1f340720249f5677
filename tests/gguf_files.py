"""Writes GGUF files."""

import struct

import numpy as np

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_K": 12, "Q8_0": 8, "BF16": 30}
_ARRAYS = {"uint8": 0, "int32": 5, "float32": 6}


def write_gguf(path, metadata, tensors, version=3):
    """Writes metadata and tensors {name: (type, float32 array)}; returns the values that a reader must find."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _string(key) + _typed(value)
    data, found = b"", {}
    for name, (type_name, values) in tensors.items():
        header += _string(name) + struct.pack("<I", values.ndim) + struct.pack(f"<{values.ndim}Q", *values.shape[::-1])
        header += struct.pack("<IQ", TYPE_IDS[type_name], len(data))
        stored, found[name] = _stored(type_name, values)
        data += stored + bytes(-len(stored) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return found


def _string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value):
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    return struct.pack("<IIQ", 9, _ARRAYS[value.dtype.name], len(value)) + value.tobytes()


def _stored(type_name, values):
    """Returns the bytes of a tensor and the values that they mean."""
    if type_name == "Q8_0":
        blocks = values.reshape(-1, 32)
        scales = (np.abs(blocks).max(1) / 127).astype(np.float16)
        integers = np.round(blocks / np.maximum(scales.astype(np.float32), 1e-9)[:, None]).clip(-128, 127).astype("i1")
        stored = np.empty(len(blocks), [("scale", "<f2"), ("values", "i1", 32)])
        stored["scale"], stored["values"] = scales, integers
        means = integers.astype(np.float64) * scales.astype(np.float64)[:, None]
        return stored.tobytes(), means.reshape(values.shape).astype(np.float32)
    if type_name == "BF16":
        words = (values.view(np.uint32) >> 16).astype("<u2")
        return words.tobytes(), (words.astype(np.uint32) << 16).view(np.float32)
    stored = values.astype({"F16": "<f2"}.get(type_name, "<f4"))
    return stored.tobytes(), stored.astype(np.float32)
