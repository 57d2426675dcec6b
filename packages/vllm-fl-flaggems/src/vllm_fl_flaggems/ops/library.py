"""The torch library ``vllm_fl_flaggems``: what torch.compile sees of the operators.

Every operator but the write into the paged cache is functional: it returns new tensors and changes
no argument, so its schema has no aliases and nothing has to be made functional or put back in
place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("vllm_fl_flaggems", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator for every device.

    Args:
        schema: name, arguments and results.
        run: does it, on real tensors.
        fake: returns empty tensors of the results' shapes and dtypes.
    """
    # Exactly the strides that were traced: those the implementation has said that it takes.
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_LIBRARY.ns}::{name}", fake, lib=_LIBRARY)
