"""Compare the claimed heads of a layer with a real forward, before training and in it.

At the first armed forward the arguments of attention modules are recorded. Once the backward is over, copies of the
modules are run with them, and read as before training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from hdi_callback.attention.finding.argument_recorder import ArgumentRecorder
from hdi_callback.attention.isolation import MOST_SECONDS, isolated
from hdi_callback.attention.layer.changing_hooks import shown_change
from hdi_callback.attention.layer.head_maps import single_maps
from hdi_callback.attention.layer.heads import AttentionLayer
from hdi_callback.attention.observe import Verdict
from hdi_callback.attention.trace.inputs import Inputs
from hdi_callback.attention.trace.layers import layers_in
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.verify import agreed_part, contradiction_of


class RuntimeVerifier(ArgumentRecorder):
    """Check claimed heads on the arguments of one real forward.

    Args:
        layers: the claims.

    Attributes:
        parts: claims whose heads the forward shows as they are, with more left out: name -> what both agree on.
    """

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self.parts: dict[str, AttentionLayer] = {}
        self._layers = {layer.name: layer for layer in layers}
        super().__init__({layer.name: layer.module for layer in layers})

    def contradictions(
        self, verdicts: Mapping[str, Verdict] | None = None, *, leave_out: Collection[str] = ()
    ) -> dict[str, str]:
        """Return which claims that forward, or a later one, contradicts, and release the arguments.

        Args:
            verdicts: name of a layer -> what an observer saw of its heads.
            leave_out: names of layers that are not to be compared.

        Returns:
            Layers whose heads are not what is claimed: name -> what shows it. A layer that did not run, or that cannot
            be run again with these arguments, is not among them.
        """
        verdicts = verdicts or {}
        recorded = self.take() if self.is_armed else {}
        shown = {}
        compared = [one for name, one in self._layers.items() if name not in leave_out]
        with isolated(*(one.module for one in compared if one.name in recorded)):
            for layer in compared:
                what = comparison_with_forward(layer, verdicts.get(layer.name), recorded.get(layer.name, ()))
                if isinstance(what, AttentionLayer):
                    self.parts[layer.name] = what
                elif what is not None:
                    shown[layer.name] = what
        return shown


def comparison_with_forward(
    layer: AttentionLayer, verdict: Verdict | None, recorded: Sequence[Inputs]
) -> str | AttentionLayer | None:
    """Return how a real forward contradicts the heads of a layer, or what it leaves of them.

    It is the same before training and in it.

    The inputs of attention decide first. Where that leaves the claim open or contradicts it, the module is run again
    with its arguments in that forward; one way to cut them that agrees is enough, as one of the ways is right.
    Observation does not outweigh a traced run that shows the heads as they are claimed.

    Args:
        layer: the claim.
        verdict: what an observer saw of its heads; `None` if nothing was observed.
        recorded: the arguments of its module, in each of the ways in which they may be cut; empty if it was not called.

    Returns:
        What was observed instead, as a clause; the layer with more left out if its heads are as they are claimed;
        `None` if nothing contradicts the claim.
    """
    for one in single_maps(layer.slices.values()):
        if shown_change(one.owner):
            return f"a forward hook changed the output of its projection `{one.parameter.removesuffix('.weight')}`"
    if verdict is not None and verdict.state == "established":
        return None
    shown: list[str | AttentionLayer | None] = []
    with suppress(Exception), isolated(seconds=MOST_SECONDS):  # what fails in one is no word on others
        shown = list(traced_comparisons(layer, recorded))
    observed = verdict.sentence if verdict is not None and verdict.state == "contradicted" else ""
    if shown:
        part = next((result for result in shown if isinstance(result, AttentionLayer)), None)
        return None if None in shown else part or observed or shown[0]
    return None if layer.evidence in ("trace", "forward") else observed or None


def traced_comparisons(layer: AttentionLayer, ways: Sequence[Inputs]) -> Iterator[str | AttentionLayer | None]:
    """Yield, for each set of arguments that runs, how it contradicts a layer; end with the first that agrees.

    Args:
        layer: the claim.
        ways: arguments of its module.

    Yields:
        What was observed instead, as a clause; the layer with more left out; `None` if it agrees.
    """
    try:
        traceable = Traceable(layer.module)
    except Exception:  # what cannot be copied is not compared
        return
    for way in ways:
        with suppress(Exception):
            run, found = layers_in(traceable, way.args, way.kwargs)
            shown = [result for result in found if not result.is_undecided]
            # A registered layout may describe modules that a traced run cannot read.
            is_reported = layer.evidence != "layout" and bool(shown)
            if run.error is not None or not (is_reported or any(result.layer is not None for result in shown)):
                continue
            what = contradiction_of(layer, shown, layer.name)
            yield what if what is None else agreed_part(layer, shown) or what
            if what is None:
                return
