"""Attention masks: one form inside, the vendor's encodings at the edge.

Inside, a mask is boolean and True means that a query may attend to a key, as in PyTorch's
``scaled_dot_product_attention``. The vendor's operators want the opposite: 1 hides. Nothing but
:meth:`AttentionMask.boolean` and :meth:`AttentionMask.additive` knows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor

COMPRESSED_SIZE = 2048
"""Side of the causal mask from which ``npu_fused_infer_attention_score`` cuts every other."""

_BOOLEAN_DTYPES = (torch.bool, torch.int8, torch.uint8)


class Corner(Enum):
    """Which corner of the scores the diagonal of a causal mask meets.

    The values are the vendor's ``sparse_mode``.
    """

    LEFT_UP = 2
    """Query i sees the keys 0 .. i."""
    RIGHT_DOWN = 3
    """The last query sees every key: the queries are the last tokens of the sequence."""


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query may attend to.

    Attributes:
        visible: ``[..., queries, keys]`` bool, True where the query may attend to the key.
    """

    visible: Tensor

    @classmethod
    def causal(
        cls, queries: int, keys: int, corner: Corner = Corner.RIGHT_DOWN, device: str = "cpu"
    ) -> AttentionMask:
        """Hide the keys right of the diagonal through ``corner``."""
        shift = keys - queries if corner is Corner.RIGHT_DOWN else 0
        return cls(torch.ones((queries, keys), dtype=torch.bool, device=device).tril(shift))

    @classmethod
    def band(
        cls, queries: int, keys: int, before: int, after: int = 0, device: str = "cpu"
    ) -> AttentionMask:
        """Show ``before`` keys before and ``after`` after the lower right diagonal, and itself."""
        shift = keys - queries
        visible = torch.ones((queries, keys), dtype=torch.bool, device=device)
        return cls(visible.tril(shift + after).triu(shift - before))

    @classmethod
    def full_rank(
        cls,
        query_lens: Sequence[int],
        key_lens: Sequence[int],
        window: int | None = None,
        device: str = "cpu",
    ) -> AttentionMask:
        """Causal masks of several requests, ``[requests, 1, queries, keys]``, padded.

        Args:
            query_lens: queries of each request, the last tokens of its sequence.
            key_lens: keys of each request.
            window: keys that a query sees, its own included; None for all up to its own.
            device: where the mask goes.
        """
        shape = (len(query_lens), 1, max(query_lens), max(key_lens))
        visible = torch.zeros(shape, dtype=torch.bool, device=device)
        for request, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
            before = keys if window is None else window - 1
            visible[request, 0, :queries, :keys] = cls.band(queries, keys, before).visible
        return cls(visible)

    def boolean(self, dtype: torch.dtype = torch.bool) -> Tensor:
        """Return the mask as the vendor's operators take it: 1 hides.

        Raises:
            ValueError: the dtype is not bool, int8 or uint8.
        """
        if dtype not in _BOOLEAN_DTYPES:
            raise ValueError(f"a boolean mask is bool, int8 or uint8, not {dtype}")
        return self.visible.logical_not().to(dtype)

    def additive(self, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores: 0, and the lowest finite number where hidden.

        Finite, so that the softmax of a row of hidden keys is not NaN.

        Raises:
            ValueError: the dtype is not a floating one.
        """
        if not dtype.is_floating_point:
            raise ValueError(f"an additive mask is of a floating dtype, not {dtype}")
        zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
        return zeros.masked_fill_(~self.visible, torch.finfo(dtype).min)


@lru_cache(maxsize=8)
def compressed(device: torch.device, dtype: torch.dtype = torch.int8) -> Tensor:
    """Return the causal mask 2048 x 2048 in the vendor's encoding, made once a device and dtype."""
    mask = AttentionMask.causal(COMPRESSED_SIZE, COMPRESSED_SIZE, device=str(device))
    return mask.boolean(dtype)
