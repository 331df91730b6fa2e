"""`explained`: how the heads of one attention were read, operation by operation, or where reading them ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from hdi_callback.attention.discovery.find import TapeReader, layer_name, survey
from hdi_callback.attention.discovery.heads import FoundAttention
from hdi_callback.attention.discovery.labels import Labels
from hdi_callback.attention.discovery.planes import small
from hdi_callback.attention.discovery.products import Unreadable
from hdi_callback.attention.tape import Step
from hdi_callback.checks.cards import card_of
from hdi_callback.checks.facts import facts_of


def explained(model: nn.Module, forward: Callable[[], object], name: str) -> str:
    """Return the operations from parameters to the attention of a module, and of which rows each result is."""
    listings: dict[str, list[str]] = {}

    def read(reader: TapeReader) -> None:
        labels = reader.labels
        for attn in reader.attentions:
            listings.setdefault(layer_name(attn.path or ""), []).append(_of_attention(labels, attn))
        for step, _ in reader.refused:
            lines = _lines(labels, [step, *labels.leading_to(step.inputs)])
            listings.setdefault(layer_name(step.path or ""), []).append(lines)
        for facts in facts_of(reader):
            listings.setdefault(layer_name(facts.path), []).append(str(card_of(facts)))

    for refusal in survey(model, forward, read).refused:
        listings.setdefault(refusal.name, []).append(f"refused: {refusal.reason}")
    if name in listings:
        modules = {layer_name(path): type(module).__name__ for path, module in model.named_modules()}
        return "\n\n".join([f"`{name}` ({modules[name]})", *listings[name]])
    ran_in = ", ".join(f"`{path}`" for path in listings)
    return f"No attention ran in `{name}`; it ran in: {ran_in or 'no module'}."


def _of_attention(labels: Labels, attn: FoundAttention) -> str:
    core = attn.core
    steps = [core.step, *([] if core.score_step is None else [core.score_step]), *(part.step for part in core.parts)]
    views = [view for step in steps if step is not core.step or core.score_step is None for view in step.inputs]
    return _lines(labels, [*steps, *labels.leading_to(views), *(step for step, _ in attn.outputs)])


def _lines(labels: Labels, steps: Iterable[Step]) -> str:
    lines = []
    for number, step in sorted({step.number: step for step in steps}.items()):
        inputs, outputs = (
            " ".join(f"({', '.join(map(str, view.shape))})" for view in views if view is not None)
            for views in (step.inputs, step.outputs)
        )
        lines.append(f"{number:5d}  {step.op:24}  {f'{inputs} -> {outputs}':60}  {_origin(labels, step)}".rstrip())
    return "\n".join(lines)


def _origin(labels: Labels, step: Step) -> str:
    """Return of which features the result of an operation is, or why that is not known."""
    view = next((view for view in step.outputs if view is not None), None)
    try:
        label = None if view is None else labels.read(view)
    except Unreadable as error:
        return f"not followed: {error}"
    if label is None:
        return ""
    owners = sorted(labels.owners(small(label.features)))
    names = [
        labels.tape.names[owner] if owner in labels.ranges else f"`{labels.tape.names[owner]}`" for owner in owners
    ]
    return ", ".join(dict.fromkeys(names)) + (f" ({', '.join(sorted(map(str, label.flags)))})" if label.flags else "")
