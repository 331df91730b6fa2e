"""What a reading costs by the number of heads and of layers, against a forward of the same model.

    python -m tests.benchmarks.reading [--device cuda]

A reading is a captured forward and `measure`, of all that the default rules look at, without the forward itself. Its
memory is that of a GPU, at its peak and beyond that of a forward.
"""

from __future__ import annotations

import torch

from hdi_callback import HeadDiversityMonitor
from tests.benchmarks.gpt import GPT, VOCABULARY
from tests.benchmarks.timing import arguments, ratios, table

SIZES = {  # layers, width, heads, tokens
    "1 layer, 12 heads of 64": (1, 768, 12, 128),
    "1 layer, 64 heads of 64": (1, 4096, 64, 128),
    "1 layer, 512 heads of 8": (1, 4096, 512, 128),
    "12 layers, 12 heads of 64": (12, 768, 12, 128),
    "48 layers, 12 heads of 64": (48, 768, 12, 128),
}


class Readings:
    """Forwards of one model, with a reading or without."""

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        self.model, self.device = GPT(*SIZES[name]).to(device), device
        self.tokens = torch.randint(VOCABULARY, (1, SIZES[name][-1]), device=device)
        self.monitor, self.step = HeadDiversityMonitor(self.model), 0

    @torch.no_grad()
    def forward(self) -> None:
        self.monitor.disarm()
        self.model(self.tokens)

    @torch.no_grad()
    def read(self) -> None:
        self.step += 1
        self.monitor.arm(training_only=False)
        self.model(self.tokens)
        self.monitor.measure(self.step).record()

    def memory(self) -> str:
        """MiB that a reading takes at its peak."""
        if self.device == "cpu":
            return "not measured"
        peaks = []
        for work in (self.forward, self.read):
            torch.cuda.reset_peak_memory_stats()
            work()
            peaks.append(torch.cuda.max_memory_allocated())
        return f"{(peaks[1] - peaks[0]) / 2**20:.0f}"


def main() -> None:
    options = arguments(__doc__, rounds=5).parse_args()
    rows: list[tuple[object, ...]] = [("model", "over a forward", "a reading, ms", "its memory, MiB")]
    for name in SIZES:
        readings = Readings(name, options.device)
        readings.read()
        (cost,) = ratios(readings.forward, readings.read, rounds=options.rounds, device=options.device)
        rows.append((name, cost, f"{1e3 * cost.added:.3g}", readings.memory()))
        del readings
    table(*rows)


if __name__ == "__main__":
    main()
