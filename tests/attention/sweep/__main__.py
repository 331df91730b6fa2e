# ruff: noqa: T201
"""Examine every architecture, each in a process of its own, and write the table of supported models.

    python -m tests.attention.sweep --output docs/supported-models.md

Models of timm are examined where timm and torchvision are installed; some of transformers need them as well. So are the
packages of others that `packages.txt` lists.

Results are kept one file per architecture under `runs/zoo`, by the versions of the libraries and the sources of the
package's attention room and of this sweep, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tests.attention.sweep import packages, vision

ROOT = Path(__file__).parents[3]
MEMORY = 12 * 2**30


def _versions() -> str:
    import torch
    import transformers

    reported = [f"torch {torch.__version__.split('+')[0]}", f"transformers {transformers.__version__}"]
    if vision.is_here():
        import timm

        reported.append(f"timm {timm.__version__}")
    return ", ".join(reported)


def _key() -> str:
    """Everything that a result depends on."""
    digest = hashlib.sha256(_versions().encode())
    sources = [*(ROOT / "hdi_callback/attention").rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    for path in sorted([*sources, ROOT / "tests/attention/witness.py"]):
        if path.name not in ("__main__.py", "table.py"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _examine(name: str, path: Path, key: str) -> None:
    """Run in a process of its own."""
    import torch

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        from tests.attention.sweep.examine import examine

        report = examine(name)
    except BaseException as error:
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        report = {
            "verdict": "sweep failed",
            "reason": f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})",
        }
    _write(path, report | {"name": name, "key": key, "seconds": round(time.monotonic() - start, 1)})
    os._exit(0)


def _write(path: Path, report: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1))
    part.replace(path)


def sweep(names: list[str], folder: Path, workers: int, timeout: float, is_forced: bool) -> None:
    """Examine architectures that have no valid result yet."""
    folder.mkdir(parents=True, exist_ok=True)
    key = _key()

    def is_done(name: str) -> bool:
        path = folder / f"{name}.json"
        return path.exists() and json.loads(path.read_text()).get("key") == key

    def has_failed(name: str) -> bool:  # a busy machine may be the reason
        return json.loads((folder / f"{name}.json").read_text())["verdict"] == "sweep failed"

    waiting = [name for name in names if is_forced or not is_done(name) or has_failed(name)]
    print(f"{len(names)} architectures, {len(names) - len(waiting)} known, {len(waiting)} to examine", flush=True)
    import torch

    from tests.attention.sweep import examine  # noqa: F401
    from tests.attention.sweep.architectures import build

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # The libraries and the code that the key stands for are imported once; what a process imports beyond goes with it.
    for common in ("bert", "clip"):
        build(common)
    context = multiprocessing.get_context("fork")
    running: dict[str, tuple[Any, float]] = {}
    start, done = time.monotonic(), 0
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop(0)
            process = context.Process(target=_examine, args=(name, folder / f"{name}.json", key))
            process.start()
            running[name] = (process, time.monotonic())
        time.sleep(0.02)
        for name, (process, since) in list(running.items()):
            is_late = time.monotonic() - since > timeout
            if process.is_alive() and not is_late:
                continue
            if is_late:
                process.kill()
            process.join()
            del running[name]
            done += 1
            path = folder / f"{name}.json"
            if is_late or process.exitcode != 0 or not is_done(name):
                reason = f"took over {timeout:.0f} s" if is_late else f"ended with {process.exitcode}"
                _write(path, {"name": name, "key": key, "verdict": "sweep failed", "reason": reason})
            if done % 50 == 0:
                print(f"{done} in {time.monotonic() - start:.0f} s", flush=True)
    print(f"examined in {time.monotonic() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; all of them if none is given")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/zoo")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--force", action="store_true", help="examine again what is known")
    parser.add_argument("--as-is", action="store_true", help="examine nothing, write the table from what is there")
    parser.add_argument("--output", type=Path, help="where to write the table")
    arguments = parser.parse_args()
    if vision.is_here():
        vision.declare_operators()
    from tests.attention.sweep.architectures import architectures

    names = arguments.names or [
        *architectures(),
        *(vision.names() if vision.is_here() else []),
        *(packages.names() if packages.is_here() else []),
    ]
    if not arguments.as_is:
        sweep(names, arguments.folder, arguments.workers, arguments.timeout, arguments.force)
    paths = [arguments.folder / f"{name}.json" for name in names]
    reports = [json.loads(path.read_text()) for path in paths if path.exists()]
    for report in reports:
        kinds = {vision.PREFIX: "timm", packages.PREFIX: "packages"}
        report["library"] = next((kinds[k] for k in kinds if report["name"].startswith(k)), "transformers")
    from tests.attention.sweep.table import summary, table

    print(summary(reports))
    if arguments.output is not None:
        arguments.output.write_text(table(reports, _versions()))


if __name__ == "__main__":
    sys.exit(main())
