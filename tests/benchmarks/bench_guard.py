"""What guarding the functions that training calls costs: calls of them in a step, and what a guarded call adds.

python -m tests.benchmarks.bench_guard
"""

from __future__ import annotations

import sys
import time
import timeit
import warnings
from types import FrameType
from typing import Any

import torch

from hdi_callback import watch_heads
from hdi_callback.guard import guarded
from tests.benchmarks.bench_unarmed import Decoder

CALLS = 200_000
LAYERS, WIDTH, TOKENS = 12, 256, 512


class _Nothing:
    @guarded("nothing")
    def guarded(self) -> None:
        pass

    def plain(self) -> None:
        pass


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    one = _Nothing()
    added = (timeit.timeit(one.guarded, number=CALLS) - timeit.timeit(one.plain, number=CALLS)) / CALLS
    code, calls = _Nothing.guarded.__code__, [0]

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls[0] += event == "call" and frame.f_code is code

    counts: list[int] = []
    model, x = Decoder(LAYERS, WIDTH, 4), torch.randn(1, TOKENS, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with watch_heads(model, optimizer, every_n_steps=2, history=False, verbose=False) as heads:
        for step in range(8):
            calls[0], start = 0, time.process_time()
            sys.setprofile(count if step in (4, 5) else None)
            with heads.step():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            sys.setprofile(None)
            seconds = time.process_time() - start
            if step in (4, 5):
                counts.append(calls[0])
            if step in (6, 7):  # timed without counting
                counted = counts[step % 2]
                kind, share = ("an unarmed" if step % 2 else "an armed"), counted * added / seconds
                print(f"{kind} step: {counted} calls of {added * 1e9:.0f} ns, {100 * share:.4f} % of {seconds:.2f} s")


if __name__ == "__main__":
    main()
