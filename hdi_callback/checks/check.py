"""`check`: what each attention of a model does, and what is wrong or odd about it, from one forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from hdi_callback.attention.find import survey
from hdi_callback.attention.heads import Claim
from hdi_callback.attention.labels import Labels
from hdi_callback.attention.tape import Step
from hdi_callback.checks.cards import Card, card_of, joined_name
from hdi_callback.checks.diagnoses import DIAGNOSES, Verdict
from hdi_callback.checks.facts import facts_of

__all__ = ["Check", "Diagnosis", "check", "examine"]


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong or odd about an attention.

    Attributes:
        layer: its dotted name, or that of equal layers: ``blocks.0-11.attn``.
        name: of the diagnosis: ``"split"``.
        verdict: ``"wrong"`` of what no design asks for; ``"odd"`` of what may be meant, or learns as well and
            disagrees with other code.
        text: the evidence, and what to write.
        line: file and line of the forward where the softmax runs; ``""`` if that is not known.
    """

    layer: str
    name: str
    verdict: Verdict
    text: str
    line: str = ""

    def __str__(self) -> str:
        """The finding in a line."""
        return f"{self.verdict.upper()}  {self.layer}: {self.text}{f' ({self.line})' if self.line else ''}"


@dataclass(frozen=True)
class Check:
    """What the attentions of a model do.

    Attributes:
        cards: one of each kind of attention.
        findings: what is wrong or odd, the wrong first.
    """

    cards: tuple[Card, ...] = ()
    findings: tuple[Diagnosis, ...] = ()

    @property
    def wrong(self) -> tuple[Diagnosis, ...]:
        """The findings that no design asks for."""
        return tuple(one for one in self.findings if one.verdict == "wrong")

    def __str__(self) -> str:
        """All cards, and all findings."""
        if not self.cards:
            return "No attention ran in this forward."
        said = "\n".join(map(str, self.findings)) or "Nothing is wrong or odd."
        return "\n\n".join([*map(str, self.cards), said])

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return asdict(self)


def check(model: nn.Module, forward: Callable[[], object] | None = None) -> Check:
    """Say what each attention of a model does, and what is wrong or odd about it.

    The forward runs once, without autograd, and nothing of it remains.

    Args:
        model: the model.
        forward: runs a forward of it, without arguments: ``lambda: model(batch)``. Without it the model must bring
            inputs of its own (``example_input_array``, ``dummy_inputs`` of transformers, ``input_size`` of timm).

    Returns:
        Cards and findings.

    Example:
        >>> import torch
        >>> model = torch.nn.MultiheadAttention(32, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 6, 32)
        >>> found = check(model, lambda: model(x, x, x, need_weights=False))
        >>> len(found.cards), found.findings
        (1, ())
    """
    found: list[Check] = []
    survey(model, forward, lambda *read: found.append(examine(*read)))
    return found[0] if found else Check()


def examine(
    labels: Labels,
    claims: list[Claim],
    refused: list[tuple[Step, str]],
    is_chosen: Callable[[str], bool] | None = None,
) -> Check:
    """Make cards and findings of what was read of a forward, of the layers that are chosen by their names."""
    every = facts_of(labels, claims, refused)
    cards: dict[str, list[Card]] = {}  # of equal layers
    layers: dict[Diagnosis, list[str]] = {}  # of which the same is said
    for one in every:
        if is_chosen is not None and not is_chosen(one.path):
            continue
        card = card_of(one)
        cards.setdefault(str(replace(card, layer="")), []).append(card)
        for diagnose in DIAGNOSES:
            found = diagnose(one, every)
            if found is not None:
                name = diagnose.__name__.replace("_", " ")
                layers.setdefault(Diagnosis("", name, *found, one.line), []).append(one.path)
    findings = [replace(said, layer=joined_name(paths)) for said, paths in layers.items()]
    return Check(
        tuple(replace(same[0], layer=joined_name([one.layer for one in same])) for same in cards.values()),
        tuple(sorted(findings, key=lambda one: one.verdict != "wrong")),
    )
