"""Every attention that ran, and the watched layer that explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hdi_callback.attention.observe.cores import ObservedCore
from hdi_callback.attention.observe.judge import Verdict

Part = Literal["wholly", "in part", "not at all"]


@dataclass(frozen=True)
class CoreAccount:
    """One attention that ran.

    Attributes:
        core: the attention.
        layer: name of the layer that explains it; empty if none does.
        part: how far.
        sentence: the same in words.
    """

    core: ObservedCore
    layer: str
    part: Part
    sentence: str


def account(cores: Sequence[ObservedCore], verdicts: Mapping[str, Verdict]) -> list[CoreAccount]:
    """Attribute every attention that ran to the layer that explains it.

    Args:
        cores: all that ran.
        verdicts: name of a layer -> what was seen of it.

    Returns:
        One account for each attention, in their order.
    """
    return [_account(core, verdicts) for core in cores]


def _account(core: ObservedCore, verdicts: Mapping[str, Verdict]) -> CoreAccount:
    where = f"attention in `{core.module}` ({core.module_type}, {_kind(core)})"
    around = [name for name, verdict in verdicts.items() if verdict.core is core or core in verdict.cores]
    if not around:
        inside = [name for name in core.parts if name in verdicts]
        second = f"; `{inside[-1]}` is watched for another attention in it" if inside else ""
        return CoreAccount(core, "", "not at all", f"{where} is explained by no watched layer{second}")
    name = around[-1]
    verdict = verdicts[name]
    if verdict.state == "contradicted":
        return CoreAccount(core, name, "not at all", f"{where} contradicts what `{name}` claims: {verdict.sentence}")
    partial = {role: one.tokens for role, one in verdict.roles.items() if one.tokens}
    if partial:
        role, tokens = next(iter(partial.items()))
        length = core.queries if role == "query" else core.keys
        sentence = f"{where} is explained by `{name}` in part: it gives {tokens} of {length} tokens that are attended"
        return CoreAccount(core, name, "in part", sentence)
    missing = [role for role, one in verdict.roles.items() if one.state == "not seen" and role != "output"]
    if missing and any(one.state == "established" for one in verdict.roles.values()):
        return CoreAccount(core, name, "in part", f"{where} is explained by `{name}` in part: {verdict.sentence}")
    if missing:
        return CoreAccount(core, name, "not at all", f"{where} is not explained by `{name}`: {verdict.sentence}")
    return CoreAccount(core, name, "wholly", f"{where} is explained by `{name}`")


def _kind(core: ObservedCore) -> str:
    heads = f"{core.heads} heads" if core.heads else "heads that cannot be told apart"
    return heads if core.kind == "softmax" else f"{core.kind} weights, {heads}"
