"""A picture shows a node with what it read and who read it, and never grows beyond its bound."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from detpass.inspection.pictures import MAX_CORE, MAX_NODES, REACH, Snapshot, replacements
from detpass.rewriting.graph_pass import REPLACES

aten = torch.ops.aten


def chain(length: int, fan: int = 0) -> fx.Graph:
    """``x -> sin -> sin ...`` with ``fan`` further readers of the middle node."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    nodes = [node]
    for _ in range(length):
        nodes.append(graph.call_function(aten.sin.default, (nodes[-1],)))
    readers = [graph.call_function(aten.cos.default, (nodes[length // 2],)) for _ in range(fan)]
    graph.output((nodes[-1], *readers))
    for made in graph.nodes:
        made.meta["val"] = torch.empty(3, 4, device="meta")
    return graph


def operators(length: int) -> list[str]:
    """The names of the operators of ``chain(length)``, in order."""
    return [node.name for node in chain(length).nodes if node.target is aten.sin.default]


def test_a_node_is_shown_with_two_steps_up_and_one_down() -> None:
    picture = Snapshot.of(chain(9), "cpu").around([operators(9)[4]], "subject")
    assert [(node.label, node.kind) for node in picture.nodes] == [
        ("sin", "context"), ("sin", "context"), ("sin", "subject"), ("sin", "context"),
    ]  # fmt: skip
    assert picture.edges == ((0, 1), (1, 2), (2, 3))
    assert picture.nodes[2].detail == "f32[3, 4]"
    assert REACH == 2


def test_inputs_are_told_from_operators() -> None:
    picture = Snapshot.of(chain(3), "cpu").around([operators(3)[0]], "subject")
    assert [node.kind for node in picture.nodes] == ["input", "subject", "context"]


@pytest.mark.parametrize("fan", [0, 5, 100])
def test_pictures_are_bounded(fan: int) -> None:
    picture = Snapshot.of(chain(40, fan), "cpu").around([operators(40)[20]], "subject")
    assert len(picture.nodes) <= MAX_NODES
    assert all(a < b for a, b in picture.edges)


def test_of_many_inserted_nodes_the_last_are_shown_and_the_rest_counted() -> None:
    graph = chain(40)
    for node in list(graph.nodes)[5:35]:
        node.meta[REPLACES] = "gone"
    snapshot = Snapshot.of(graph, "cpu")
    inserted = replacements(snapshot)["gone"]
    assert len(inserted) == 30
    picture = snapshot.around(inserted, "inserted")
    shown = sum(node.kind == "inserted" for node in picture.nodes)
    assert MAX_CORE <= shown <= MAX_CORE + REACH
    assert picture.nodes[0].label == f"{30 - shown} more"
    assert picture.nodes[0].kind == "elided"
    assert picture.nodes[-1].kind == "context"
    assert len(picture.nodes) <= MAX_NODES + 1
    assert all(a < b for a, b in picture.edges)


def test_inserted_nodes_that_nobody_reads_are_left_out() -> None:
    graph = chain(2)
    with graph.inserting_after(list(graph.nodes)[1]):
        dead = graph.call_function(aten.sin.default, (list(graph.nodes)[1],))
    dead.meta = {"val": torch.empty(3, device="meta"), REPLACES: "gone"}
    assert replacements(Snapshot.of(graph, "cpu")) == {}
