"""Modules by hand whose truth is written down: attention is seen in them, and no head that is proposed is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdi_callback.attention import AttentionLayer
from hdi_callback.attention.observe import AttentionObserver
from tests.attention.wild.catalogue import cases
from tests.attention.wild.proof import make_inputs, randomize, run
from tests.attention.wild.truth import Case, Core, weight_of

pytestmark = pytest.mark.slow  # `make slow` runs these

ALL = cases()
# Not observed are products that are written as `(q * k).sum(-1)` or have other keys for each query, a softmax over
# queries, weights of two softmaxes side by side, weights that are normed a second time, a weight for each feature,
# values that are sampled, weights of pairs of keys, complex numbers, and weights that weigh nothing; what TorchScript
# runs or is compiled is named as closed.
NOT_SEEN = {
    "ProductByHand", "Neighbourhoods", "SlotsOfObjects", "GatedPrompts", "Scripted", "Compiled", "CompiledInPlace",
    "WordsOfADocument", "PointCloud", "VectorsOfPoints", "Deformable", "WeightsAreTheAnswer", "TracedByTorch",
    "KeysUnfolded", "CompiledInside", "FlexAttention", "SeparableScores", "CreditsOfAgents", "CriticsOfOthers",
    "EdgesOfAList", "AttentionFree", "StandAlone", "RolledNeighbours", "FourNearest", "AskedByACell", "ScriptedSoftmax",
    "SummedLast", "OneSequenceOfAMap", "FlexWithABlockMask", "PairsAreAsked", "ModesAskModes",
    "QueriesCompete", "MixtureOfSoftmaxes", "PackedByEinops", "InverseDistances",
}  # fmt: skip
# Attention beside the one that is written down: keys that are averaged with themselves, weights of another module.
OTHERS = {"StatesOfAHopfieldNetwork", "WeightsUsedTwice"}
# What is added to scores or values may be a bias: that it mixes those of several heads, a traced run tells, and not
# observation.
TRACED_ALONE = {"ComposedHeads", "ValuesOfAllHeadsMixed", "ScoresCascadeOverHeads", "WeightsOfPairsAveraged"}
# Keys are proposed in the order of the heads that ask for them, and written down as they lie in their map.
IN_ANOTHER_ORDER = {"KeysOfTheNextHead"}
ELSEWHERE = {"OnMeta"}  # its inputs are on another device


class Around(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        torch.manual_seed(0)
        block = randomize(case.make())
        self.written = (block,)  # with the names of its truth
        converted = case.convert(block) if case.convert else None
        self.block = block if converted is None else converted

    def forward(self, *args):
        return run(self.case, self.block, list(args))


def observed(name: str) -> AttentionObserver:
    model = Around(ALL[name])
    observer = AttentionObserver(model, reduce_rows=lambda chunk: chunk.weights.sum())
    observer.arm()
    with torch.no_grad():
        model(*make_inputs(ALL[name], dtype=ALL[name].cast))
    observer.disarm()
    return observer


def is_right(core: Core, layer: AttentionLayer, model: nn.Module) -> bool:
    """The same rows for every head, in whatever order within it: which of a rotated pair is which is not known."""
    for role in layer.slices:
        truth = weight_of(getattr(core, role), model)
        if truth is None:
            continue
        weight = layer.weight(role).detach()
        if weight.shape != truth.shape:
            return False
        rows, others = (one.float().sort(1).values for one in (weight, truth))
        if not torch.allclose(rows, others, atol=1e-3):
            return False
    return True


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if not case.none and name not in ELSEWHERE])
def test_attention_of_handmade_modules_is_observed_and_no_proposed_head_is_wrong(name):
    observer = observed(name)
    assert observer.failures == []
    assert bool(observer.cores) == (name not in NOT_SEEN)
    for core in observer.cores:
        assert core.unread or core.rows is not None
    for layer in observer.proposals().values():
        if isinstance(layer, AttentionLayer):
            assert not ALL[name].refused or name in TRACED_ALONE
            assert name in OTHERS | IN_ANOTHER_ORDER or any(
                is_right(core, layer, observer._model.written[0]) for core in ALL[name].cores
            )


def test_heads_of_more_than_a_hundred_handmade_modules_are_found_by_observation_alone():
    found = [name for name, case in ALL.items() if not case.none and not case.refused and name not in ELSEWHERE
             and any(isinstance(one, AttentionLayer) for one in observed(name).proposals().values())]  # fmt: skip
    assert len(found) > 100
