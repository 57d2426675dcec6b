"""The token counts that make Triton compile every variant of norms, activations and rotary.

Triton compiles a kernel anew for each dtype, constexpr, and class of an integer argument: 1, a
multiple of 16, or another. What grows with the number of tokens is not classed in these kernels
(``do_not_specialize``) or is the grid, strides come from the layer, and a tile choice steps once,
from few tokens to many. So the fewest and the most tokens between them reach every variant. The
kernels of experts and attention have more steps; what lies between is not compiled ahead.
"""

from __future__ import annotations


def token_counts(most: int) -> tuple[int, ...]:
    """Return the counts to run once before serving.

    Args:
        most: the largest number of tokens that a step may have.
    """
    return tuple(sorted({1, most}))
