import numpy as np
import pytest

from jaxserve.cache.req_to_token import ReqToTokenPool


def as_table(pool: ReqToTokenPool, device: np.ndarray) -> np.ndarray:
    updates = pool.drain_updates()
    device[updates.groups, updates.rows, updates.index] = updates.pages
    return device


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def append(pool: ReqToTokenPool, row: int, pages: np.ndarray) -> None:
    pool.tables[0].write(row, pool.extend(row, len(pages)), pages)


def append_one_each(pool: ReqToTokenPool, rows: np.ndarray, pages: np.ndarray) -> None:
    pool.tables[0].write_one_each(rows, pool.extend_by_one(rows), pages)


def test_writes_reach_the_device_table() -> None:
    pool = ReqToTokenPool(3, 4)
    device = np.full((1, 3, 4), -1, np.int32)
    append(pool, 1, int32(7, 8))
    append_one_each(pool, int32(2, 1), int32(5, 6))
    assert as_table(pool, device)[0].tolist() == [[-1] * 4, [7, 8, 6, -1], [5, -1, -1, -1]]
    pool.tables[0].write(1, 1, int32(9))
    assert as_table(pool, device)[0, 1].tolist() == [7, 9, 6, -1]
    assert pool.num_pages.tolist() == [0, 3, 1]


def test_each_group_has_a_table() -> None:
    pool = ReqToTokenPool(2, 4, num_groups=3)
    device = np.full((3, 2, 4), -1, np.int32)
    start = pool.extend(1, 2)
    pool.tables[0].write(1, start, int32(1, 2))
    pool.tables[2].write(1, start + 1, int32(3))
    assert as_table(pool, device)[:, 1].tolist() == [[1, 2, -1, -1], [-1] * 4, [-1, 3, -1, -1]]
    pool.tables[1].write(0, 0, int32(4))
    assert as_table(pool, device)[1].tolist() == [[4, -1, -1, -1], [-1] * 4]


def test_an_entry_written_twice_has_one_value() -> None:
    pool = ReqToTokenPool(1, 4)
    append(pool, 0, int32(1, 2))
    pool.tables[0].write(0, 0, int32(3))
    updates = pool.drain_updates()
    assert list(zip(updates.index.tolist(), updates.pages.tolist(), strict=True)) == [(0, 3), (1, 2), (0, 3)]


def test_draining_twice_gives_nothing_new() -> None:
    pool = ReqToTokenPool(1, 4)
    append(pool, 0, int32(1))
    assert len(pool.drain_updates().rows) == 1
    updates = pool.drain_updates()
    assert (len(updates.rows), len(updates.index), len(updates.pages)) == (0, 0, 0)
    assert updates.rows.dtype == updates.index.dtype == updates.pages.dtype == np.int32


def test_drained_arrays_are_int32_and_never_written_again() -> None:
    pool = ReqToTokenPool(2, 4)
    rows = np.array([0, 1])
    append_one_each(pool, rows, int32(3, 4))
    updates = pool.drain_updates()
    assert updates.rows.dtype == updates.index.dtype == updates.pages.dtype == np.int32
    rows[:] = 9
    pool.tables[0].write(0, 0, int32(5))
    append_one_each(pool, np.array([0, 1]), int32(6, 7))
    assert [updates.rows.tolist(), updates.index.tolist(), updates.pages.tolist()] == [[0, 1], [0, 0], [3, 4]]


def test_rows_are_taken_and_returned() -> None:
    pool = ReqToTokenPool(2, 4)
    assert [pool.take_row(), pool.take_row(), pool.free_rows] == [0, 1, 0]
    append(pool, 0, int32(1))
    pool.return_row(0)
    assert pool.busy_rows() == [1]
    assert pool.num_pages[0] == 0
    pool.reset_rows()
    assert pool.free_rows == 2


def test_a_row_does_not_outgrow_the_table() -> None:
    pool = ReqToTokenPool(2, 2)
    with pytest.raises(AssertionError, match="row 0 would hold 3 pages, more than 2"):
        append(pool, 0, int32(1, 2, 3))
    append(pool, 1, int32(1, 2))
    with pytest.raises(AssertionError, match="row 1 would hold 3 pages, more than 2"):
        append_one_each(pool, int32(0, 1), int32(3, 4))
