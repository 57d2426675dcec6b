"""Print what the installed vLLM needs on a machine without an accelerator.

vLLM's ordinary wheels are made for CUDA and pin kernel libraries for it that a CPU neither needs
nor can load. Run with the Python of the environment that holds vLLM (installed with --no-deps).
"""

from __future__ import annotations

from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Torch is chosen by whoever makes the environment; the rest is for CUDA devices alone.
LEFT_OUT = {
    "apache-tvm-ffi",
    "fastsafetensors",
    "flashinfer-cubin",
    "flashinfer-python",
    "humming-kernels",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvtx",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
    "tokenspeed-mla",
    "torch",
    "torchaudio",
    "torchcodec",
    "torchvision",
}


def main() -> None:
    """Print one requirement a line."""
    for line in requires("vllm") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(requirement.name) not in LEFT_OUT:
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
