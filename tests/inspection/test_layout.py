"""Boxes do not overlap, edges go down, and few of them cross."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detpass.inspection.layout import HEIGHT, Drawing, crossings, place, shortened
from detpass.inspection.pictures import Picture, PictureNode


def picture(count: int, edges: list[tuple[int, int]]) -> Picture:
    nodes = tuple(PictureNode(f"operator_{i}", f"f32[{i}, 4]", "context") for i in range(count))
    return Picture(nodes, tuple(dict.fromkeys(edges)))


def check(drawing: Drawing, shown: Picture) -> None:
    for a, b in itertools.combinations(drawing.boxes, 2):
        apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y
        assert apart, (a, b)
    for box in drawing.boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + box.width <= drawing.width
        assert box.y + box.height <= drawing.height
    for (source, reader), points in zip(shown.edges, drawing.paths, strict=True):
        above, below = drawing.boxes[source], drawing.boxes[reader]
        assert points[0] == pytest.approx((above.x + above.width / 2, above.y + HEIGHT))
        assert points[-1] == pytest.approx((below.x + below.width / 2, below.y))
        assert all(b[1] >= a[1] for a, b in itertools.pairwise(points))


@st.composite
def pictures(draw: st.DrawFn) -> Picture:
    count = draw(st.integers(1, 24))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=40)) if pairs else []
    return picture(count, edges)


@settings(max_examples=60, deadline=None)
@given(pictures())
def test_any_picture_is_laid_out_without_overlap(shown: Picture) -> None:
    drawing = place(shown)
    check(drawing, shown)
    assert place(shown) == drawing


def test_a_ladder_is_drawn_without_crossings() -> None:
    edges = [(0, 2), (1, 3), (2, 4), (3, 5)]
    rows = [[0, 1], [3, 2], [4, 5]]
    assert crossings(rows, edges) == 2
    drawing = place(picture(6, edges))
    left, right = drawing.boxes[0], drawing.boxes[1]
    same_side = (left.x < right.x) == (drawing.boxes[4].x < drawing.boxes[5].x)
    assert same_side


def test_a_late_input_stands_above_its_reader() -> None:
    drawing = place(picture(5, [(0, 2), (2, 3), (3, 4), (1, 4)]))
    assert drawing.boxes[1].y == drawing.boxes[3].y


@pytest.mark.parametrize(("text", "limit"), [("short", 30), ("a" * 31, 30), ("abcdefgh", 5)])
def test_labels_are_shortened_in_the_middle(text: str, limit: int) -> None:
    found = shortened(text, limit)
    assert len(found) == min(limit, len(text))
    assert found[0] == text[0]
    assert found[-1] == text[-1]


def test_nothing_is_drawn_for_nothing() -> None:
    assert place(Picture((), ())).boxes == ()
