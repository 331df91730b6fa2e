"""Heads that no layout knows, found by behaviour and compared with what attention really received."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback.attention import HeadSlice, RuntimeVerifier, Survey, find_attention, survey
from hdi_callback.attention.trace import kinds
from hdi_callback.errors import UnsupportedAttentionWarning
from tests.attention import models as by_hand
from tests.attention.models import D, H, attend, refusal_of
from tests.attention.sweep.judge import Finding, claim_of, judge, merged
from tests.attention.witness import witness

B, T = 41, 6


class Nameless(nn.Module):
    """Nothing that a name could tell; the heads' parts lie in blocks, as CodeGen has them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, 3 * D), nn.Linear(D, D, bias=False)

    def forward(self, x):
        v, q, k = (part.flatten(2).unflatten(-1, (H, 8)) for part in self.a(x).unflatten(-1, (2, 3, D // 2)).unbind(-2))
        return self.b(attend(q, k, v))


class Gated(nn.Module):
    """Queries and gates of a head side by side, as Qwen3-Next has them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(D, 2 * D), nn.Linear(D, 16), nn.Linear(D, 16), nn.Linear(D, D)

    def forward(self, x):
        q, gate = self.a(x).unflatten(-1, (H, 16)).chunk(2, -1)
        k, v = (proj(x).unflatten(-1, (2, 8)).repeat_interleave(2, 2) for proj in (self.b, self.c))
        return self.d(attend(q, k, v) * gate.flatten(2).sigmoid())


class Wider(nn.Module):
    """Values wider than keys, and a bias for each pair of positions."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, H * (4 + 4 + 12)), nn.Linear(H * 12, D)
        self.positions = nn.Embedding(64, H)

    def forward(self, x):
        q, k, v = self.a(x).unflatten(-1, (H, 20)).transpose(1, 2).split([4, 4, 12], -1)
        steps = torch.arange(x.shape[1])
        bias = self.positions((steps[:, None] - steps).clamp(-31, 31) + 31).permute(2, 0, 1)
        return self.b(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Keys and values from a latent of eight features behind a norm, and a key that all heads share."""

    def __init__(self, norm: type[nn.Module] | None = nn.RMSNorm):
        super().__init__()
        self.q, self.down, self.up = nn.Linear(D, H * 10), nn.Linear(D, 12), nn.Linear(8, H * 14)
        self.between = nn.Identity() if norm is None else norm(8)
        self.out = nn.Linear(H * 8, D)
        if norm is not None:
            nn.init.uniform_(self.between.weight, 0.5, 2)

    def forward(self, x):
        latent, shared = self.down(x).split([8, 4], -1)
        k, v = self.up(self.between(latent)).unflatten(-1, (H, 14)).split([6, 8], -1)
        k = torch.cat([k, shared[:, :, None].expand(-1, -1, H, -1)], -1)
        return self.out(attend(self.q(x).unflatten(-1, (H, 10)), k, v))


class Within(nn.Module):
    """A whole block in one module, its MLP included."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three, self.four = (
            nn.Linear(D, 3 * D),
            nn.Linear(D, D),
            nn.Linear(D, 64),
            nn.Linear(64, D),
        )

    def forward(self, x):
        q, k, v = self.one(x).unflatten(-1, (3, H, 8)).unbind(2)
        x = x + self.two(attend(q, k, v))
        return x + self.four(self.three(x).relu())


class NormedOverAll(nn.Module):
    """A LayerNorm over the keys of all heads, or of each."""

    def __init__(self, width: int):
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))
        self.q_norm, self.k_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        for norm in (self.q_norm, self.k_norm):
            nn.init.uniform_(norm.weight, 0.5, 2)

    def forward(self, x):
        q, k = (
            norm(proj(x).unflatten(-1, (-1, norm.weight.numel()))).flatten(2).unflatten(-1, (H, -1))
            for norm, proj in ((self.q_norm, self.q_proj), (self.k_norm, self.k_proj))
        )
        return self.out_proj(attend(q, k, self.v_proj(x).unflatten(-1, (H, -1))))


def judged(module: nn.Module, width: int = D) -> Finding:
    torch.manual_seed(0)
    (layer,) = find_attention(nn.Sequential(module))
    with torch.no_grad(), witness(module.eval()) as observed:
        module(torch.randn(B, T, width))
    (computation,) = merged(observed.computations, B)
    return judge(claim_of(layer), observed, computation, B)


FOUND = {
    by_hand.Interleaved: (4, 4, 8, 8),
    by_hand.InterleavedBySplit: (4, 4, 8, 8),
    by_hand.KeysFirst: (4, 4, 8, 8),
    by_hand.ValuesFirst: (4, 4, 8, 8),
    by_hand.Strided: (4, 4, 8, 8),
    by_hand.TwiceAsMany: (8, 8, 4, 4),
    by_hand.HalfAsMany: (2, 2, 16, 16),
    Nameless: (4, 4, 8, 8),
    Gated: (4, 2, 8, 8),
    Wider: (4, 4, 4, 12),
    Within: (4, 4, 8, 8),
}


@pytest.mark.parametrize("kind", FOUND, ids=lambda kind: kind.__name__)
def test_found_heads_are_those_that_attention_receives(kind):
    torch.manual_seed(0)
    finding = judged(kind())
    assert finding.is_right, finding.reason
    assert (finding.heads, finding.key_heads, finding.key_width, finding.value_width) == FOUND[kind]


@pytest.mark.parametrize("norm", [None, nn.RMSNorm])
def test_latent_keys_are_the_product_of_both_maps(norm):
    torch.manual_seed(0)
    module = Latent(norm)
    (layer,) = find_attention(nn.Sequential(module))
    assert (layer.num_heads, layer.head_dim, layer.value_dim) == (4, 6, 8)
    gain = torch.ones(8) if norm is None else module.between.weight
    up = module.up.weight.view(H, 14, 8)
    expected = (up * gain) @ module.down.weight[:8]
    assert torch.allclose(layer.weight("key"), expected[:, :6], atol=1e-6)
    assert torch.allclose(layer.weight("value"), expected[:, 6:], atol=1e-6)
    assert torch.equal(layer.weight("query"), module.q.weight.view(H, 10, D)[:, :6])
    assert "without the part that all heads share" in layer.kind


def test_the_mean_that_a_norm_of_the_latent_subtracts_is_subtracted_from_the_inner_rows():
    torch.manual_seed(0)
    module = Latent(nn.LayerNorm)
    (layer,) = find_attention(nn.Sequential(module))
    down = module.down.weight[:8] - module.down.weight[:8].mean(0)
    expected = (module.up.weight.view(H, 14, 8) * module.between.weight) @ down
    assert torch.allclose(layer.weight("key"), expected[:, :6], atol=1e-6)
    assert torch.allclose(layer.weight("value"), expected[:, 6:], atol=1e-6)


@pytest.mark.parametrize("width", [8, 32])
def test_the_mean_that_a_layer_norm_subtracts_is_subtracted_from_the_rows(width):
    torch.manual_seed(0)
    module = NormedOverAll(width)
    finding = judged(module)
    assert finding.is_right, finding.reason
    (layer,) = find_attention(nn.Sequential(module))
    # Keys before the gain, from the weight alone: what the norm really gives for an input is along them.
    of_tokens = layer.weight("key").detach() @ torch.randn(D, 100)  # (H, 8, 100)
    mean = of_tokens.mean(1) if width == 8 else of_tokens.mean((0, 1))
    assert mean.abs().max() < 1e-5


REJECTED = {
    by_hand.KeysMixed: "heads share or mix",
    by_hand.ValuesSquashed: "its value projection is followed by an activation",
    by_hand.KeysIgnored: "no query in its scores meets several keys",
    by_hand.OverChannels: "each of its keys is of a feature and not of a token, as in attention over channels",
    by_hand.GroupsOfTwoSizes: "its keys are not shared by adjacent heads in groups of one size",
}


@pytest.mark.parametrize("kind", REJECTED, ids=lambda kind: kind.__name__)
def test_modules_without_separate_heads_are_refused_with_the_reason(kind):
    assert REJECTED[kind] in refusal_of(kind())


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D)),
        nn.LSTM(D, D, batch_first=True),
        nn.Bilinear(D, D, D),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_without_attention_have_no_layer_and_no_refusal(module):
    assert survey(nn.Sequential(module)) == Survey((), ())


def test_a_convolution_over_tokens_between_linear_maps_is_not_claimed_as_attention():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x):
            y = self.a(x)
            return self.b((y + y.roll(1, 1) + y.roll(2, 1)) / 3)

    assert survey(nn.Sequential(Mixer())) == Survey((), ())


@pytest.mark.parametrize(
    "index",
    [
        torch.arange(32).view(4, 8),
        torch.arange(32).view(8, 4).mT,
        torch.arange(96).view(4, 3, 8)[:, 1],
        torch.arange(96).view(2, 3, 2, 8)[:, 2].flatten(0, 1),
        torch.arange(3, 8)[None],
        torch.arange(4)[:, None],
        torch.arange(32).view(4, 8).flip(0),
        torch.tensor([[0, 1], [2, 3], [7, 8]]),
    ],
)
def test_features_in_any_order_are_described_and_read(index: Tensor):
    module = nn.Linear(D, 96)
    found = HeadSlice.of_features(module, "weight", index)
    assert torch.equal(found.index(), index)
    assert torch.equal(found.rows(), module.weight[index])
    assert torch.equal(HeadSlice.of_features(nn.Linear(96, D), "weight", index).index(), index)


def test_features_in_a_regular_order_are_read_as_a_live_view():
    module = nn.Linear(D, 96)
    found = HeadSlice.of_features(module, "weight", torch.arange(96).view(4, 3, 8)[:, 1])
    assert found.order is None
    assert found.rows().untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr()


class NeedsTables(by_hand.Interleaved):
    """Inputs that nobody can make up."""

    def forward(self, x, tables):
        return super().forward(x * tables["scale"])


def test_heads_that_synthetic_inputs_cannot_show_are_found_in_a_real_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = NeedsTables()

        def forward(self, batch):
            return self.attn(batch["x"], {"scale": torch.ones(1)})

    torch.manual_seed(0)
    model = Model()
    found = survey(model)
    assert [refusal.name for refusal in found.refused] == [place.name for place in found.undecided] == ["attn"]
    assert found.refused[0].reason == "it could not be run with synthetic inputs"
    state = torch.get_rng_state()
    batch = {"x": torch.randn(5, 11, D, generator=torch.Generator().manual_seed(0))}
    (layer,) = find_attention(model, forward=lambda: model(batch))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.attn._forward_pre_hooks
    with torch.no_grad(), witness(model) as observed:
        model({"x": torch.randn(B, T, D)})
    (computation,) = merged(observed.computations, B)
    assert judge(claim_of(layer), observed, computation, B).is_right


def test_the_forward_argument_is_run_once_and_without_gradients():
    model, ran = nn.Sequential(by_hand.NanoGPT()), []

    def forward():
        ran.append(torch.is_grad_enabled())
        return model(torch.randn(2, 5, D))

    assert len(find_attention(model, forward=forward)) == 1
    assert ran == [False]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class TwoWays(by_hand.Separate):
    """Made-up inputs bring it down one way, real ones down another, on which heads attend with other keys."""

    def forward(self, x, is_turned=False):
        q, k, v = self.heads(x)
        return self.out_proj(attend(q, k.flip(2) if is_turned else k, v))


def test_a_real_forward_corrects_heads_found_with_synthetic_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = TwoWays()

        def forward(self, batch):
            return self.attn(batch["x"], True)

    torch.manual_seed(0)
    model = Model()
    keys = model.attn.k_proj.weight.view(H, -1, D)
    (layer,) = find_attention(model)
    assert torch.equal(layer.weight("key"), keys)
    (layer,) = find_attention(model, forward=lambda: model({"x": torch.randn(2, 9, D)}))
    assert torch.equal(layer.weight("key"), keys.flip(0))


@pytest.mark.parametrize("depth", [2, 6])
def test_equal_layers_of_a_deeper_model_are_traced_once(depth, monkeypatch):
    read = []
    layers_in = kinds.layers_in
    monkeypatch.setattr(kinds, "layers_in", lambda *args, **more: read.append(args[3]) or layers_in(*args, **more))
    model = nn.Sequential(
        nn.Embedding(9, D), *(nn.Sequential(by_hand.NanoGPT(), nn.Linear(D, D)) for _ in range(depth))
    )
    assert len(find_attention(model)) == depth
    assert set(read) <= {"1.0", "1", ""}, "the first attention, what holds it, and the whole"
    assert read.count("1.0") == 1


class TwoStreams(by_hand.Separate):
    """Attends to tokens of a second stream, by maps of their own, where there is one."""

    def __init__(self):
        super().__init__()
        self.add_k, self.add_v = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, second=None):
        q, k, v = self.heads(x)
        if second is not None:
            more = (part(second).unflatten(-1, (H, -1)) for part in (self.add_k, self.add_v))
            k, v = (torch.cat(both, 1) for both in zip((k, v), more))
        return self.out_proj(attend(q, k, v))


def test_a_second_stream_that_only_a_real_forward_shows_is_reported_as_left_out():
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": TwoStreams()})
    x, second = torch.randn(2, 7, D), torch.randn(2, 5, D)
    with pytest.warns(
        UnsupportedAttentionWarning, match="read in part: without .*second token stream.*`add_k` and `add_v`"
    ):
        (layer,) = find_attention(model, forward=lambda: model["attn"](x, second))
    assert torch.equal(layer.weight("key"), model["attn"].k_proj.weight.view(H, -1, D))


class SecondStreamOfSums(nn.Module):
    """A second stream whose keys and values are sums of what two maps give each."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))
        self.one_k, self.other_k, self.one_v, self.other_v = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x, second):
        keys = torch.cat([self.k_proj(x), self.one_k(second) + self.other_k(second)], 1)
        values = torch.cat([self.v_proj(x), self.one_v(second) + self.other_v(second)], 1)
        return self.out_proj(attend(*(one.unflatten(-1, (H, -1)) for one in (self.q_proj(x), keys, values))))


def test_a_second_stream_whose_keys_are_sums_is_left_out_and_the_first_is_read():
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": SecondStreamOfSums()})
    x, second = torch.randn(2, 7, D), torch.randn(2, 5, D)
    with pytest.warns(UnsupportedAttentionWarning, match="second token stream.*`one_k`.*`other_k`"):
        (layer,) = find_attention(model, forward=lambda: model["attn"](x, second))
    assert torch.equal(layer.weight("key"), model["attn"].k_proj.weight.view(H, -1, D))


class TextFirst(nn.Module):
    """Two streams that attend to each other, text before image, each by maps of its own; the image is asked first."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(D, D) for _ in range(4))
        self.add_q, self.add_k, self.add_v, self.add_out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, image, text):
        of_image = [part(image).unflatten(-1, (H, -1)) for part in (self.to_q, self.to_k, self.to_v)]
        of_text = [part(text).unflatten(-1, (H, -1)) for part in (self.add_q, self.add_k, self.add_v)]
        both = attend(*(torch.cat(pair, 1) for pair in zip(of_text, of_image)))
        text, image = both.split([text.shape[1], image.shape[1]], 1)
        return self.to_out(image), self.add_out(text)


def test_two_streams_with_joint_attention_are_a_layer_each():
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": TextFirst()})
    image, text = torch.randn(2, 7, D), torch.randn(2, 5, D)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = {one.name: one for one in find_attention(model, forward=lambda: model["attn"](image, text))}
    assert sorted(layers) == ["attn.add_k", "attn.to_k"]
    for stream, layer in ((name.removeprefix("attn.")[:-2], layer) for name, layer in layers.items()):
        assert "one of two token streams that attend together" in layer.kind
        for role in ("query", "key", "value"):
            weight = model["attn"].get_parameter(f"{stream}_{role[0]}.weight")
            assert torch.equal(layer.weight(role), weight.view(H, -1, D)), role
        weight = model["attn"].get_parameter(f"{stream}_out.weight")
        assert torch.equal(layer.weight("output"), weight.T.reshape(H, -1, D))


class OfTwoKinds(TextFirst):
    """One sequence, some of whose tokens have maps of their own: both streams are parts of one input."""

    def forward(self, x):
        is_text = torch.zeros(x.shape[1], dtype=torch.bool)
        is_text[: 3 if self.is_text_first else 0] = True
        is_text[4:6] = True
        both = []
        for role in "qkv":
            mixed = torch.empty_like(x)
            mixed[:, is_text] = getattr(self, f"add_{role}")(x[:, is_text])
            mixed[:, ~is_text] = getattr(self, f"to_{role}")(x[:, ~is_text])
            both.append(mixed.unflatten(-1, (H, -1)))
        made, out = attend(*both), torch.empty_like(x)
        out[:, is_text], out[:, ~is_text] = self.add_out(made[:, is_text]), self.to_out(made[:, ~is_text])
        return out

    is_text_first = True


@pytest.mark.parametrize("is_text_first", [False, True])
def test_queries_of_each_token_type_are_paired_with_the_keys_of_that_type(is_text_first):
    torch.manual_seed(0)
    model = nn.Sequential(OfTwoKinds())
    model[0].is_text_first = is_text_first
    layers = {one.name: one for one in find_attention(model)}
    assert sorted(layers) == ["0.add_k", "0.to_k"]
    for stream, layer in ((name.removeprefix("0.")[:-2], layer) for name, layer in layers.items()):
        for role in ("query", "key", "value"):
            weight = model[0].get_parameter(f"{stream}_{role[0]}.weight")
            assert torch.equal(layer.weight(role), weight.view(H, -1, D)), (stream, role)
        weight = model[0].get_parameter(f"{stream}_out.weight")
        assert torch.equal(layer.weight("output"), weight.T.reshape(H, -1, D)), stream


class StridedText(TextFirst):
    """The same code, but for the heads of the second stream, whose features lie apart."""

    def forward(self, image, text):
        of_image = [part(image).unflatten(-1, (H, -1)) for part in (self.to_q, self.to_k, self.to_v)]
        of_text = [part(text).unflatten(-1, (-1, H)).mT for part in (self.add_q, self.add_k, self.add_v)]
        both = attend(*(torch.cat(pair, 1) for pair in zip(of_text, of_image)))
        text, image = both.split([text.shape[1], image.shape[1]], 1)
        return self.to_out(image), self.add_out(text)


@pytest.mark.parametrize("kind", [TextFirst, StridedText])
def test_a_wrong_claim_about_the_second_stream_is_contradicted_by_a_forward(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind())
    streams = {one.name: one for one in find_attention(model)}
    other = {one.name: one for one in find_attention(nn.Sequential(TextFirst()))}["0.add_k"]
    claim = replace(streams["0.add_k"], slices={r: s.moved_to(model[0]) for r, s in other.slices.items()})
    verifier = RuntimeVerifier([streams["0.to_k"], claim])
    verifier.arm()
    model[0](torch.randn(2, 7, D), torch.randn(2, 5, D))
    verifier.suspend()
    assert list(verifier.contradictions()) == ([] if kind is TextFirst else ["0.add_k"])


class FromIds(nn.Module):
    """Its inputs are ids of tokens, whose attention lies in the model itself."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(99, D), nn.Embedding(16, D)
        self.one, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[-1]))
        q, k, v = (part.unflatten(-1, (H, -1)) for part in self.one(x).chunk(3, -1))
        return self.out(attend(q, k, v))


def test_attention_that_starts_from_token_ids_is_read():
    torch.manual_seed(0)
    model = nn.ModuleDict({"whole": FromIds()})
    ids = torch.randint(99, (2, 7))
    (layer,) = find_attention(model, forward=lambda: model["whole"](ids))
    assert (layer.name, layer.num_heads) == ("whole", H)
    assert torch.equal(layer.weight("key"), model["whole"].one.weight[D : 2 * D].view(H, -1, D))


class SelfOrCross(by_hand.Separate):
    """Cuts the rows of its fused map in one way for attention to itself, in another for attention to others."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3 * D, D) * 0.1)

    def forward(self, query, key, value):
        if torch.equal(query, key):
            q, k, v = F.linear(query, self.rows).unflatten(-1, (H, -1)).chunk(3, -1)
        else:
            parts = zip((query, key, value), self.rows.chunk(3))
            q, k, v = (F.linear(x, rows).unflatten(-1, (H, -1)) for x, rows in parts)
        return self.out_proj(attend(q, k, v))


def test_heads_that_differ_between_self_and_cross_attention_are_decided_by_the_real_forward():
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": SelfOrCross()})
    (refusal,) = survey(model).refused
    assert "if queries, keys and values come from different tokens" in refusal.reason
    x, y = torch.randn(2, 7, D), torch.randn(2, 7, D)
    rows = model["attn"].rows
    (layer,) = find_attention(model, forward=lambda: model["attn"](x, x, x))
    assert torch.equal(layer.weight("key"), rows.view(H, 3, -1, D)[:, 1])
    (layer,) = find_attention(model, forward=lambda: model["attn"](x, y, y))
    assert torch.equal(layer.weight("key"), rows[D : 2 * D].view(H, -1, D))


def test_equal_layers_are_traced_once_and_each_reads_its_own_weights(monkeypatch):
    read = []
    layers_in = kinds.layers_in
    monkeypatch.setattr(kinds, "layers_in", lambda *args, **kwargs: read.append(args[3]) or layers_in(*args, **kwargs))
    torch.manual_seed(0)
    model = nn.Sequential(*(Nameless() for _ in range(3)), *(Within() for _ in range(2)))
    layers = find_attention(model)
    assert [layer.name for layer in layers] == ["0", "1", "2", "3", "4"]
    assert [name for name in read if name] == ["0", "3"]
    for layer, module in zip(layers, model):
        assert layer.module is module
        fused = module.a if isinstance(module, Nameless) else module.one
        assert torch.equal(layer.weight("key"), fused.weight[layer.slices["key"].index()])


class Turned(Nameless):
    """The same class and shapes, and another order of the rows."""

    def __init__(self, is_turned: bool):
        super().__init__()
        self.is_turned = is_turned

    def forward(self, x):
        if not self.is_turned:
            return super().forward(x)
        q, k, v = self.a(x).unflatten(-1, (3, H, 8)).unbind(-3)
        return self.b(attend(q, k, v))


def test_heads_are_not_carried_over_to_a_module_of_the_class_that_computes_differently():
    torch.manual_seed(0)
    model = nn.Sequential(Turned(False), Turned(True))
    first, second = find_attention(model)
    assert first.slices["key"].index().tolist() != second.slices["key"].index().tolist()
    assert torch.equal(second.weight("key"), model[1].a.weight.view(3, H, 8, D)[1])
