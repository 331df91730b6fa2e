"""Modules by hand: what is said to be true of them is, and nothing that is read of them is wrong."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hdi_callback import find_attention
from hdi_callback.attention import survey
from hdi_callback.errors import UnsupportedAttentionWarning
from tests.attention.wild.catalogue import cases
from tests.attention.wild.plain import OneHead
from tests.attention.wild.proof import contradictions, make_inputs, randomize, softmaxes_over_tokens
from tests.attention.wild.truth import CASES, rows, separate
from tests.attention.wild.verdict import REFUSED, RIGHT, WAYS, Holder, judge

ALL = cases()
# One of each kind of proof: rows, strides, groups, windows, other axes, products, filters, norms, refusals.
PROVED = [
    "Plain", "KeysStridedValuesNot", "HeadsInFrontOfTheBatch", "LoopOverHeads", "OutputsReversed", "LengthFirst",
    "FusedByOddOrder", "ParametersForEachHead", "Pixels", "GroupsTiled", "GroupsByEinsum", "OneKeyHeadInOneProduct",
    "NormOverAllHeads", "Latent", "Blocks", "OnlyTheFirstAsks", "Joint",
]  # fmt: skip
DISPROVED = ["ForgottenTranspose", "TalkingHeads", "RotaryAcrossHeads"]


def test_the_modules_by_hand_have_distinct_names_and_are_more_than_a_hundred():
    assert len(ALL) == len(CASES) > 100


@pytest.mark.parametrize("name", PROVED)
def test_the_declared_heads_of_each_module_are_true_on_sampled_rows(name):
    assert contradictions(ALL[name], step=3) == []


@pytest.mark.parametrize("name", DISPROVED)
def test_modules_to_be_refused_do_not_compute_the_heads_they_suggest(name):
    assert contradictions(ALL[name], step=3) != []


def test_the_proof_rejects_rows_of_another_head_role_or_order():
    plain = ALL["Plain"]
    untrue = {
        "strided": separate(pattern="(d h) c"),
        "roles": separate("k", "q", "v", "o"),
        "values": separate("q", "k", "k", "o"),
        "outputs": replace(separate(), output=rows("o.weight", "c (d h)")),
        "groups": replace(ALL["GroupsTiled"].cores[0], groups=None),
    }
    for what, core in untrue.items():
        case = ALL["GroupsTiled"] if what == "groups" else plain
        assert contradictions(replace(case, cores=(core,)), step=3) != [], what


@pytest.mark.parametrize("name", [case.name for case in CASES if case.none])
def test_modules_declared_as_no_attention_have_no_softmax_over_tokens(name):
    assert softmaxes_over_tokens(ALL[name]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in CASES if not case.none])
def test_the_declared_heads_of_each_module_are_true_on_every_row(name):
    assert bool(contradictions(ALL[name])) == bool(ALL[name].refused)


# Of each idiom one, so that it takes seconds; `python -m tests.attention.wild` reads all of them, in training too.
READ = [
    "Plain", "CausalByMask", "Einops", "HeadsLast", "LengthFirst", "ValuesWider", "LearnedQueries", "FusedByReshape",
    "FusedForEachHead", "FusedByGroup", "GroupsRepeated", "OneKeyHead", "RotaryByHalves", "Cosine",
    # Names, shapes or an attribute say something else than what is computed.
    "OutputsReversed", "SaysTwoHeadsAndTakesADict", "QueriesAndKeysSwappedOfADict", "LayerNormCalledLn",
    "FunctionalLayerNorm", "LayerNormOfKeysAlone", "CentredByHand", "UnusedKeyNorm", "NormOfQueriesCalledKNorm",
    "NormInFrontCalledKNorm",
    # Heads share one product, a second attention is fed by the first, the softmax is written out, there are no numbers.
    "GroupsByEinsum", "GroupsTiledByEinsum", "OneKeyHeadByEinsum", "OneKeyHeadInOneProduct", "SelfThenCross",
    "SoftmaxOffByOne", "KeysOfFewerPixels", "LoopOverHeads", "OnMeta",
    # Numbers of half the digits, a backward of its own, several matrices in one parameter.
    "UnderAutocast", "AutocastOffForScores", "OwnBackward", "SpeedrunAttention", "StackedMatrices", "FourInOneView",
    "GroupedConvolutions", "HeadsInAListOfLists",
    # What recent models do.
    "HeadsApartUntilTheEnd", "GatesBesideQueries", "PooledByAQuestion", "CappedScores", "LatentsThatLearn",
    # Two streams, prompts with a softmax of their own, filters behind maps, heads whose outputs are subtracted.
    "Joint", "SecondStreamIfGiven", "GatedPrompts", "PooledHeads", "DepthwiseBehindMaps", "DifferentialOfTheSecondKind",
    "DifferentialInTwoCalls", "KeysOfTheLayerBefore", "Packed", "MappedOverHeads",
    "MapsOfEachKindOfToken", "InteractingFields",
    # A matrix that is scaled when it is used, one whose transpose takes the outputs.
    "EqualizedMaps", "OutputByTheValues",
    # Positions between two maps, kernels of three dims, a first step that sees one key.
    "SeriesInPatches", "FromFlax", "TokenByToken",
    # Updates of parts of a map, stacks of matrices, an ellipsis, dims by lists, heads that are summed last.
    "UpdatesInPlace", "BatchedProducts", "FeaturesThenItems", "InteractingFields", "WrittenForInterpreting",
    "HeadsTurnedRoundInFrontOfTheStack",
    # A mask leaves nothing of what a head weighs.
    "AHeadIsMasked", "OutputsOfAHeadAreMasked", "TheFirstHeadIsMasked",
    # Two attentions of one map, a contraction of three, rows of weights in another order than those of scores.
    "HalfOfTheHeadsOverTime", "SummedLast", "HeadsOfTwoWidths",
    # Elementwise products with keys of each query, summed: by unfolding, by rolling, of one query.
    "StandAlone", "RolledNeighbours", "AskedByACell",
    # Recurrences beside attention, turns by contents that no gradient sees, maps within functions that `vmap` takes.
    "EveryThirdLayerAttends", "TurnedByContents", "OneSequenceOfAMap", "LatentsNormedAndTurned", "LatentsOfGroups",
    # A softmax over layers beside those over tokens; layers of einops that hold the maps.
    "LayersWeighTheLayersBefore", "MapsByEinMix",
    # Two averages of the same heads are one layer; the first rows and columns of matrices; heads by a list of numbers.
    "BlendOfTwoReaches", "ElasticHeads", "EverySecondHeadSeesAll", "KeysOfTheNextHead", "PackedByEinops",
]  # fmt: skip
REFUSALS = {
    "TalkingHeads": "its heads mix: `talk` maps the scores of all heads before the softmax",
    "Scripted": "compiled by torch.jit.script",
    # Scores or sums that are no matrix products.
    "Additive": "its scores are not products of queries and keys",
    "DenseSynthesizer": "its scores are not products of queries and keys",
    "DenseGraph": "its scores are sums of a term of the query and one of the key, and not products",
    "VectorsOfPoints": "its scores are not products of queries and keys",
    "EfficientAttention": "its scores are not products of queries and keys",
    "Deformable": "its scores are not products of queries and keys",
    "SoftExperts": "its scores are not products of queries and keys",
    "PooledByOneScore": "its scores are not products of queries and keys",
    "BagsOfInstances": "its scores are not products of queries and keys",
    "WordsOfADocument": "its scores are not products of queries and keys",
    "InterestsOfAUser": "its scores are not products of queries and keys",
    "Outlook": "its scores are not products of queries and keys",
    "Landmarks": "the attention weights of one head are computed from several softmaxes",
    "ExpertsOfValues": "its values are computed from `ev`, but not by a linear map of single tokens that can be read",
    "ComplexHeads": "its scores are products of complex numbers",
    "LoRAByHooks": "its projection `k` is a Linear with the forward hook `<lambda>`",
    # Heads whose maps take parts of the input, or inputs of their own: their rows do not compare.
    "OneSmallMapForAllHeads": "the same rows of `keys` make the keys of several of its heads, each of other features",
    "ASmallMapForEachHead": "each of its heads computes its queries from an input of its own",
    "HeadsInACascade": "each of its heads computes its queries from an input of its own",
    "HeadsOfPartsOfTheInput": "each of its heads computes its queries from an input of its own",
    # Weights that a map makes.
    "Hypernetwork": "the weights of its key projection are computed by `k.make`",
    "WholeNumbers": "its projection `q` is a _Int8 of tests without a matrix that is read",
    "FramesOfASpectrum": "its key projection is followed by an activation",
    "CriticsOfOthers": "its value projection is followed by an activation",
    # What is weighed, or gives what is weighed, is no map.
    "FlowByMatching": "its values are constants, such as positions, and not projections of tokens",
    "KeysKeptInFewBits": "its values are rounded, so that no gradient shows which projection they come from",
    "ChosenExperts": "the outputs of its heads are mixed or normalised, and no output projection was found",
    # Each token has its heads in an order of its own; weights of vectors alone.
    "RouterOfHeadsInFront": "its heads mix: the weights of one head depend on the scores of several",
    "KernelRegression": "its scores are not products of queries and keys",
    "OneFlatVector": "multiplies with a matrix that is not a parameter",
    "AdaptersInPlace": "as its projection `qkv.b_v` takes the output of another linear map",
    # A score for each pair of keys, what two maps multiply, matrices that are buffers, heads of several widths.
    "PairsAreAsked": "each of its scores is of three tokens, and not a product of a query and a key",
    "AConditionScalesQueries": "its keys are computed from the outputs of `film.1` and `to_k`, and not as their sum",
    "QueriesAndKeysAreBuffers": "its keys are its inputs, or computed from them without a projection that can be read",
    "HeadsOfEveryWidth": "its query heads differ in width",
    # Values of all heads, scores of those before, weights of two.
    "ValuesOfAllHeadsMixed": "a value head depends on 24 outputs of `v`, more than its width",
    "ScoresCascadeOverHeads": "heads share or mix features",
    "WeightsOfPairsAveraged": "its heads mix: the weights of one head depend on the scores of several",
    "LogOfAveragedExponentials": "its value projection is followed by an activation",
}


_SECONDS = {"CriticsOfOthers"}  # 64 attentions


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in _SECONDS else ()) for name in REFUSALS]
)
def test_modules_by_hand_that_are_not_read_are_refused_with_a_true_reason(name):
    verdict = judge(ALL[name], "forward")
    assert verdict.verdict == REFUSED
    assert REFUSALS[name] in verdict.reason


@pytest.mark.parametrize("way", ["model", "training"])
@pytest.mark.parametrize("name", ["Deformable", "PooledByOneScore", "WordsOfADocument", "EfficientAttention"])
def test_sums_over_tokens_without_pairwise_scores_are_refused_before_training_and_in_it(name, way, tmp_path):
    verdict = judge(ALL[name], way, tmp_path)
    assert (verdict.verdict, verdict.reason) == (REFUSED, f"{REFUSALS[name]}.")


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("PositionsAddedToKeys", "what `kp` adds to its keys"),
        ("TalkingAfterSoftmax", "the mixing of the weights of all heads by `mix` after the softmax"),
        ("ValuesOfAnEarlierLayer", "the input that is added to the values from `v`"),
        (
            "InvariantPointsThatLearn",
            "another attention in it (the output of `vp` is turned or mixed within each head)",
        ),
        ("SumOverHeads", "the outputs of its heads, each of which has an output projection of its own"),
        (
            "RelationsOfAGraph",
            "the weights of its values, as the output of `v_lin` is turned or mixed within each head",
        ),
    ],
)
def test_terms_added_to_keys_or_values_are_reported_as_left_out(name, left_out):
    holder, case = Holder(ALL[name]), ALL[name]
    inputs = make_inputs(case, case.cast)
    with pytest.warns(UnsupportedAttentionWarning) as reported:
        (layer,) = find_attention(holder, forward=lambda: holder(*inputs))
    assert layer.left_out == left_out
    assert [str(one.message).endswith(f"is read in part: without {left_out}.") for one in reported] == [True]
    assert judge(case, "forward").verdict == RIGHT  # the rows that are claimed


@pytest.mark.parametrize("name", ["LinearAttention", "LinearAttentionQuadratic", "AttentionInNameOnly"])
def test_modules_named_attention_that_do_not_attend_are_not_claimed(name):
    assert judge(ALL[name], "forward").verdict == RIGHT


@pytest.mark.parametrize("name", ["LimbsOfABody", "GraphAsAMask", "WithoutABatch"])
def test_modules_that_take_one_sequence_or_one_vector_are_read_without_a_forward(name):
    assert judge(ALL[name], "model").verdict == RIGHT


@pytest.mark.parametrize("name", ["KernelRegression", "OneFlatVector"])
def test_an_attention_model_that_takes_only_vectors_is_refused_with_one_warning(name):
    case = ALL[name]
    model, inputs = randomize(case.make()), make_inputs(case)
    for options, reason in ({}, "could not be run"), ({"forward": lambda: model(*inputs)}, REFUSALS[name]):
        with pytest.warns(UnsupportedAttentionWarning) as reported:
            assert find_attention(model, **options) == []
        assert [reason in str(one.message) for one in reported] == [True]


@pytest.mark.parametrize(
    "name", ["Windows", "KeysOfFewerPixels", "PositionsAddedToKeys", "BiasOfEdges", "KernelRegression", "OneFlatVector"]
)
def test_a_module_that_cannot_run_before_training_is_not_claimed_by_names(name):
    verdict = judge(ALL[name], "model")
    assert (verdict.verdict, verdict.reason) == (REFUSED, "it could not be run with synthetic inputs")


def test_a_run_that_stops_early_does_not_claim_heads_of_different_widths():
    verdict = judge(ALL["HeadsOfEveryWidth"], "model")
    assert (verdict.verdict, verdict.reason) == (REFUSED, "its query heads differ in width.")


@pytest.mark.parametrize("name", ["UnderAutocast", "AutocastOffForScores", "OwnBackward", "DenseSynthesizer"])
def test_heads_under_autocast_custom_backwards_and_stacked_parameters_are_found_before_training(name):
    assert judge(ALL[name], "model").verdict == (REFUSED if name in REFUSALS else RIGHT)


def test_scores_from_a_custom_autograd_function_are_traced_without_a_forward():
    assert judge(ALL["ScoresOfAFunction"], "model").verdict == RIGHT


def test_an_exported_graph_is_refused_with_the_same_reason_before_training_and_in_it(tmp_path):
    verdict = judge(ALL["Exported"], "training", tmp_path)
    assert verdict.verdict == REFUSED
    assert verdict.reason == judge(ALL["Exported"], "model").reason


@pytest.mark.parametrize("name", ["StackedMatrices", "FourInOneView"])
def test_a_part_of_a_parameter_is_not_claimed_to_be_the_output_projection(name):
    holder = Holder(ALL[name])
    (layer,) = find_attention(holder)
    assert "output" not in layer.slices


def test_an_optional_second_stream_is_refused_with_the_name_of_its_argument():
    verdict = judge(ALL["SecondStreamIfGiven"], "model")
    assert (verdict.verdict, "`context` is passed" in verdict.reason) == (REFUSED, True)


@pytest.mark.parametrize("name", ["RelativeKeys", "BiasTable"])
def test_heads_are_found_before_training_beside_tables_of_few_positions(name):
    verdict = judge(ALL[name], "model")
    assert (verdict.verdict, verdict.reason) == (RIGHT, "")


@pytest.mark.some_slow(quick=42)
@pytest.mark.parametrize("name", READ)
def test_modules_by_hand_are_read_right_in_a_forward(name):
    verdict = judge(ALL[name], "forward")
    assert (verdict.verdict, verdict.reason) == (RIGHT, "")


@pytest.mark.parametrize("way", WAYS)
def test_tied_row_attention_is_read_without_a_forward_with_one_and_in_training(way, tmp_path):
    verdict = judge(ALL["TiedRows"], way, tmp_path)
    assert (verdict.verdict, verdict.reason) == (RIGHT, "")


@pytest.mark.some_slow(quick=3)
@pytest.mark.parametrize(
    "name", ["ValuesAreTheInput", "KeysOfATower", "KeysThroughAnActivation", "Joint", "ValuesOfAnEarlierLayer",
             "ValueResiduals", "StripesOfHalves"]
)  # fmt: skip
def test_a_forward_and_a_training_give_the_same_verdict(name, tmp_path):
    forward, training = (judge(ALL[name], way, tmp_path) for way in ("forward", "training"))
    assert (training.verdict, training.reason) == (forward.verdict, forward.reason)
    assert forward.verdict in (RIGHT, REFUSED)


@pytest.mark.parametrize("name", [
    "SevenHeadModules", "HeadModulesByName", "HeadModulesInModules", "HeadModulesAveraged",
    "HeadModulesWeighedForEachToken",
])  # fmt: skip
def test_heads_in_modules_of_their_own_are_one_layer_however_many_they_are(name):
    verdict = judge(ALL[name], "model")
    assert (verdict.verdict, verdict.reason) == (RIGHT, "")


@pytest.mark.parametrize(("name", "first"), [
    ("HeadModulesOfAnObject", "heads.0"), ("HeadModulesInModulesOfAnObject", "heads.0.attention"),
    ("HeadModulesByNameOfAnObject", "head_0"),
])  # fmt: skip
def test_single_heads_in_a_module_that_could_not_be_run_are_left_to_a_forward(name, first):
    case = ALL[name]
    model = nn.ModuleDict({"block": case.make()})
    found = survey(model)
    assert found.layers == ()
    (refusal,) = found.refused
    assert (refusal.name, refusal.reason) == (
        "block", "it could not be run with synthetic inputs, "
        f"so the {case.cores[0].heads} attentions of one head in it (block.{first}, ...) may be "
        "layers or the heads of one layer",
    )  # fmt: skip
    (layer,) = find_attention(model, forward=lambda: model["block"](SimpleNamespace(tokens=torch.randn(2, 5, 24))))
    assert (layer.name, layer.num_heads) == ("block", case.cores[0].heads)


class OneHeadInARow(nn.Module):
    """Layers of one head with an output projection each, in a list; the tokens come in an object."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(24, 1, batch_first=True) for _ in range(3))

    def forward(self, batch):
        x = batch.tokens
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return x


def test_attentions_of_one_head_with_output_projections_are_layers_in_a_module_that_could_not_be_run():
    model = nn.ModuleDict({"block": OneHeadInARow()})
    names = [f"block.layers.{i}" for i in range(3)]
    assert [layer.name for layer in find_attention(model)] == names
    batch = SimpleNamespace(tokens=torch.randn(2, 5, 24))
    assert [layer.name for layer in find_attention(model, forward=lambda: model["block"](batch))] == names


class OneHeadPerTask(nn.Module):
    """Two tasks ask the same tokens, each with an attention and a map of its own; their answers are not added up."""

    def __init__(self):
        super().__init__()
        self.tasks = nn.ModuleDict({name: OneHead(24) for name in ("depth", "normals")})
        self.out = nn.ModuleDict({name: nn.Linear(24, 3) for name in self.tasks})

    def forward(self, x):
        return {name: self.out[name](task(x)) for name, task in self.tasks.items()}


def test_attentions_of_one_head_whose_answers_stay_apart_are_layers():
    assert [(layer.name, layer.num_heads) for layer in find_attention(OneHeadPerTask())] == [
        ("tasks.depth", 1), ("tasks.normals", 1),
    ]  # fmt: skip


class AddsAHead(OneHead):
    """A block of one head that gives as many features as it takes, added to its input, as in SAGAN."""

    def forward(self, x):
        return x + super().forward(x)


class TwoBlocksOfPictures(nn.Module):
    """A network of convolutions around them, which no made-up input fits."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 24, 4, 4), nn.Conv2d(24, 3, 1)
        self.low, self.high = AddsAHead(24), AddsAHead(24)

    def forward(self, batch):
        x = self.first(batch.images)
        tokens = self.high(torch.relu(self.low(x.flatten(2).mT)))
        return self.last(tokens.mT.view_as(x))


def test_blocks_of_one_head_that_keep_the_width_are_layers_in_a_module_that_could_not_be_run():
    model, batch = TwoBlocksOfPictures(), SimpleNamespace(images=torch.randn(2, 3, 16, 16))
    for forward in (None, lambda: model(batch)):
        assert [layer.name for layer in find_attention(model, forward=forward)] == ["low", "high"]
