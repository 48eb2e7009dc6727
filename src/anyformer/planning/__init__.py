"""What a model costs, from its specification alone: parameters, FLOPs, bytes. Imports no torch.

Bytes are those of a single process.
"""

from anyformer.planning.cache import BYTES, cache_bytes, cache_bytes_per_token
from anyformer.planning.costs import Plan, largest_batch, plan
from anyformer.planning.flops import Flops, Lengths, forward_flops, visible_pairs
from anyformer.planning.memory import (
    OPTIMIZER_COPIES,
    Memory,
    forward_per_token,
    saved_per_source_token,
    saved_per_token,
    working_per_token,
)
from anyformer.planning.weights import Parameter, block_parameters, buffers, parameters
from anyformer.planning.words import binary, figures, si

__all__ = [
    "BYTES",
    "OPTIMIZER_COPIES",
    "Flops",
    "Lengths",
    "Memory",
    "Parameter",
    "Plan",
    "binary",
    "block_parameters",
    "buffers",
    "cache_bytes",
    "cache_bytes_per_token",
    "figures",
    "forward_flops",
    "forward_per_token",
    "largest_batch",
    "parameters",
    "plan",
    "saved_per_source_token",
    "saved_per_token",
    "si",
    "visible_pairs",
    "working_per_token",
]
