"""What is not established is refused, with where, why and what to do; it is never read wrong."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers as tf
from torch import nn

from hdi_callback.attention import find_attention, survey
from hdi_callback.errors import UnsupportedAttentionWarning
from tests.attention import models as by_hand
from tests.attention.models import D
from tests.attention.test_layouts import SMALL

NOT_RUN = "it could not be run with synthetic inputs"
LOOK_ALIKES = {
    by_hand.InterleavedByEinops: NOT_RUN,
    by_hand.Differential: NOT_RUN,
    by_hand.KnockingHeads: NOT_RUN,
    by_hand.SaysNothing: NOT_RUN,
    by_hand.ContradictsItself: NOT_RUN,
    by_hand.Contradicts: NOT_RUN,
    by_hand.DoesNotDivide: NOT_RUN,
    by_hand.TooFewKeys: NOT_RUN,
    by_hand.OddOutput: NOT_RUN,
    by_hand.OverChannels: "each of its keys is of a feature and not of a token, as in attention over channels",
    by_hand.KeysMixed: "a key head depends on 32 outputs of `k_proj`, more than its width: heads share or mix features",
    by_hand.ValuesSquashed: "its value projection is followed by an activation",
    by_hand.KeysIgnored: "no query in its scores meets several keys",
    by_hand.GroupsOfTwoSizes: "its keys are not shared by adjacent heads in groups of one size",
    by_hand.LowRankMLA: NOT_RUN,
    by_hand.HiddenAttention: NOT_RUN,
}


@pytest.mark.parametrize("kind", LOOK_ALIKES, ids=lambda kind: kind.__name__)
@pytest.mark.some_slow(quick=10)
def test_a_module_that_resembles_attention_is_refused_with_path_reason_and_remedy(kind):
    model = nn.ModuleDict({"odd": kind(), "good": by_hand.Grouped()})
    with pytest.warns(UnsupportedAttentionWarning) as reported:
        layers = find_attention(model)
    assert [layer.name for layer in layers] == ["good"]
    (message,) = [str(warning.message) for warning in reported]
    assert message.startswith(f"The heads of `odd` ({kind.__name__}) cannot be read: ")
    assert LOOK_ALIKES[kind] in message
    assert "register_layout" in message
    assert "exclude=['odd']" in message
    (refusal,) = survey(model).refused
    assert (refusal.name, refusal.module_type) == ("odd", kind.__name__)
    assert LOOK_ALIKES[kind] in refusal.reason


def test_a_refused_root_model_is_not_advised_to_exclude_itself():
    (refusal,) = survey(by_hand.OverChannels()).refused
    assert refusal.name == ""
    assert refusal.message.startswith("The heads of the model (OverChannels) cannot be read: ")
    assert refusal.message.endswith(" Describe it with `register_layout`.")


def test_interleaved_head_outputs_have_weights_and_no_captured_projection():
    (layer,) = find_attention(nn.ModuleDict({"odd": by_hand.OutputsInAnotherOrder()}))
    assert layer.output_projection is None
    assert layer.slices["output"].index()[:2, :3].tolist() == [[0, 4, 8], [1, 5, 9]]
    assert layer.slices["key"].index().flatten().tolist() == list(range(D, 2 * D))


def test_queries_mixed_over_tokens_are_read_as_rows_of_their_projection():
    model = nn.ModuleDict({"odd": by_hand.TokensMixed()})
    (layer,) = find_attention(model)
    assert torch.equal(layer.weight("query"), model["odd"].q_proj.weight.view(by_hand.H, -1, by_hand.D))
    assert "queries of several tokens" in layer.kind


class LargestOfTwo(by_hand.Separate):
    """A query has the larger of the features of two tokens."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out_proj(by_hand.attend(torch.maximum(q, q.roll(1, 1)), k, v))


class FeaturesOfTwo(by_hand.Separate):
    """A query adds other features of the token before, of the same head."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out_proj(by_hand.attend(q + q.roll(1, 1).flip(-1), k, v))


@pytest.mark.parametrize("kind", [LargestOfTwo, FeaturesOfTwo])
def test_queries_that_mix_features_of_several_tokens_are_left_out_of_the_layer(kind):
    with pytest.warns(UnsupportedAttentionWarning, match="read in part: without the weights of its queries"):
        (layer,) = find_attention(nn.ModuleDict({"odd": kind()}))
    assert sorted(layer.slices) == ["key", "output", "value"]
    assert layer.slices["key"].index().flatten().tolist() == list(range(by_hand.D))


class HalfOfTheQueries(by_hand.Separate):
    """The first tokens have queries of a map, the others are their own queries."""

    def forward(self, x):
        q, k, v = self.heads(x)
        half = x.shape[1] // 2
        others = x.unflatten(-1, (by_hand.H, -1))
        return self.out_proj(by_hand.attend(torch.cat([q[:, :half], others[:, half:]], 1), k, v))


def test_queries_of_tokens_without_a_projection_are_reported_as_left_out():
    torch.manual_seed(0)
    model, x = HalfOfTheQueries(), torch.randn(2, 10, by_hand.D)
    (layer,) = survey(nn.ModuleDict({"odd": model})).layers
    assert layer.left_out == "the queries of other tokens, which come from no linear map"
    assert torch.equal(layer.weight("query"), model.q_proj.weight.view(by_hand.H, -1, by_hand.D))
    before = model(x)
    with torch.no_grad():
        layer.weight("query").mul_(-1)
    assert [torch.equal(*pair) for pair in zip(before.chunk(2, 1), model(x).chunk(2, 1))] == [False, True]


class ProjectionForEachHead(by_hand.Separate):
    """Each head has an output projection of its own."""

    def __init__(self):
        super().__init__()
        self.out_proj = nn.ModuleList(nn.Linear(by_hand.D // by_hand.H, by_hand.D) for _ in range(by_hand.H))

    def forward(self, x):
        q, k, v = self.heads(x)
        outputs = by_hand.attend(q, k, v).unflatten(-1, (by_hand.H, -1))
        return sum(one(outputs[:, :, head]) for head, one in enumerate(self.out_proj))


def test_outputs_to_several_output_projections_are_reported_as_left_out():
    (layer,) = survey(nn.ModuleDict({"odd": ProjectionForEachHead()})).layers
    assert (layer.num_heads, sorted(layer.slices)) == (by_hand.H, ["key", "query", "value"])
    assert layer.left_out == "the outputs of its heads, which go to several output projections"


REFUSED = {  # and how many layers there are
    "Autoformer, delays that all heads share": (
        tf.AutoformerConfig(prediction_length=4, context_length=8, label_length=2, lags_sequence=[1, 2], d_model=32,
                            moving_average=3, num_time_features=1, encoder_layers=1, decoder_layers=1,
                            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32,
                            decoder_ffn_dim=32),
        3, "not products of queries and keys",
    ),
    "Longformer, windows": (
        tf.LongformerConfig(**SMALL | {"sep_token_id": 2}, attention_window=4), 2, "could not be run",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_layers_of_families_that_cannot_be_read_are_refused_one_by_one(name):
    config, layers, reason = REFUSED[name]
    found = survey(tf.AutoModel.from_config(config))
    assert found.layers == ()
    assert len(found.refused) == layers
    assert all("Attention" in refusal.module_type for refusal in found.refused)
    assert all(reason in refusal.reason for refusal in found.refused)


def test_a_refused_layer_can_be_skipped_by_name():
    model = nn.ModuleDict({"odd": by_hand.GroupsOfTwoSizes(), "good": by_hand.Grouped()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [layer.name for layer in find_attention(model, exclude=["odd"])] == ["good"]


def test_a_parent_named_attention_is_not_reported_beside_its_attention_child():
    class SomeAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.gate = by_hand.Grouped(), nn.Linear(32, 32)

    found = survey(nn.Sequential(SomeAttention()))
    assert [layer.name for layer in found.layers] == ["0.inner"]
    assert found.refused == ()


def test_a_model_without_attention_has_no_layers_and_no_warning():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LSTM(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_attention(model) == []


def test_finding_attention_touches_neither_the_model_nor_the_random_state():
    model = nn.Sequential(by_hand.NanoGPT(), by_hand.Timm(), by_hand.Interleaved())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    survey(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert calls == []
    assert model.training


class OverEdges(nn.Module):
    """Attention of each node to its neighbours in a graph: exponentials are added up edge by edge."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        one, other = edges
        q, k, v = (part(x).unflatten(-1, (4, 8)) for part in (self.query, self.key, self.value))
        weights = (q[one] * k[other]).sum(-1).exp()
        total = torch.zeros(len(x), 4).index_add(0, one, weights)
        mixed = torch.zeros(len(x), 4, 8).index_add(0, one, weights[..., None] * v[other])
        return self.out((mixed / total[..., None]).flatten(1))


class OnAGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = OverEdges()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(x))).T)


def test_attention_over_graph_edges_is_refused_with_and_without_a_forward() -> None:
    model = OnAGraph()
    reasons = {None: "could not be run", lambda: model(torch.randn(6, 32)): "summed by index"}
    for forward, reason in reasons.items():
        found = survey(model, forward=forward)
        assert found.layers == ()
        assert [refusal.name for refusal in found.refused] == ["layer"]
        assert reason in found.refused[0].reason


class MultiheadByFeature(nn.Module):
    """A weight for each feature, as in point transformers: a softmax over tokens that no product takes."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.score, self.back = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        weights = self.score(q[:, :, None] - k[:, None]).softmax(2)
        return self.back((weights * v[:, None]).sum(2))


def test_attention_per_feature_is_refused_by_name() -> None:
    found = survey(nn.Sequential(MultiheadByFeature()))
    assert found.layers == ()
    assert [refusal.name for refusal in found.refused] == ["0"]
    assert found.refused[0].reason == "its values are not weighted by a matrix product"


class RunsOnce(by_hand.Separate):
    """Attention that cannot be run beside the forward that it is in."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1 or len(x) != 3:
            raise RuntimeError("once, and on a batch of three")
        return self.out_proj(by_hand.attend(*self.heads(x)))


def test_a_module_that_cannot_run_alone_is_read_by_observation():
    model = nn.ModuleDict({"odd": RunsOnce()})
    model.forward = lambda x: model["odd"](x)
    found = survey(model, forward=lambda: model(torch.randn(3, 9, D)))
    assert not found.refused
    (layer,) = found.layers
    assert (layer.name, layer.num_heads, layer.left_out) == ("odd", by_hand.H, "")
    for role, projection in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        assert torch.equal(layer.weight(role).flatten(0, 1), getattr(model["odd"], projection).weight)


class RunsOnceBehindATanh(RunsOnce):
    """The same, where a forward shows no heads either."""

    def heads(self, x, count=by_hand.H):
        return (one.tanh() for one in super().heads(x, count))


def test_a_module_that_cannot_run_alone_and_is_unclear_to_observation_is_refused_for_that():
    model = nn.ModuleDict({"odd": RunsOnceBehindATanh()})
    model.forward = lambda x: model["odd"](x)
    (refusal,) = survey(model, forward=lambda: model(torch.randn(3, 9, D))).refused
    assert refusal.name == "odd"
    assert refusal.reason == (
        "it could not be run by itself, neither with synthetic inputs nor with those of the forward: it raises "
        "RuntimeError (once, and on a batch of three)"
    )
    assert "forward=" not in refusal.message, "one was given"


class TalkingHeads(nn.Module):
    """Heads that a linear map or a convolution of kernel size one mixes, before the softmax, after it, or both."""

    def __init__(self, where: str, *, by_convolution: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.by_convolution = nn.Linear(D, 3 * D), nn.Linear(D, D), by_convolution
        for name in where.split():
            setattr(self, name, nn.Conv2d(4, 4, 1) if by_convolution else nn.Linear(4, 4))

    def _mixed(self, name, x):
        if not hasattr(self, name):
            return x
        return getattr(self, name)(x) if self.by_convolution else getattr(self, name)(x.movedim(1, -1)).movedim(-1, 1)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        weights = self._mixed("after", self._mixed("before", q @ k.mT).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("by_convolution", [False, True], ids=["linear", "convolution"])
@pytest.mark.parametrize("where", ["before", "before after"])
def test_heads_that_a_map_mixes_are_refused_by_the_name_of_that_map(where, by_convolution):
    torch.manual_seed(0)
    model = nn.ModuleDict({"odd": TalkingHeads(where, by_convolution=by_convolution)})
    (refusal,) = survey(model).refused
    assert refusal.reason == "its heads mix: `before` maps the scores of all heads before the softmax"


class BesideAnother(nn.Module):
    """Attends by maps of its own, holds another attention, and takes what nobody can make up."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.to_q, self.to_kv, self.to_out, self.inner = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D), inner

    def forward(self, x, tables):
        x = x * tables["scale"]
        parts = (self.to_q(x), *self.to_kv(x).chunk(2, -1))
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in parts)
        heads = (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)
        return self.inner(self.to_out(heads), tables)


class NeedsNone(by_hand.NanoGPT):
    """It can be run with synthetic inputs."""

    def forward(self, x, tables=None):
        return super().forward(x)


class NeedsTablesToo(by_hand.NanoGPT):
    """As what holds it, it cannot be run with synthetic inputs."""

    def forward(self, x, tables):
        return super().forward(x * tables["scale"])


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.block = BesideAnother(inner)

    def forward(self, batch):
        return self.block(batch["x"], {"scale": torch.ones(1)})


@pytest.mark.parametrize("inner", [NeedsNone, NeedsTablesToo], ids=lambda kind: kind.__name__)
def test_a_module_that_attends_beside_its_attention_child_is_refused_or_read(inner):
    torch.manual_seed(0)
    model = Holder(inner())
    found = survey(model)
    assert {layer.name for layer in found.layers} | {one.name for one in found.refused} == {"block", "block.inner"}
    assert {one.name: one.reason for one in found.refused}["block"] == NOT_RUN
    again = survey(model, forward=lambda: model({"x": torch.randn(2, 6, D)}))  # shows both
    assert [layer.name for layer in again.layers] == ["block", "block.inner"]
    assert again.refused == ()


@pytest.mark.parametrize("name", ["whole", "part"])
def test_an_exported_graph_is_refused_as_such(name):
    x = torch.randn(3, 9, D)
    graph = torch.export.export(nn.Sequential(by_hand.NanoGPT()), (x,)).module()
    model = graph if name == "whole" else nn.Sequential(nn.LayerNorm(D), graph)
    found = survey(model, forward=lambda: model(x))
    assert found.layers == ()
    assert found.refused
    for refusal in found.refused:
        assert "a graph that torch.export made" in refusal.reason
        assert "before the export" in refusal.message


class RoundsKeys(by_hand.Separate):
    """As training for a quantised model rounds what its maps give."""

    def __init__(self, kind):
        super().__init__()
        self.rounding = kind(quant_min=-8, quant_max=7, dtype=torch.qint8)
        self.rounding(torch.randn(64))

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out_proj(by_hand.attend(q, self.rounding(k), v))


class RoundsInputs(RoundsKeys):
    """Rounding in front of the maps, and an activation behind them."""

    def forward(self, x):
        q, k, v = self.heads(self.rounding(x))
        return self.out_proj(by_hand.attend(q, k.tanh(), v))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["FakeQuantize", "FusedMovingAvgObsFakeQuantize"])
def test_keys_from_fake_quantised_features_are_refused_for_that(kind):
    kind = getattr(torch.ao.quantization, kind)
    torch.manual_seed(0)
    (refusal,) = survey(nn.ModuleDict({"odd": RoundsKeys(kind)})).refused
    assert refusal.reason == "its key projection is followed by a fake quantisation"
    (refusal,) = survey(nn.ModuleDict({"odd": RoundsInputs(kind)})).refused
    assert refusal.reason == "its key projection is followed by an activation"
