"""Run in a process of its own: compile two programs under a given cache and print what happened as JSON."""

from __future__ import annotations

import json
import sys

import torch
from torch._dynamo.utils import counters

from detpass.backend import detpass, reports
from detpass.reproducibility import digest


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 8)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.table(i).sin()


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Model()
    i = torch.randint(0, 64, (20_000,), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, backend=detpass)
    digests = set()
    for _ in range(3):
        model.zero_grad()
        out = compiled(i)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
        digests.add(str(digest([out, model.table.weight.grad])))
    aot = counters["aot_autograd"]
    print(
        json.dumps(
            {
                "digests": sorted(digests),
                "hits": aot["autograd_cache_hit"],
                "misses": aot["autograd_cache_miss"],
                "bypasses": aot["autograd_cache_bypass"],
                "records": [str(record) for report in reports() for record in report],
                "from_cache": [report.from_cache for report in reports()],
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
