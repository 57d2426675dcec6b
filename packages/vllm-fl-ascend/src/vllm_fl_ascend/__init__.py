"""Huawei Ascend NPUs: operators through torch_npu, attention, and the NPU platform for vLLM."""
