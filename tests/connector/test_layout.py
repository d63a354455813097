"""Layouts of every kind become groups of regions, and regions their places in a slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.connector_rig import namespace_for, pages_cache

from s3kv.connector.layout import from_layout, from_tensor, places
from s3kv.connector.strips import Strip, numbers
from s3kv.errors import ConfigError
from s3kv.identity import NamespaceSpec


def region(memory: torch.Tensor, offset: int, size: int, buffers: tuple[Any, ...], **fields: Any) -> SimpleNamespace:
    """Bytes `[offset, offset + size)` of every row of `memory`."""
    rows, stride = memory.shape
    described = {"base": memory.data_ptr() + offset, "size": size, "stride": stride, "num_slots": rows}
    return SimpleNamespace(**{**described, "buffers": buffers, **fields})


def group(number: int, *regions: Any, replicated: Any = "absent", window: int | None = None) -> SimpleNamespace:
    fields = {} if replicated == "absent" else {"replicated_regions": replicated}
    return SimpleNamespace(layer_group_id=number, layer_ids=(number,), window_size=window, regions=regions, **fields)


def layout(*groups: Any) -> SimpleNamespace:
    return SimpleNamespace(tokens_per_block=16, groups=groups)


KEY_VALUE = ((0, "key", 1), (0, "value", 1))


def test_v1_tensor_of_any_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        tensor = torch.zeros(5, 3, 2, 64, dtype=dtype)
        cache = from_tensor(tensor, 32)
        (only,) = cache.groups[0].regions
        assert (only.strip.rows, only.size) == (5, 3 * 2 * 64 * tensor.element_size())
        assert cache.dtype == str(dtype).removeprefix("torch.")
        assert only.buffers[:3] == ((0, "key", 1), (0, "value", 1), (1, "key", 1))
        assert (cache.sharded, cache.groups[0].layers) == (True, (0, 1, 2))


def test_v1_view_of_a_larger_pool_keeps_its_stride() -> None:
    pool = torch.arange(5 * 256, dtype=torch.uint8).view(5, 256)
    view = pool.as_strided((5, 2, 2, 32), (256, 64, 32, 1))
    (only,) = from_tensor(view).groups[0].regions
    assert (only.size, only.strip.stride) == (128, 256)
    assert torch.equal(only.strip.view[3], pool[3, :128])


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4), torch.zeros(4, 2, 3, 8).transpose(1, 2)])
def test_v1_tensor_of_another_shape_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        from_tensor(tensor)


def test_regions_known_by_address_alone_are_read_in_place() -> None:
    memory = torch.arange(6 * 96, dtype=torch.int64).to(torch.uint8).view(6, 96)
    cache = from_layout(layout(group(0, region(memory, 0, 32, KEY_VALUE), region(memory, 64, 16, ((0, "key_scale"),)))))
    first, second = cache.groups[0].regions
    assert torch.equal(first.strip.view, memory[:, :32])
    assert torch.equal(second.strip.view[5], memory[5, 64:80])
    assert second.strip.addresses(numbers([2])).tolist() == [memory.data_ptr() + 64 + 2 * 96]


def test_buffers_may_be_objects_or_tuples() -> None:
    memory = torch.zeros(2, 32, dtype=torch.uint8)
    named = (SimpleNamespace(layer_id=0, role="key", expansion=2), SimpleNamespace(layer_id=0, role="value"))
    cache = from_layout(layout(group(0, region(memory, 0, 32, named))))
    assert cache.groups[0].regions[0].buffers == ((0, "key", 2), (0, "value", 1))


@pytest.mark.parametrize("replicated", ["absent", (), None])
def test_replicated_regions_may_be_missing_or_empty(replicated: Any) -> None:
    memory = torch.zeros(2, 32, dtype=torch.uint8)
    cache = from_layout(layout(group(0, region(memory, 0, 32, KEY_VALUE), replicated=replicated)))
    assert [each.replicated for each in cache.groups[0].regions] == [False]


def test_replicated_regions_go_to_a_part_of_their_own() -> None:
    memory = torch.zeros(2, 96, dtype=torch.uint8)
    shared = (region(memory, 64, 32, ((0, "index_key", 1),)),)
    cache = from_layout(layout(group(0, region(memory, 0, 64, KEY_VALUE), replicated=shared)))
    namespace = NamespaceSpec("m", "w", "bfloat16", 16, cache.specs(), shards=2)
    assert [part.shard for part in namespace.parts] == [0, 1, 255]
    found = [(each.part, each.offset, each.region.size) for each in places(cache, namespace, (1, 255))]
    assert found == [(1, 0, 64), (255, 0, 32)]


def test_regions_lie_one_after_the_other_and_groups_apart() -> None:
    first, second = torch.zeros(2, 96, dtype=torch.uint8), torch.zeros(2, 32, dtype=torch.uint8)
    cache = from_layout(
        layout(
            group(0, region(first, 0, 64, KEY_VALUE), region(first, 64, 32, ((0, "key_scale"),))),
            group(1, region(second, 0, 32, ((1, "key"), (1, "value"))), window=64),
        )
    )
    found = [(each.group, each.offset, each.region.size) for each in places(cache, namespace_for(cache, 16), (0,))]
    assert found == [(0, 0, 64), (0, 64, 32), (1, 256, 32)]


def test_case_18_key_only_layers_are_alike_on_every_rank() -> None:
    memory = torch.zeros(2, 64, dtype=torch.uint8)
    cache = from_layout(layout(group(0, region(memory, 0, 64, ((0, "key"), (1, "key"))))))
    assert not cache.sharded
    mixed = from_layout(layout(group(0, region(memory, 0, 64, ((0, "key"), (1, "key"), (1, "value"))))))
    assert mixed.sharded


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda r: setattr(r, "stride", 16), "overlap"),
        (lambda r: setattr(r, "as_tensor", lambda: torch.zeros(2, 32, dtype=torch.uint8)), "own tensor"),
        (lambda r: delattr(r, "base"), "cannot be read"),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(broken: Any, words: str) -> None:
    described = region(torch.zeros(2, 32, dtype=torch.uint8), 0, 32, KEY_VALUE)
    broken(described)
    with pytest.raises(ConfigError, match=words):
        from_layout(layout(group(0, described)))


def test_groups_must_be_numbered_from_zero() -> None:
    memory = torch.zeros(2, 32, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="numbered"):
        from_layout(layout(group(1, region(memory, 0, 32, KEY_VALUE))))


@pytest.mark.parametrize("rows", [[-1], [0, 8], [3, -2]])
def test_rows_out_of_bounds_have_no_address(rows: list[int]) -> None:
    cache, _ = pages_cache(pages=8)
    with pytest.raises(IndexError):
        cache.groups[0].regions[0].strip.addresses(numbers(rows))


def test_words_are_as_wide_as_alignment_allows() -> None:
    memory = torch.zeros(4, 96, dtype=torch.uint8)
    assert memory.data_ptr() % 16 == 0
    widths = [
        Strip.of(memory.narrow(1, offset, size)).alignment() for offset, size in ((0, 96), (8, 16), (4, 12), (1, 3))
    ]
    assert widths == [16, 8, 4, 1]
    assert Strip.of(memory.narrow(1, 16, 32)).words(16).shape == (4, 2)
    assert numbers([]).dtype == np.int64
