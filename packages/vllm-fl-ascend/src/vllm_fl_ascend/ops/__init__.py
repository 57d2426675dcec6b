"""torch_npu's operators under the operators' signatures; importing this loads torch_npu."""

import torch_npu  # noqa: F401
