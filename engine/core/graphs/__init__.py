"""Small forwards that are recorded once and replayed: a GPU then gets them in one piece, not launch by launch."""

from .buckets import Bucket, Buckets
from .forward_graphs import MAX_TOKENS, ForwardGraphs
from .recorder import CudaRecorder, Recorder

__all__ = ["MAX_TOKENS", "Bucket", "Buckets", "CudaRecorder", "ForwardGraphs", "Recorder"]
