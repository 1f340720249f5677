"""What runs before the first request: a batch of every task, and on a GPU the largest one and one of every kind."""

from .first_batch import warm_up
from .gpu_start import GpuStart
from .largest_batch import LargestBatch, largest_batch
from .made_batches import MadeBatches
from .rounds import run_rounds

__all__ = ["GpuStart", "LargestBatch", "MadeBatches", "largest_batch", "run_rounds", "warm_up"]
