"""What happens once, in the first forward: it is written down, heads are found in it, and attention is checked.

python -m tests.studies.benchmarks.start [--device cuda] [--sizes ...]
"""

from __future__ import annotations

import torch

from hdi_callback import HeadDiversityMonitor
from tests.studies.benchmarks.gpt import GPT, VOCABULARY
from tests.studies.benchmarks.timing import arguments, ratios, table

SIZES = {  # layers, width, heads, tokens; sequences
    "12 layers, 768 wide, 512 tokens": ((12, 768, 12, 512), 1),
    "12 layers, 768 wide, 2,048 tokens": ((12, 768, 12, 2048), 1),
    "12 layers, 128 wide, 2,048 tokens": ((12, 128, 4, 2048), 1),
    "12 layers, 128 wide, 16 x 2,048 tokens": ((12, 128, 4, 2048), 16),
    "24 layers, 256 wide, 512 tokens": ((24, 256, 8, 512), 1),
    "48 layers, 256 wide, 512 tokens": ((48, 256, 8, 512), 1),
    "12 layers, 24 wide, 4 tokens": ((12, 24, 12, 4), 1),
    "48 layers, 24 wide, 4 tokens": ((48, 24, 12, 4), 1),
}


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    options = parser.parse_args()
    rows: list[tuple[object, ...]] = [("model", "over a training step", "in all, ms")]
    for name in options.sizes:
        sizes, batch = SIZES[name]
        torch.manual_seed(0)
        model = GPT(*sizes).to(options.device)
        tokens = torch.randint(VOCABULARY, (batch, sizes[-1]), device=options.device)

        def step(model: GPT = model, tokens: torch.Tensor = tokens) -> None:
            model(tokens).backward()

        def find(model: GPT = model, tokens: torch.Tensor = tokens) -> None:
            with HeadDiversityMonitor(model) as monitor:
                model(tokens)
            assert len(monitor.layers) == len(model.blocks)

        (cost,) = ratios(step, find, rounds=options.rounds, device=options.device)
        rows.append((name, cost, f"{1e3 * cost.seconds:.3g}"))
    table(*rows)


if __name__ == "__main__":
    main()
