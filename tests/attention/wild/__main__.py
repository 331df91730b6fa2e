# ruff: noqa: T201
"""Read every module by hand, and write the results.

python -m tests.attention.wild --output docs/modules-by-hand.md
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections import Counter
from pathlib import Path

import torch

from tests.attention.wild.catalogue import cases
from tests.attention.wild.proof import contradictions, softmaxes_over_tokens
from tests.attention.wild.verdict import RIGHT, VERDICTS, WAYS, Verdict, judge

_HEAD = """\
# Modules by hand

{count} modules as researchers write them, none of which uses a library of attention: every way to split heads, bare
parameters, fused and shared maps, names that say something else than what is computed, inputs in dictionaries, two
attentions in one module, scores that are no products, and what is called attention and is none
(their sources: `tests/attention/wild`).

What is true of each is written down as data: the rows of each head in each weight. It is proved without the package:
one element of a weight is changed, and the softmax of the real module shows which head's scores change, of which query
and of which key; values and outputs by silencing heads. What must be refused is disproved in the same way. Where
tokens are mixed in front of a map, which head notices is proved, and not which token; what of a few modules cannot be
separated so (values that reach the end a second way, say) is marked in their sources as not proved.

The truth is compared with what the package says: *model* is `find_attention(model)`, *forward* the same with
`forward=`, *training* the end of three steps of a training with `HDICallback`.
*Refused* gives a reason that is true of the module;
*refused, untrue* gives one that is not known to be; *half read* leaves a role or a stream out and does not say so,
or reads the heads of one attention as layers of one head each;
*missed* is neither read nor refused. *Right* are layers whose claimed rows are those of the truth; what positions or an
earlier layer add to keys or values (PositionsAddedToKeys, ValuesOfAnEarlierLayer) is left out of them, and said.

{table}

Written by `python -m tests.attention.wild --ways {ways} --output docs/modules-by-hand.md` with torch {torch}.

## What is not read
"""


def page(verdicts: list[Verdict], count: int) -> str:
    lines = ["| | " + " | ".join(VERDICTS) + " |", "|---" * (len(VERDICTS) + 1) + "|"]
    for way in WAYS:
        counts = Counter(one.verdict for one in verdicts if one.way == way)
        if counts:
            lines.append(f"| {way} | " + " | ".join(str(counts[verdict]) for verdict in VERDICTS) + " |")
    used = ",".join(way for way in WAYS if any(one.way == way for one in verdicts))
    text = _HEAD.format(count=count, table="\n".join(lines), ways=used, torch=torch.__version__.split("+")[0])
    rest = [one for one in verdicts if one.verdict != RIGHT]
    same: dict[tuple[str, str, str], list[str]] = {}
    for one in rest:
        same.setdefault((one.name, one.verdict, one.reason), []).append(one.way)
    text += "\n| module | verdict | in | reason |\n|---|---|---|---|\n"
    for (name, verdict, reason), ways in same.items():
        reason = " ".join(reason.replace("|", "\\|").replace("<", "&lt;").split())
        text += f"| {name} | {verdict} | {', '.join(ways)} | {reason} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--ways", type=lambda ways: ways.split(","), default=WAYS)
    parser.add_argument("--prove", action="store_true", help="prove the truth of each first")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    known = cases()
    verdicts = []
    for name in arguments.names or known:
        case = known[name]
        if arguments.prove:
            proved = not softmaxes_over_tokens(case) if case.none else bool(contradictions(case)) == bool(case.refused)
            assert proved, f"what is said of {name} is not true"
        for way in arguments.ways:
            with tempfile.TemporaryDirectory() as folder:
                verdicts.append(judge(case, way, Path(folder)))
            if verdicts[-1].verdict != RIGHT:
                print(f"{name} [{way}] {verdicts[-1].verdict}: {verdicts[-1].reason}", flush=True)
    for way in arguments.ways:
        print(way, dict(Counter(one.verdict for one in verdicts if one.way == way)))
    if arguments.output is not None:
        arguments.output.write_text(page(verdicts, len(known)))


if __name__ == "__main__":
    main()
