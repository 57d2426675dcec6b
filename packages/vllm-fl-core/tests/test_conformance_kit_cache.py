"""The kit's cases of the cache write: right implementations pass, planted faults are found."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_fl_reference")

from kit_runs import found, implementation, is_right, run  # noqa: E402

from vllm_fl_reference.ops.cache import reshape_and_cache_flash  # noqa: E402

OP = "reshape_and_cache_flash"


def ended(fn: Any, pattern: str = "*") -> dict[str, str]:
    return run(implementation(OP, fn, traceable=False), pattern)


def padding_goes_to_the_last_slot(key, value, key_cache, value_cache, slot_mapping):
    slots = slot_mapping % (key_cache.shape[0] * key_cache.shape[1])
    reshape_and_cache_flash(key, value, key_cache, value_cache, slots)


def padding_goes_to_slot_0(key, value, key_cache, value_cache, slot_mapping):
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping.clamp(min=0))


def stops_at_padding(key, value, key_cache, value_cache, slot_mapping):
    end = int(torch.cat(((slot_mapping < 0).int(), torch.ones(1).int())).argmax())
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping[:end])


def writes_every_row(key, value, key_cache, value_cache, slot_mapping):
    more = torch.zeros(len(key) - len(slot_mapping), dtype=torch.int64)
    slots = torch.cat((slot_mapping, more))
    reshape_and_cache_flash(key, value, key_cache, value_cache, slots)


def swapped(key, value, key_cache, value_cache, slot_mapping):
    same = key.shape == value.shape
    caches = (value_cache, key_cache) if same else (key_cache, value_cache)
    reshape_and_cache_flash(key, value, *caches, slot_mapping)


def value_forgotten(key, value, key_cache, value_cache, slot_mapping):
    reshape_and_cache_flash(key, value, key_cache, value_cache.clone(), slot_mapping)


def copies_written(key, value, key_cache, value_cache, slot_mapping):
    reshape_and_cache_flash(key, value, key_cache.clone(), value_cache.clone(), slot_mapping)


def heads_inside_positions(key, value, key_cache, value_cache, slot_mapping):
    """What looks at the stride of positions alone."""
    for cache, new in ((key_cache, key), (value_cache, value)):
        strides = (*cache.stride()[:2], new.shape[2], 1)
        flat = cache.as_strided(cache.shape, strides)
        reshape_and_cache_flash(new, new, flat, flat, slot_mapping)


def blocks_behind_each_other(key, value, key_cache, value_cache, slot_mapping):
    """What takes block_size * the stride of positions for the stride of blocks."""
    for cache, new in ((key_cache, key), (value_cache, value)):
        strides = (cache.shape[1] * cache.stride(1), *cache.stride()[1:])
        if strides[0] * (len(cache) - 1) > cache.stride(0) * (len(cache) - 1):
            strides = cache.stride()
        flat = cache.as_strided(cache.shape, strides)
        reshape_and_cache_flash(new, new, flat, flat, slot_mapping)


def contiguous_source(key, value, key_cache, value_cache, slot_mapping):
    parts = []
    for new in (key, value):
        strides = torch.empty(new.shape, device="meta").stride()
        parts.append(new.as_strided(new.shape, strides))
    reshape_and_cache_flash(*parts, key_cache, value_cache, slot_mapping)


def size_of_the_key(key, value, key_cache, value_cache, slot_mapping):
    size = key.shape[2]
    reshape_and_cache_flash(
        key, value[..., :size], key_cache, value_cache[..., :size], slot_mapping
    )


def blocks_of_16(key, value, key_cache, value_cache, slot_mapping):
    size = key_cache.shape[1]
    slots = torch.where(slot_mapping < 0, -1, slot_mapping // size * size + slot_mapping % 16)
    reshape_and_cache_flash(key, value, key_cache, value_cache, slots)


def one_byte_more(key, value, key_cache, value_cache, slot_mapping):
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping)
    key_cache[3, 5, 0, 7] += 1


def clears_the_blocks(key, value, key_cache, value_cache, slot_mapping):
    blocks = slot_mapping[slot_mapping >= 0] // key_cache.shape[1]
    key_cache[blocks] = 0
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping)


def rounds_to_bf16(key, value, key_cache, value_cache, slot_mapping):
    key = key.bfloat16().to(key.dtype)
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping)


def key_overwritten(key, value, key_cache, value_cache, slot_mapping):
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping)
    key.zero_()


def slots_overwritten(key, value, key_cache, value_cache, slot_mapping):
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping)
    slot_mapping.clamp_(min=0)


def returns_the_cache(key, value, key_cache, value_cache, slot_mapping):
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping)
    return key_cache


def beyond_the_cache(key, value, key_cache, value_cache, slot_mapping):
    """Writes an element between two rows that belong to neither."""
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping)
    last = sum((n - 1) * s for n, s in zip(value_cache.shape, value_cache.stride(), strict=True))
    value_cache.as_strided((1,), (1,), value_cache.storage_offset() + last + 1).fill_(1)


@pytest.mark.parametrize(
    "fault",
    [
        padding_goes_to_the_last_slot, padding_goes_to_slot_0, stops_at_padding, writes_every_row,
        swapped, value_forgotten, copies_written, heads_inside_positions, blocks_behind_each_other,
        contiguous_source, size_of_the_key, blocks_of_16, one_byte_more, clears_the_blocks,
        rounds_to_bf16, returns_the_cache,
    ],
)  # fmt: skip
def test_a_wrong_value_is_found(fault: Any) -> None:
    assert found(ended(fault, "*/values/*"))


@pytest.mark.parametrize("fault", [key_overwritten, slots_overwritten, beyond_the_cache])
def test_a_stray_write_is_found(fault: Any) -> None:
    (*_, last) = ended(fault, "*/contract/*").values()
    assert "were overwritten" in last


def one_after_the_other(key, value, key_cache, value_cache, slot_mapping):
    size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // size, slot % size] = key[token]
            value_cache[slot // size, slot % size] = value[token]


def test_another_way_to_be_right_passes() -> None:
    assert is_right(ended(one_after_the_other))
