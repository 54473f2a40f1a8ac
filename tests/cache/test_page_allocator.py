import numpy as np
import pytest

from jaxserve.cache.page_allocator import PageAllocator, PageOwner


def test_pages_come_out_once_and_in_order_at_first() -> None:
    allocator = PageAllocator(5)
    assert allocator.alloc(3).tolist() == [0, 1, 2]
    assert allocator.alloc(2).tolist() == [3, 4]
    assert allocator.num_free == 0
    assert allocator.alloc(0).tolist() == []


def test_freed_pages_are_handed_out_again() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(4)
    allocator.free(pages[1:3], PageOwner.LEASED)
    assert sorted(allocator.alloc(2).tolist()) == [1, 2]


def test_handed_out_pages_are_a_copy() -> None:
    allocator = PageAllocator(2)
    pages = allocator.alloc(2)
    kept = pages.copy()
    allocator.free(pages, PageOwner.LEASED)
    allocator.alloc(1)
    assert pages.tolist() == kept.tolist()


def test_double_free_names_the_pages() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(3)
    allocator.free(pages[:1], PageOwner.LEASED)
    with pytest.raises(AssertionError, match=r"pages \[0\] move from LEASED to FREE but belong to \[0\]"):
        allocator.free(pages[:2], PageOwner.LEASED)
    with pytest.raises(AssertionError, match="5 pages freed with 2 of 4"):
        allocator.free(np.arange(5, dtype=np.int32), PageOwner.LEASED)


def test_a_cached_page_is_not_freed_as_a_leased_one() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(2)
    allocator.give_to_tree(pages)
    with pytest.raises(AssertionError, match="belong to"):
        allocator.free(pages, PageOwner.LEASED)
    allocator.free(pages, PageOwner.TREE)
    assert allocator.num_free == 4


def test_too_many_pages_asked() -> None:
    with pytest.raises(AssertionError, match="3 pages asked of 2 free ones"):
        PageAllocator(2).alloc(3)


def test_rebuild_takes_the_tree_as_the_truth() -> None:
    allocator = PageAllocator(6)
    allocator.alloc(5)
    allocator.rebuild(np.array([4, 1], np.int32))
    assert allocator.num_free == 4
    assert allocator.alloc(4).tolist() == [0, 2, 3, 5]
    allocator.free(np.array([1, 4], np.int32), PageOwner.TREE)
