"""What a reading costs by the number of heads and of layers, against a forward of the same model.

    python -m tests.studies.benchmarks.reading [--device cuda] [--only-host]

A reading is a captured forward and `measure`, of all that the default rules look at, without the forward itself. Its
memory is that of a GPU, at its peak and beyond that of a forward.

Then the host's own work, where arithmetic vanishes: 12 heads of width 2 and 4 tokens, watched as by default. Operations
are those that a GPU would launch, and time is that of the training's thread and of the clock, of a step with a reading
and the next one beyond two steps that nobody watches. What measuring calls of torch is called once more by itself, in
steps that nobody watches: with these calls no Python can make a reading cheaper than that.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hdi_callback import HeadDiversityMonitor, watch_heads
from tests.studies.benchmarks.gpt import GPT, VOCABULARY, Training
from tests.studies.benchmarks.timing import arguments, ratios, table

SIZES = {  # layers, width, heads, tokens
    "1 layer, 12 heads of 64": (1, 768, 12, 128),
    "1 layer, 64 heads of 64": (1, 4096, 64, 128),
    "1 layer, 512 heads of 8": (1, 4096, 512, 128),
    "12 layers, 12 heads of 64": (12, 768, 12, 128),
    "48 layers, 12 heads of 64": (48, 768, 12, 128),
}
VANISHING = {"12 layers": (12, 24, 12, 4), "48 layers": (48, 24, 12, 4)}


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


class Host:
    """Steps of a model that is watched at every second of them, and of one that is not."""

    def __init__(self, name: str, folder: str) -> None:
        self.alone, self.watched = (Training(VANISHING[name], 1, "cpu", None) for _ in range(2))
        self.watched.heads = watch_heads(
            self.watched.model, self.watched.optimizer, every_n_steps=2, log_dir=Path(folder), tensorboard=True
        )

    def cost(self, clock: Callable[[], float], rounds: int) -> str:
        """Time of a reading over that of a bare step: median, lowest, highest of paired rounds."""
        ratios = []
        for _ in range(rounds):
            times = []
            for training in (self.watched, self.alone):
                for _ in range(2):
                    start = clock()
                    training.step()
                    times.append(clock() - start)
            with_reading, without, *bare = times
            ratios.append((with_reading + without - sum(bare)) / (sum(bare) / 2))
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    def floor(self, rounds: int) -> str:
        """Time of what one reading calls of torch after its forward, over that of a bare step: as `cost`."""
        monitor, calls = self.watched.heads._session.monitor, Calls()
        measure = monitor.measure

        def written_down(step: int) -> Any:
            calls.listed.clear()
            with calls:
                return measure(step)

        with ExitStack() as patches:
            for name in ("monitor.monitor", "attention.capture.capture"):  # which take modes off
                patches.enter_context(patch(f"hdi_callback.{name}.without_modes", torch.no_grad))
            patches.enter_context(patch.object(monitor, "measure", written_down))
            while not calls.listed or monitor.contract.is_comparing:
                self.watched.step()
        ratios = []
        for _ in range(rounds):
            times = []
            for before_step in (lambda *_: None, lambda *_: calls.repeat()):
                hook = self.alone.optimizer.register_step_pre_hook(before_step)
                start = time.thread_time()
                self.alone.step()
                times.append(time.thread_time() - start)
                hook.remove()
            ratios.append(times[1] / times[0] - 1)
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    def operations(self) -> int:
        """Operations of a step with a reading beyond those of a bare one: median of eleven, as some are compared."""
        counts = []
        for _ in range(11):
            counts.append(operations(self.watched.step))
            self.watched.step()
        return statistics.median(counts) - operations(self.alone.step)


class Calls(TorchDispatchMode):
    """What is called of torch, to be called once more, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.listed.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def repeat(self) -> None:
        for func, args, kwargs in self.listed:
            func(*args, **kwargs)


def operations(work: Callable[[], object]) -> int:
    """Operations of this thread, and of the backward, that compute or copy: those that a GPU would be sent."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    own = {event.thread for event in profile.events() if event.name.startswith("Optimizer.step")}
    return sum(_launches(event) for event in profile.events() if event.thread in own and event.cpu_parent is None)


def _launches(event: Any) -> int:
    """Return how many kernels a GPU would be sent: `cat` is one, which on a CPU copies one tensor after the other."""
    within = 0 if event.name == "aten::cat" else sum(map(_launches, event.cpu_children))
    return within or int(_is_no_view(event.name))


_OF_NO_KERNEL = re.compile("aten::((new_)?empty|_unsafe_view|resize_|set_|item|_local_scalar_dense|result_type)")


@lru_cache
def _is_no_view(name: str) -> bool:
    if not name.startswith("aten::") or _OF_NO_KERNEL.match(name):
        return False
    returned = [each for schema in torch._C._jit_get_schemas_for_operator(name) for each in schema.returns]
    aliases = [each.alias_info for each in returned if "Tensor" in str(each.type)]
    return not aliases or any(alias is None or alias.is_write for alias in aliases)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--only-host", action="store_true")
    options = parser.parse_args()
    rows: list[tuple[object, ...]] = [("model", "over a forward", "a reading, ms", "its memory, MiB")]
    for name in () if options.only_host else SIZES:
        readings = Readings(name, options.device)
        readings.read()
        (cost,) = ratios(readings.forward, readings.read, rounds=options.rounds, device=options.device)
        rows.append((name, cost, f"{1e3 * cost.added:.3g}", readings.memory()))
        del readings
    if not options.only_host:
        table(*rows)
    rows = [("host alone", "operations", "bare steps of the training's thread", "of the clock", "its calls of torch")]
    for name in VANISHING:
        with tempfile.TemporaryDirectory() as folder:
            host = Host(name, folder)
            with redirect_stdout(StringIO()), host.watched.heads:
                for _ in range(40):  # of the first readings many are compared with the contract
                    host.watched.step()
                    host.alone.step()
                costs = [host.cost(clock, 4 * options.rounds) for clock in (time.thread_time, time.perf_counter)]
                rows.append((name, host.operations(), *costs, host.floor(4 * options.rounds)))
    table(*rows)


if __name__ == "__main__":
    main()
