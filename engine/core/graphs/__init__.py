"""Small forwards that are recorded once and replayed: a GPU then gets them in one piece, not launch by launch."""

from .buckets import Bucket, Buckets
from .forward_graphs import ForwardGraphs
from .record_forwards import record_forwards
from .recorder import CudaRecorder, Recorder

__all__ = ["Bucket", "Buckets", "CudaRecorder", "ForwardGraphs", "Recorder", "record_forwards"]
