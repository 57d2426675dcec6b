"""Arguments with every memory layout, inside storage whose other elements are guarded.

A tensor is made as a view into a larger storage that is filled with NaN. What reads beyond the
view becomes NaN, and what writes beyond it is found by comparing the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from vllm_fl.testing.case import ConformanceFailure, NotApplicable

Shape = Sequence[int]
Layout = Callable[[Shape], tuple[tuple[int, ...], int]]
"""Shape -> strides and first element of the view, in elements."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
GUARD = 64  # elements before and after: 128 bytes in 16 bits, so that alignment stays
FAR = (1 << 31) + 64  # a row stride, in elements, that 32 bits cannot hold


def short(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def row_major(shape: Shape) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def _contiguous(shape: Shape) -> tuple[tuple[int, ...], int]:
    return row_major(shape), 0


def _offset(shape: Shape) -> tuple[tuple[int, ...], int]:
    """Three elements into the storage: aligned to an element, not to a vector."""
    return row_major(shape), 3


def _wide_rows(shape: Shape) -> tuple[tuple[int, ...], int]:
    """A slice of the last dimension of a wider tensor: row stride > width."""
    return row_major((*shape[:-1], shape[-1] + 13)), 5


def _packed(shape: Shape) -> tuple[tuple[int, ...], int]:
    """The middle part of a packed row, as key is of [query, key, value]; aligned."""
    width = math.prod(shape[1:])
    return (max(3 * width, 1), *row_major(shape[1:])), width


def _skewed(shape: Shape) -> tuple[tuple[int, ...], int]:
    """Another gap after every dimension, so that no two dimensions can be flattened."""
    strides = [1]
    for gap, size in enumerate(reversed(shape[1:]), start=1):
        strides.append(strides[-1] * max(size, 1) + 8 * gap)
    return tuple(reversed(strides)), 8


def _transposed(shape: Shape) -> tuple[tuple[int, ...], int]:
    """Leading dimensions in reverse order of memory, the last one contiguous."""
    leading = row_major((*reversed(shape[:-1]), shape[-1]))[:-1]
    return (*reversed(leading), 1), 0


def _columns(shape: Shape) -> tuple[tuple[int, ...], int]:
    """The last dimension is the slowest one."""
    return tuple(reversed(row_major(tuple(reversed(shape))))), 0


LAYOUTS: dict[str, Layout] = {
    "contiguous": _contiguous,
    "offset": _offset,
    "wide_rows": _wide_rows,
    "packed": _packed,
    "skewed": _skewed,
    "transposed": _transposed,
    "columns": _columns,
}
ROW_LAYOUTS = tuple(name for name in LAYOUTS if name != "columns")
"""The layouts whose last dimension is contiguous."""


class Maker:
    """Makes the arguments of one call; the same values on every device and in every call.

    Args:
        device: where the tensors go.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._random = torch.Generator().manual_seed(20240607)
        self._bases: list[Tensor] = []
        self._before: list[Tensor] = []

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed values, on the host and in fp32."""
        return torch.randn(shape, generator=self._random) * scale

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        """Return evenly distributed values, on the host and in fp32."""
        return torch.rand(shape, generator=self._random) * (high - low) + low

    def integers(self, *shape: int, high: int) -> Tensor:
        """Return int64 values in [0, high), on the host."""
        return torch.randint(0, high, shape, generator=self._random)

    def place(
        self, values: Tensor, dtype: torch.dtype | None = None, layout: str = "contiguous"
    ) -> Tensor:
        """Return ``values`` on the device, in a guarded storage.

        Args:
            values: on the host.
            dtype: of the result; None for that of the values.
            layout: a name in LAYOUTS.
        """
        strides, first = LAYOUTS[layout](values.shape)
        dtype = dtype or values.dtype
        extent = sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True)) + 1
        size = first + (extent if values.numel() else 0) + 2 * GUARD
        base = torch.full((size,), math.nan if dtype.is_floating_point else 0, dtype=dtype)
        view = base.as_strided(values.shape, strides, GUARD + first)
        view.copy_(values)
        self._before.append(base.clone())
        base = base.to(self.device, copy=True)
        self._bases.append(base)
        return base.as_strided(values.shape, strides, GUARD + first)

    def check_untouched(self, writable: Iterable[Tensor]) -> None:
        """Compare every byte that was made with what it is now.

        Args:
            writable: the tensors whose own elements may have changed.

        Raises:
            ConformanceFailure: another element has changed.
        """
        views = list(writable)
        for base, before in zip(self._bases, self._before, strict=True):
            changed = (_bytes(base.cpu()) != _bytes(before)).any(dim=1)
            own = torch.zeros_like(changed)
            for view in views:
                if same_storage(view, base):
                    own[addresses(view)] = True
            stray = (changed & ~own).nonzero().flatten()
            if len(stray):
                what = "outside the donated tensors" if bool(own.any()) else "of an input"
                raise ConformanceFailure(
                    f"{len(stray)} elements {what} were overwritten, the first at storage "
                    f"element {int(stray[0])} of {len(base)} ({short(base.dtype)})"
                )

    def check_not_aliased(self, result: Tensor, writable: Iterable[Tensor]) -> None:
        """Check that a result lies in memory of its own or of donated arguments.

        Raises:
            ConformanceFailure: it shares memory with what was not donated.
        """
        if not result.numel():
            return
        views = list(writable)
        for base in self._bases:
            if same_storage(result, base):
                used = torch.zeros(len(base), dtype=torch.bool)
                used[addresses(result)] = True
                for view in views:
                    if same_storage(view, base):
                        used[addresses(view)] = False
                if bool(used.any()):
                    raise ConformanceFailure(
                        "a result shares memory with an input that was not donated"
                    )


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same storage."""
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


def addresses(view: Tensor) -> Tensor:
    """Return the storage elements of a view, on the host, flat."""
    if not view.numel():
        return torch.empty(0, dtype=torch.int64)
    index = torch.full(view.shape, view.storage_offset())
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        along = torch.arange(size) * stride
        index += along.view(-1, *[1] * (view.dim() - dim - 1))
    return index.flatten()


def far_rows(values: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """Return ``values`` with 2^31 elements and more from one row (dimension 0) to the next.

    Only the rows' own pages are touched, so that a host needs address space, not memory.

    Raises:
        NotApplicable: the device does not have the memory.
    """
    base = empty((len(values) - 1) * FAR + values[0].numel(), dtype, device)
    view = base.as_strided(values.shape, (FAR, *row_major(values.shape[1:])))
    view.copy_(values)
    return view


def empty(size: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return a flat tensor whose memory has not been touched.

    Raises:
        NotApplicable: the device does not have the memory.
    """
    try:
        return torch.empty(size, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        gigabytes = size * dtype.itemsize / 2**30
        reason = f"{gigabytes:.0f} GiB cannot be had on {device}: {str(error).splitlines()[0]}"
        raise NotApplicable("skipped", reason) from None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8).view(len(tensor), -1)
