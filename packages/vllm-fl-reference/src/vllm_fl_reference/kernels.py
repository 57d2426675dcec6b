"""Replacements of the Triton kernels that vLLM's V1 model runner launches on every step."""

from __future__ import annotations

import numpy as np
import torch

PAD_SLOT_ID = -1


def compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Write the KV-cache slot of every scheduled token into ``slot_mapping``.

    Args:
        query_start_loc: Cumulative number of tokens per request, ``[num_reqs + 1]``.
        positions: Position of each token in its request, ``[num_tokens]``.
        block_table: Physical block of each logical block, ``[>= num_reqs, max_blocks]``.
        slot_mapping: Output, ``[>= num_tokens]``; what lies past the last token is padded.
        block_size: Tokens in one block.
    """
    # NumPy, because these are a few hundred numbers: waking PyTorch's threads takes longer.
    tokens_per_request = np.diff(query_start_loc.numpy())
    rows = np.repeat(np.arange(len(tokens_per_request)), tokens_per_request)
    scheduled = positions.numpy()[: len(rows)]
    blocks = block_table.numpy()[rows, scheduled // block_size].astype(np.int64)
    slots = slot_mapping.numpy()
    slots[: len(rows)] = blocks * block_size + scheduled % block_size
    slots[len(rows) :] = PAD_SLOT_ID
