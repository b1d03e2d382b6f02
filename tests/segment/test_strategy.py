"""The choice of the form by sizes."""

from __future__ import annotations

import pytest

from detpass.segment.strategy import MODEL, Sizes, Strategy, choose, far_exceeds

BASE = Sizes(
    batch=1,
    rows=100_000,
    segments=10_000,
    features=16,
    element_bytes=4,
    index_bytes=8,
    threads=2,
    scannable=True,
    in_place=False,
)


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, Strategy.SCAN),
        ({"features": 256}, Strategy.SORTED),
        ({"features": 256, "threads": 1}, Strategy.SCAN),
        ({"features": 768, "threads": 1}, Strategy.SORTED),
        ({"scannable": False}, Strategy.SORTED),
        ({"in_place": True}, Strategy.SCAN),
        ({"in_place": True, "segments": 10**9}, Strategy.SPARSE),
        ({"segments": 10**9}, Strategy.SCAN),
        ({"rows": 2**31, "features": 4096}, Strategy.SCAN),
    ],
)
def test_form(changes, form):
    assert choose(BASE._replace(**changes)).form is form


def test_scratch_is_bounded_by_the_operands():
    sizes = BASE._replace(element_bytes=2, segments=10**6)
    operands = 100_000 * (16 * 2 + 8) + 10**6 * 16 * 2
    assert choose(sizes).owner_bytes * sizes.threads <= max(MODEL.scratch_share * operands, 2 * MODEL.least_scratch)


def test_small_calls_take_one_thread():
    assert choose(BASE).threads > 1
    assert choose(BASE._replace(rows=1000, segments=100)).threads == 1
    assert choose(BASE._replace(rows=1000, segments=10**6)).threads > 1, "a large output is work as well"
    assert choose(BASE._replace(rows=1000, segments=10**6, in_place=True)).threads == 1, "its other rows are left alone"
    assert choose(BASE._replace(rows=100, features=256, segments=10)).form is Strategy.SCAN, "alone, rows are scanned"


def test_too_many_rows_for_a_sort():
    with pytest.raises(OverflowError, match="2147483648 rows; a reduction other than a sum takes at most 2147483647"):
        choose(BASE._replace(rows=2**31, scannable=False))


def test_which_tables_are_updated_in_part():
    assert far_exceeds(5000, 2000)
    assert not far_exceeds(5000, 2500)
    assert not far_exceeds(4096, 1)
