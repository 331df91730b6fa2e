"""Heads found by what their scores depend on: modules whose heads are known by how they were written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback.attention import survey
from hdi_callback.attention.finding.runtime_verifier import RuntimeVerifier
from hdi_callback.attention.layer.heads import AttentionLayer
from hdi_callback.attention.trace.layers import Found, layers_in
from hdi_callback.attention.trace.run import Traceable

pytestmark = pytest.mark.slow  # `make slow` runs these

H, D = 4, 8
WIDTH = H * D


def read(module: nn.Module, *args: Any) -> list[Found]:
    return layers_in(Traceable(module), args, {})[1]


def find(module: nn.Module, *args: Any) -> AttentionLayer | None:
    found = read(module, *args)
    assert len(found) < 2
    return found[0].layer if found else None


def rows_of(layer: AttentionLayer, role: Any) -> tuple[str, list[list[int]]]:
    part = layer.slices[role]
    return part.parameter, part.index().tolist()


def blocks(start: int = 0, heads: int = H, width: int = D) -> list[list[int]]:
    return [list(range(start + i * width, start + (i + 1) * width)) for i in range(heads)]


def split(x: Tensor, heads: int = H) -> Tensor:
    """``(..., tokens, features)`` -> ``(..., heads, tokens, width)``"""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def joined(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).flatten(-2)


class WindowAttention(nn.Module):
    """Attention over windows of an image, cut within the module, as in Swin and Sam; a bias for each pair of places."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(H, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, _ = x.shape
        tiles = x.view(b, h // 2, 2, w // 2, 2, WIDTH).transpose(2, 3).reshape(-1, 4, WIDTH)
        q, k, v = (split(part) for part in self.mix(tiles).chunk(3, -1))
        out = ((q @ k.mT * D**-0.5) + self.table).softmax(-1) @ v
        return self.back(joined(out)).view(b, h // 2, w // 2, 2, 2, WIDTH).transpose(2, 3).reshape(b, h, w, WIDTH)


def test_heads_of_window_attention_are_found_if_the_module_cuts_the_windows_itself() -> None:
    layer = find(WindowAttention(), torch.randn(3, 4, 4, WIDTH))
    assert layer is not None
    assert rows_of(layer, "query") == ("mix.weight", blocks(0))
    assert rows_of(layer, "key") == ("mix.weight", blocks(WIDTH))
    assert rows_of(layer, "value") == ("mix.weight", blocks(2 * WIDTH))
    assert rows_of(layer, "output") == ("back.weight", blocks())
    assert (layer.num_heads, layer.num_key_heads, layer.head_dim, layer.value_dim) == (H, H, D, D)


def test_heads_of_window_attention_are_found_in_a_real_forward() -> None:
    model = nn.Sequential(WindowAttention(), WindowAttention())
    found = survey(model, forward=lambda: model(torch.randn(2, 4, 4, WIDTH)))
    assert [(layer.name, layer.num_heads) for layer in found.layers] == [("0", H), ("1", H)]


class InterleavedWindows(nn.Module):
    """Every second token is one window, as in Hiera: tokens reach the output projection in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).unflatten(1, (-1, 2)).unflatten(-1, (3, H, D)).permute(3, 0, 4, 2, 1, 5)
        return self.back(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1, 4).reshape(x.shape))


def test_only_the_wrong_claim_is_contradicted_if_windows_are_interleaved() -> None:
    model = nn.Sequential(InterleavedWindows())
    x = torch.randn(2, 8, WIDTH)
    layers = survey(model, forward=lambda: model(x)).layers
    assert [layer.num_heads for layer in layers] == [H]
    swapped = [replace(layer, slices={**layer.slices, "key": layer.slices["value"]}) for layer in layers]
    for claims, names in ((layers, set()), (swapped, {"0"})):
        check = RuntimeVerifier(claims)
        check.arm()
        model(x)
        assert set(check.contradictions()) == names
        check.suspend()


class Grouped(nn.Module):
    """Two key heads for four queries, interleaved by key head as in Falcon, over blocks of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 2 * 4 * D)
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        mixed = self.mix(x).view(b, t // 4, 4, 2, 4, D)
        q = mixed[..., :2, :].flatten(3, 4).transpose(2, 3)
        k, v = (mixed[..., i, :].transpose(2, 3) for i in (2, 3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.back(joined(out).reshape(b, t, WIDTH))


def test_query_heads_interleaved_with_the_key_heads_of_their_group_are_found() -> None:
    layer = find(Grouped(), torch.randn(2, 8, WIDTH))
    assert layer is not None
    assert (layer.num_heads, layer.num_key_heads) == (4, 2)
    assert rows_of(layer, "query")[1] == [list(range(i, i + D)) for i in (0, D, 4 * D, 5 * D)]
    assert rows_of(layer, "key")[1] == [list(range(i, i + D)) for i in (2 * D, 6 * D)]
    assert rows_of(layer, "value")[1] == [list(range(i, i + D)) for i in (3 * D, 7 * D)]


class Plain(nn.Module):
    """Where the others differ from."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.d = nn.Linear(WIDTH, WIDTH)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * D**-0.5).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        return self.d(joined(self.attend(split(self.a(x)), split(self.b(x)), split(self.c(x)))))


class RelativeKeys(Plain):
    """Keys of relative positions, made by a map of their own, beside those of the tokens, as in Transformer-XL."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Linear(WIDTH, WIDTH)
        self.u, self.w = nn.Parameter(torch.randn(H, 1, D)), nn.Parameter(torch.randn(H, 1, D))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        t = x.shape[-2]
        q, k, v = split(self.a(x)), split(self.b(x)), split(self.c(x))
        r = split(self.e(positions))  # (1, H, 2 t - 1, D)
        places = torch.arange(t)[None] - torch.arange(t)[:, None] + t - 1
        by_place = ((q + self.w) @ r.mT).gather(-1, places.expand(*q.shape[:2], t, t))
        return self.d(joined(((q + self.u) @ k.mT + by_place).softmax(-1) @ v))


def test_keys_of_relative_positions_are_distinguished_from_keys_of_tokens() -> None:
    layer = find(RelativeKeys(), torch.randn(3, 6, WIDTH), torch.randn(1, 11, WIDTH))
    assert layer is not None
    assert [rows_of(layer, role)[0] for role in ("query", "key", "value")] == ["a.weight", "b.weight", "c.weight"]
    assert rows_of(layer, "key")[1] == blocks()


def test_keys_with_relative_positions_are_not_claimed_from_sequences_of_one_token() -> None:
    assert find(RelativeKeys(), torch.randn(3, 1, WIDTH), torch.randn(1, 1, WIDTH)) is None


class AddedScores(Plain):
    """A map of the values adds to the scores, another multiplies the bias of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.f = nn.Linear(WIDTH, H), nn.Linear(WIDTH, H)
        self.table = nn.Parameter(torch.randn(H, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.a(x)), split(self.b(x)), split(self.c(x))
        gate = self.f(x).mT[..., None].sigmoid()
        scores = q @ k.mT + self.e(joined(v)).mT[:, :, None] + gate * self.table
        return self.d(joined(scores.softmax(-1) @ v))


def test_terms_added_to_the_scores_are_read_neither_as_keys_nor_as_queries() -> None:
    layer = find(AddedScores(), torch.randn(2, 6, WIDTH))
    assert layer is not None
    assert [rows_of(layer, role)[0] for role in ("query", "key", "value")] == ["a.weight", "b.weight", "c.weight"]


class Pooling(Plain):
    """One learned query for all, as in pooling by attention."""

    def __init__(self, is_mapped: bool) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.is_mapped = is_mapped

    def forward(self, x: Tensor) -> Tensor:
        latent = self.latent.expand(len(x), -1, -1)
        q = split(self.a(latent) if self.is_mapped else latent)
        return self.d(joined(self.attend(q, split(self.b(x)), split(self.c(x)))))


def test_a_learned_query_is_left_out_unless_a_projection_computes_it() -> None:
    without, mapped = find(Pooling(False), torch.randn(3, 6, WIDTH)), find(Pooling(True), torch.randn(3, 6, WIDTH))
    assert without is not None
    assert mapped is not None
    assert "query" not in without.slices
    assert rows_of(mapped, "query") == ("a.weight", blocks())
    assert rows_of(without, "key") == rows_of(mapped, "key") == ("b.weight", blocks())


class PooledQueries(Plain):
    """Queries that are the largest of those of two tokens, as in Hiera."""

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.a(x)).unflatten(-2, (-1, 2)).amax(-2)
        return self.d(joined(self.attend(q, split(self.b(x)), split(self.c(x)))))


def test_a_query_pooled_over_several_tokens_is_left_out() -> None:
    layer = find(PooledQueries(), torch.randn(2, 8, WIDTH))
    assert layer is not None
    assert sorted(layer.slices) == ["key", "output", "value"]
    assert rows_of(layer, "key") == ("b.weight", blocks())


class Reduced(Plain):
    """Keys and values of an image that a convolution has made smaller, as in Pvt."""

    def __init__(self) -> None:
        super().__init__()
        self.smaller = nn.Conv2d(WIDTH, WIDTH, 2, 2)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        few = self.smaller(x.mT.unflatten(-1, (height, width))).flatten(2).mT
        few = self.norm(few)
        return self.d(joined(self.attend(split(self.a(x)), split(self.b(few)), split(self.c(few)))))


def test_heads_are_found_with_fewer_keys_than_queries() -> None:
    layer = find(Reduced(), torch.randn(2, 16, WIDTH), 4, 4)
    assert layer is not None
    assert [rows_of(layer, role)[0] for role in ("query", "key", "value")] == ["a.weight", "b.weight", "c.weight"]


class Pixels(nn.Module):
    """Maps that are convolutions of kernel size one, as in CoAtNet."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.back = nn.Conv2d(WIDTH, 3 * WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).flatten(2).unflatten(1, (3, H, D)).unbind(1)  # (batch, H, D, pixels)
        return self.back((v @ (k.mT @ q).softmax(-2)).flatten(1, 2).unflatten(-1, x.shape[2:]))


def test_heads_are_found_with_projections_by_pointwise_convolutions() -> None:
    layer = find(Pixels(), torch.randn(2, WIDTH, 3, 3))
    assert layer is not None
    assert rows_of(layer, "query") == ("mix.weight", blocks())
    assert rows_of(layer, "key") == ("mix.weight", blocks(WIDTH))
    assert tuple(layer.weight("key").shape) == (H, D, WIDTH)


class Gated(Plain):
    """Gates, and a memory of the values that is added to what attention gives."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Linear(WIDTH, WIDTH)
        self.memory = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        v = self.c(x)
        out = joined(self.attend(split(self.a(x)), split(self.b(x)), split(v))) * self.e(x).sigmoid()
        return self.d(out + self.memory(v.mT).mT)


def test_values_are_found_beside_gates_and_terms_added_to_the_outputs() -> None:
    layer = find(Gated(), torch.randn(2, 6, WIDTH))
    assert layer is not None
    assert rows_of(layer, "value") == ("c.weight", blocks())
    assert "output" not in layer.slices, "the output projection takes the memory as well"


class Smeared(Plain):
    """Keys that a convolution spreads over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.smear = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k = self.smear(self.b(x).mT)[..., : x.shape[1]].mT
        return self.d(joined(self.attend(split(self.a(x)), split(k), split(self.c(x)))))


class SmearedValues(Plain):
    """Values that a convolution spreads over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.smear = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        v = self.smear(self.c(x).mT).mT
        return self.d(joined(self.attend(split(self.a(x)), split(self.b(x)), split(v))))


@pytest.mark.parametrize("kind", [Smeared, SmearedValues])
def test_keys_and_values_that_combine_several_tokens_are_read_from_the_rows_of_their_head(
    kind: type[nn.Module],
) -> None:
    layer = find(kind(), torch.randn(3, 7, WIDTH))
    assert layer is not None
    assert [rows_of(layer, role) for role in ("key", "value")] == [("b.weight", blocks()), ("c.weight", blocks())]
    assert ("keys of several tokens" in layer.kind) == (kind is Smeared)


def test_keys_that_mix_heads_over_several_tokens_are_refused() -> None:
    module = Smeared()
    module.smear = nn.Conv1d(WIDTH, WIDTH, 4, padding=3)
    (found,) = read(module, torch.randn(3, 7, WIDTH))
    assert "heads share or mix features" in found.reason


# --- what must not be taken for heads


class SummedKeys(Plain):
    """A key that is the sum of two maps of two inputs, as in conditional DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        k = self.b(x) + self.e(positions)
        return self.d(joined(self.attend(split(self.a(x)), split(k), split(self.c(x)))))


class TalkingHeads(Plain):
    """Scores of one head are sums of those of others."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(H, H))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("gh,bhts->bgts", self.mixing, q @ k.mT).softmax(-1) @ v


class Differential(Plain):
    """One softmax less another."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one, other = ((q[:, i::2] @ k[:, i::2].mT).softmax(-1) for i in (0, 1))
        return torch.cat([one - 0.3 * other] * 2, 1) @ v


class OverFeatures(Plain):
    """Scores of features with each other, as in XCiT."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q.mT @ k).softmax(-1) @ v.mT).mT


class Activated(Plain):
    """Keys behind an activation."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, F.silu(k), v)


class MixedOutputs(Plain):
    """To the outputs of a head those of its neighbour are added."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.attend(split(self.a(x)), split(self.b(x)), split(self.c(x)))
        return self.d(joined(out + out.roll(1, 1)))


class Vectors(Plain):
    """Point Transformer (Zhao et al. 2021): a weight for each feature, which maps make of differences of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.f = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.a(x)[:, :, None] - self.b(x)[:, None]
        weights = self.f(self.e(pairs).relu()).softmax(2)  # (batch, queries, keys, features)
        return self.d(torch.einsum("bijc,bjc->bic", weights, self.c(x)))


class OfEachPlace(Plain):
    """Values of each place are made by a matrix of its own, as those of each codebook in Moshi."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(7, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        v = (x[:, :, None] @ self.stack.mT[None]).squeeze(2)
        return self.d(joined(self.attend(split(self.a(x)), split(self.b(x)), split(v))))


class Signed(Plain):
    """Scores are divided by the sum of their sizes, in place of a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        scores = split(self.a(x)) @ split(self.b(x)).mT
        return self.d(joined(F.normalize(scores, p=1.0, dim=-1) @ split(self.c(x))))


class PartsOfKeys(Plain):
    """Keys of contents and keys of positions side by side, as in Conditional DETR (Meng et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.f = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        place = x.roll(1, 1)
        q = torch.cat([split(self.a(x)), split(self.f(place))], -1)
        k = torch.cat([split(self.b(x)), split(self.e(place))], -1)
        return self.d(joined(self.attend(q, k, split(self.c(x)))))


class OutputsToExperts(Plain):
    """Half of the tokens have an output projection of their own, as experts of JetMoe (Shen et al. 2024) have."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = joined(self.attend(split(self.a(x)), split(self.b(x)), split(self.c(x))))
        halves = (out + out.roll(D, -1)).split((3, 4), 1)
        return torch.cat([F.linear(half, matrix) for half, matrix in zip(halves, self.stack)], 1)


class ToExperts(Plain):
    """Each token is weighed by the two best of its gates, and the forward counts on two."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.e(x).topk(2, dim=-1).values.unbind(-1)
        out = self.attend(split(self.a(x)), split(self.b(x)), split(self.c(x)))
        return self.d(joined(out)) * (first + second)[..., None]


def test_heads_are_found_in_a_forward_that_needs_exactly_k_results_of_topk() -> None:
    layer = find(ToExperts(), torch.randn(3, 7, WIDTH))
    assert layer is not None
    assert rows_of(layer, "key") == ("b.weight", blocks())


class Blocks(Plain):
    """Keys come in blocks, whose scores are put together before one softmax, as in BigBird (Zaheer et al. 2020)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part(x)) for part in (self.a, self.b, self.c))
        scores = torch.cat([q @ k[:, :, :3].mT, q @ k[:, :, 3:].mT], -1).softmax(-1)
        return self.d(joined(scores[..., :3] @ v[:, :, :3] + scores[..., 3:] @ v[:, :, 3:]))


def test_scores_concatenated_from_blocks_of_keys_belong_to_one_head() -> None:
    layer = find(Blocks(), torch.randn(3, 7, WIDTH))
    assert layer is not None
    for role, name in (("query", "a"), ("key", "b"), ("value", "c")):
        assert rows_of(layer, role) == (f"{name}.weight", blocks())


class BothWays(Plain):
    """Scores that are used from both sides, as in Grounding DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.f = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = split(self.a(x)) @ split(self.b(y)).mT
        there, back = scores.softmax(-1) @ split(self.c(y)), scores.mT.softmax(-1) @ split(self.e(x))
        return self.d(joined(there)), self.f(joined(back))


class Twice(nn.Module):
    """Two attentions, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Plain(), Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


class TwoSources(Plain):
    """Two attentions of one query, which are added."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.f = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = split(self.a(x))
        both = self.attend(q, split(self.b(x)), split(self.c(x))) + self.attend(q, split(self.e(y)), split(self.f(y)))
        return self.d(joined(both))


class Routed(nn.Module):
    """A softmax over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, H), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x).unflatten(-1, (H, D)) * self.gate(x).softmax(-1)[..., None]).flatten(-2))


class Fed(Plain):
    """Keys of keys: the weights of a head are not its own alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(joined(self.attend(split(self.a(x)), split(self.b(self.c(x))), split(self.c(x)))))


@pytest.mark.parametrize(
    ("kind", "inputs", "reason"),
    [
        (TalkingHeads, 1, "heads mix"),
        (Differential, 1, "computed from several softmaxes"),
        (OverFeatures, 1, "of a feature and not of a token"),
        (Activated, 1, "followed by an activation"),
        (MixedOutputs, 1, "mixed or normalised"),
        (Vectors, 1, "not products of queries and keys"),
        (Signed, 1, "signed scores divided by the sum of their absolute values"),
        (OutputsToExperts, 1, "goes to one of several matrices of `stack`"),
        (OfEachPlace, 1, "each token position has a value matrix of its own in `stack`"),
    ],
)
def test_a_module_without_separate_heads_is_refused_with_the_reason(
    kind: type[nn.Module], inputs: int, reason: str
) -> None:
    assert find(Plain(), torch.randn(3, 7, WIDTH)) is not None
    (found,) = read(kind(), *(torch.randn(3, 7, WIDTH) for _ in range(inputs)))
    assert found.layer is None
    assert reason in found.reason


def test_a_term_added_to_the_keys_is_reported_as_left_out() -> None:
    (found,) = read(SummedKeys(), torch.randn(3, 7, WIDTH), torch.randn(3, 7, WIDTH))
    assert found.layer is not None
    assert found.layer.left_out == "what `e` adds to its keys"


def test_positional_key_features_concatenated_with_content_are_reported_as_left_out() -> None:
    layer = find(PartsOfKeys(), torch.randn(3, 7, WIDTH))
    assert layer is not None
    assert layer.left_out == "the features of its keys that come from `e`"
    assert [rows_of(layer, role) for role in ("query", "key")] == [("a.weight", blocks()), ("b.weight", blocks())]


def test_a_router_is_not_claimed_as_attention() -> None:
    assert read(Routed(), torch.randn(3, 7, WIDTH)) == []


def test_several_attentions_are_several_layers() -> None:
    x, y = torch.randn(3, 7, WIDTH), torch.randn(3, 7, WIDTH)
    both = [one.layer for one in read(BothWays(), x, y)]
    assert [rows_of(layer, "key")[0] for layer in both] == ["b.weight", "a.weight"]
    assert [rows_of(layer, "output")[0] for layer in both] == ["d.weight", "f.weight"]
    assert [one.path for one in read(Twice(), x)] == ["one", "other"]
    added = [one.layer for one in read(TwoSources(), x, y)]
    assert [rows_of(layer, "key")[0] for layer in added] == ["b.weight", "e.weight"]
    assert [layer.output_projection for layer in added] == [None, None], "it is given the sum of both"


def test_keys_projected_twice_are_read_as_the_product_of_both_weights() -> None:
    module = Fed()
    layer = find(module, torch.randn(3, 7, WIDTH))
    assert layer is not None
    expected = (module.b.weight @ module.c.weight).view(H, D, WIDTH)
    assert torch.allclose(layer.weight("key"), expected, atol=1e-5)
    assert torch.equal(layer.weight("value"), module.c.weight.view(H, D, WIDTH))


def test_the_refusal_has_the_reason_from_the_forward_that_was_run() -> None:
    class CrossAttention(SummedKeys):
        pass

    model = CrossAttention()
    x = torch.randn(3, 7, WIDTH)
    (refusal,) = survey(nn.ModuleDict({"cross": model}), forward=lambda: model(x, x)).refused
    assert refusal.reason == "in the forward that was run, its keys are sums of the outputs of `b` and `e`"


def test_a_single_head_is_a_layer_of_one() -> None:
    class One(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.attend(self.a(x), self.b(x), self.c(x)))

    layer = find(One(), torch.randn(3, 7, WIDTH))
    assert layer is not None
    assert (layer.num_heads, layer.head_dim) == (1, WIDTH)


def test_the_module_the_random_state_and_the_inputs_are_not_touched() -> None:
    module, x = WindowAttention(), torch.randn(3, 4, 4, WIDTH)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    kept, state = x.clone(), torch.get_rng_state()
    assert find(module, x) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, kept)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
