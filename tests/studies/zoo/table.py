"""The page of supported models, from what was examined."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

SOURCES = {"transformers": "transformers", "timm": "timm", "packages": "packages of others"}
# Mechanisms that have no keys which a softmax compares: they are named as not watched, and no head of them is counted.
_WITHOUT_KEYS = ("without a softmax", "no products of queries and keys")
_NOT_RUN = {
    "a part of another architecture, which no class builds alone": r"NoModelError",
    "needs a library that is not installed": r"requires the|ImportError|ModuleNotFound",
    "took longer than the limit": r"takes too long|ended by itself",
    "needs inputs that are not made up here": r"",
}


def verdict_of(result: dict[str, Any]) -> str:
    """Say in a word what became of an architecture."""
    if "layers" not in result:
        return str(result["verdict"])
    reasons = [reason for _, reason in result["refused"]]
    if result["wrong"] or result["missed"]:
        return "wrong" if result["wrong"] else "missed"
    if any(not _has_no_keys(reason) for reason in reasons):
        return "refused"
    return "right" if result["layers"] else "no keys" if reasons else "no attention"


def page(results: list[dict[str, Any]]) -> str:
    """Write the page."""
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in results:
        head = one["name"].partition(".")[0]
        by_source[head if head in SOURCES else "transformers"].append(one | {"verdict": verdict_of(one)})
    lines = [
        "# Supported models", "",
        "Small models with random weights, each run once. An architecture is *right* if every attention of queries and "
        "keys in it is read and no claim about its heads is contradicted by the model itself (the rows of a head are "
        "changed, and what its attention gives is seen), *refused* if one is named as not read. "
        "Attention without keys that a softmax compares (linear, deformable) is named as not watched, and does not "
        "count. Percentages are of the architectures whose attention has queries and keys, and that ran.", "",
        "| | examined | have attention | right | refused | wrong | missed | no keys, or no attention | did not run |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_summary(SOURCES[source], by_source[source]) for source in SOURCES if by_source[source]), "",
        f"| what it is | {' | '.join(SOURCES.values())} | among them |", "|---|---|---|---|---|",
        *_rows(by_source), "",
        "The numbers are of", "", "```shell", "make zoo", "```", "",
        _seconds(by_source["transformers"]), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _summary(name: str, results: list[dict[str, Any]]) -> str:
    count = Counter(one["verdict"] for one in results)
    have = sum(count[one] for one in ("right", "refused", "wrong", "missed"))
    share = f"{count['right']} ({100 * count['right'] / have:.1f} %)" if have else "0"
    none = count["no keys"] + count["no attention"]
    cells = [name, len(results), have, share, count["refused"], count["wrong"], count["missed"], none]
    return f"| {' | '.join(map(str, cells))} | {count['did not run']} |"


def _rows(by_source: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Give a line for each layout that is read, for each reason of a refusal, and for what has nothing to read."""
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: {source: [] for source in SOURCES})
    for source, results in by_source.items():
        for one in results:
            groups[_what(one)][source].append(one["name"].removeprefix(f"{source}."))
    for what in list(groups):  # layouts that few combine, together
        if what.startswith("read") and ";" in what and sum(map(len, groups[what].values())) < 12:
            for source, names in groups.pop(what).items():
                groups["read: several of these in one model"][source] += names
    order = ["read", "refused", "wrong", "missed", "no keys", "no attention", "did not run"]
    ranked = sorted(
        groups.items(), key=lambda one: (order.index(one[0].partition(":")[0]), -sum(map(len, one[1].values())))
    )
    lines = []
    for what, of in ranked:
        counts = " | ".join(str(len(names) or "") for names in of.values())
        lines.append(f"| {what} | {counts} | {_some([name for names in of.values() for name in names])} |")
    return lines


def _what(one: dict[str, Any]) -> str:
    verdict = one["verdict"]
    if verdict == "right":
        return f"read: {'; '.join(one['kinds'])}"
    if verdict == "did not run":
        why = next(text for text, pattern in _NOT_RUN.items() if re.search(pattern, one["why"]))
        return f"did not run: {why}"
    if verdict in {"no keys", "refused"}:
        reasons = [reason for _, reason in one["refused"] if _has_no_keys(reason) == (verdict == "no keys")]
        return f"{verdict}: {re.sub('`[^`]*`', 'a parameter', reasons[0])}"
    return str(verdict)


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names, key=lambda one: (len(one), one))[:6]) + (", ..." if len(names) > 6 else "")


def _has_no_keys(reason: str) -> bool:
    return any(text in reason for text in _WITHOUT_KEYS)


def _seconds(results: list[dict[str, Any]]) -> str:
    reading = sum(one.get("reading", 0) for one in results)
    return (
        f"Of transformers, writing the forwards down and reading them took {reading:.0f} seconds, and building, "
        f"running and judging the models {sum(one['seconds'] for one in results) - reading:.0f}, in one process."
    )
