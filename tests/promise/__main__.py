"""Run many trainings with and without the monitor: ``python -m tests.promise --runs 500``."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
import traceback
from collections import Counter

import torch

from tests.promise.plan import Training, draw
from tests.promise.run import compare, report, shrink


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.promise", description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="trainings to draw")
    parser.add_argument("--seed", type=int, default=None, help="what to draw them from; a fresh one by default")
    parser.add_argument("--training", type=str, default=None, help="the text of one training, to run it alone")
    parser.add_argument("--no-shrinking", action="store_true", help="report failing trainings as they were drawn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    trainings = [Training.parse(options.training)] if options.training else draw(seed, options.runs)
    failed, broken, unread = Counter[str](), 0, 0
    begin = time.perf_counter()
    for training in trainings:
        try:
            result = compare(training)
        except Exception:
            broken += 1
            say(f"does not run without the monitor either: {training}\n{traceback.format_exc(limit=-3)}")
            continue
        unread += not result.measurements
        if result.differences:
            least = result if options.no_shrinking or options.training else shrink(result)
            failed[str(least.training).rpartition(" / ")[0]] += 1
            say(report(least))
        elif options.training:
            say("\n".join([f"no difference; {result.readings} readings of {result.measurements} layers", *result.said]))
    took = time.perf_counter() - begin
    say(f"\n{len(trainings)} trainings in {took:.0f} s: {sum(failed.values())} differ, {broken} do not run, "
          f"{unread} were read nowhere; seed {seed}")  # fmt: skip
    for name, count in failed.most_common():
        say(f"{count:4}  {name}")
    return int(bool(failed) or bool(broken))


if __name__ == "__main__":
    sys.exit(main())
