"""torch_npu emulated on CPU tensors, for machines without an NPU.

An operator is declared with the schema that stands in the vendor's own library (``schemas/``), so
that torch refuses a wrong keyword, order or type exactly as it does for the real torch_npu. What
it computes, and what it refuses, follows the vendor's documentation, which each operator names:

- "docs": the operator's page in ``torch_npu/_op_plugin_docs.py`` of the wheel torch_npu 2.13.0;
- "aclnn": the page of the operator beneath in the CANN documentation at www.hiascend.com.

What the documentation leaves undefined is NaN here. Importing this as ``torch_npu`` is all that
there is to do, as with the real one.
"""

from __future__ import annotations

import torch

from torch_npu import activation, attention, cache, moe, norm, rotary
from torch_npu.library import SCHEMAS, VERSION

__all__ = ["activation", "attention", "cache", "moe", "norm", "rotary"]
__version__ = VERSION

for _name in SCHEMAS:
    globals()[_name] = getattr(torch.ops.npu, _name)
