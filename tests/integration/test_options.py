"""Options, modes and entry point, as a user gives them to torch.compile."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from detpass.backend import detpass, last_report
from detpass.errors import ConfigurationError


def f(w: Tensor, i: Tensor) -> Tensor:
    return w[i].sin()


def run(**options: Any) -> None:
    torch.compile(f, backend=detpass, options=options)(torch.randn(8, 4, requires_grad=True), torch.tensor([1, 1, 2]))


def test_the_backend_is_found_by_name_without_an_import() -> None:
    program = (
        "import sys, torch; assert 'detpass' in torch.compiler.list_backends(); assert 'detpass' not in sys.modules\n"
        "w = torch.ones(4, 2, requires_grad=True); i = torch.tensor([0, 0, 3])\n"
        "torch.compile(lambda w: w[i] * 2, backend='detpass', fullgraph=True, dynamic=False)(w).sum().backward()\n"
        "print(w.grad.tolist())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd="/")
    assert result.stdout.strip() == "[[4.0, 4.0], [0.0, 0.0], [0.0, 0.0], [2.0, 2.0]]", result.stderr


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'on_uncoverd'.*Did you mean 'on_uncovered'.*on_escape.*max_autotune"
    ):
        run(on_uncoverd="warn")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_uncovered": "maybe"}, "on_uncovered='maybe': expected one of 'error', 'warn', 'ignore'"),
        ({"on_escape": True}, "on_escape=True: expected one of"),
        ({"target": "tpu"}, "target='tpu': expected 'cpu', 'cuda' or None"),
        ({"report": 3}, "report=3: expected a function"),
        ({"max_autotune": "yes"}, "max_autotune='yes': got str, expected bool"),
    ],
)
def test_a_wrong_value_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(**options)


def test_an_unknown_mode_is_refused_as_by_torch() -> None:
    with pytest.raises(Exception, match="Unrecognized mode=fastest"):
        torch.compile(f, backend=detpass, mode="fastest")(torch.randn(8, 4), torch.tensor([1]))


def test_inductor_options_reach_inductor() -> None:
    seen: list[Any] = []

    def users_pass(graph: torch.fx.Graph) -> None:
        seen.append([str(n.target) for n in graph.nodes if n.op == "call_function"])

    run(joint_custom_post_pass=users_pass, **{"epilogue-fusion": False})
    assert any("index_put" in target for target in seen[0]), "the user's pass runs first, on the graph as it was"
    report = last_report()
    assert report is not None
    assert report.counts() == {"segment": 1}


def test_what_a_users_pass_inserts_is_rewritten() -> None:
    def users_pass(graph: torch.fx.Graph) -> None:
        """Accumulate once more into the gradient."""
        for node in graph.nodes:
            if node.target is torch.ops.aten.index_put.default:
                with graph.inserting_after(node):
                    again = graph.call_function(node.target, (node, *node.args[1:]))
                    again.meta = dict(node.meta)
                node.replace_all_uses_with(again, lambda user, new=again: user is not new)
                break

    run(joint_custom_post_pass=users_pass)
    report = last_report()
    assert report is not None
    assert report.counts() == {"segment": 2}


def test_the_report_callback() -> None:
    reports: list[Any] = []
    run(report=reports.append)
    assert reports == [last_report()]


def test_inductor_settings_are_as_before() -> None:
    import torch._inductor.config as config

    before = config.get_config_copy()
    run()
    after = config.get_config_copy()
    assert {k for k in before if before[k] != after[k]} == set()


def test_reset_is_supported() -> None:
    run()
    torch._dynamo.reset()
    run()
