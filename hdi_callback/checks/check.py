"""`check`: what each attention of a model does, and what is wrong or odd about it, from a few forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import product

from torch import nn

from hdi_callback.attention.discovery.find import survey
from hdi_callback.attention.discovery.own_inputs import own_forward
from hdi_callback.attention.extra_forward import inner_model, nothing_remains
from hdi_callback.checks.cards import Card, card_of, joined_name
from hdi_callback.checks.diagnoses import DIAGNOSES, Diagnosis
from hdi_callback.checks.facts import Facts, facts_of


@dataclass(frozen=True, repr=False)
class Check:
    """What the attentions of a model do."""

    cards: tuple[Card, ...] = ()  #: one of each kind of attention
    findings: tuple[Diagnosis, ...] = ()  #: what is wrong or odd, the wrong first
    layers: int = 0  #: how many attentions ran
    judged: int = 0  #: of how many of these the heads, and so all facts, are known
    not_asked: Mapping[str, str] = field(default_factory=dict)  #: questions that were not asked of the model -> why

    @property
    def wrong(self) -> tuple[Diagnosis, ...]:
        """The findings that no design asks for."""
        return tuple(finding for finding in self.findings if finding.verdict == "wrong")

    def __repr__(self) -> str:
        """Return all cards and all findings, as a notebook shows them too."""
        if not self.cards:
            return "No attention ran in this forward, so that nothing was judged."
        whole = "" if self.judged == self.layers else " in those that were judged"
        lines = list(map(str, self.findings)) or [f"Nothing is wrong or odd{whole}."]
        lines.append(f"{self.judged} of {self.layers} layer{'s were' if self.layers > 1 else ' was'} judged.")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.not_asked.items():
            reasons.setdefault(reason, []).append(name.replace("_", " "))
        lines += [f"Not asked: {', '.join(names)} ({reason})." for reason, names in reasons.items()]
        return "\n\n".join([*map(str, self.cards), "\n".join(lines)])

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(repr(self))}</pre>'


def check(model: nn.Module, forward: Callable[[], object] | None = None) -> Check:
    """Return what each attention of a model does, and what is wrong or odd about it.

    The forward runs once to be read. Then the model is asked questions: its inputs are changed at the first module that
    is called, and its outputs are compared, in some 10 forwards of evaluation mode and up to 3 backwards. Nothing of
    all this remains.

    Args:
        model: the model.
        forward: runs a forward of it, without arguments: ``lambda: model(batch)``. Without it the model must bring
            inputs of its own (``example_input_array``, ``input_size`` of timm), or be one of transformers.

    Example:
        >>> import torch
        >>> model = torch.nn.MultiheadAttention(32, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 6, 32)
        >>> found = check(model, lambda: model(x, x, x, need_weights=False))
        >>> len(found.cards), found.findings
        (1, ())
    """
    from hdi_callback.checks.questions import ask_model  # nothing that trains asks, and so it imports none of it

    facts: list[Facts] = []
    other_mode: list[Facts] = []
    survey(model, forward, lambda reader: facts.extend(facts_of(reader)))
    forward = own_forward(model) if forward is None else forward
    if not facts or forward is None:
        return Check()
    not_asked: dict[str, str] = {}
    with nothing_remains(model, forward):
        model.train(not model.training)
        mode = "training" if model.training else "evaluation"
        try:
            survey(model, forward, lambda reader: other_mode.extend(facts_of(reader)))
        except Exception as error:  # one sample behind a batch norm, targets that are asked for
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            not_asked[f"{mode} mode"] = f"there the forward raises {reason}"
        model.eval()
        broken, refused = ask_model(inner_model(model), forward, facts)
    return replace(examine(facts, other_mode=other_mode, broken=broken), not_asked=not_asked | refused)


def examine(
    facts: Sequence[Facts],
    is_chosen: Callable[[str], bool] = lambda path: True,
    other_mode: Sequence[Facts] = (),
    broken: Sequence[Diagnosis] = (),
    has_cards: bool = True,
) -> Check:
    """Return cards and findings of the facts of a forward, and of one in the other mode, and of what questions show."""
    every = [*facts, *other_mode]
    chosen = [each for each in facts if is_chosen(each.path)]
    cards: dict[str, list[Card]] = {}  # of equal layers
    for card in map(card_of, chosen if has_cards else ()):
        cards.setdefault(str(replace(card, layer="")), []).append(card)
    layers: dict[Diagnosis, list[str]] = {}  # of which the same is told
    told: set[tuple[str, str]] = set()
    for each, diagnose in product(every, DIAGNOSES):
        name = diagnose.__name__.replace("_", " ")
        diagnosis = diagnose(each, every) if is_chosen(each.path) and (each.path, name) not in told else None
        if diagnosis is not None:
            told.add((each.path, name))
            layers.setdefault(Diagnosis("", name, *diagnosis, each.line), []).append(each.path)
    explained = {path for finding, paths in layers.items() if finding.verdict == "wrong" for path in paths}
    findings = [replace(finding, layer=joined_name(paths)) for finding, paths in layers.items()]
    # Where a fact says why, no question says what.
    findings += [each for each in broken if not any(f"{each.layer}.".startswith(f"{path}.") for path in explained)]
    return Check(
        tuple(replace(same[0], layer=joined_name([card.layer for card in same])) for same in cards.values()),
        tuple(sorted(findings, key=lambda finding: finding.verdict != "wrong")),
        len(chosen),
        sum(not each.reason for each in chosen),
    )
