"""What is written without matrix products, mapped over heads, nested or compiled is run plainly, and read as it is.

Every kind is written twice, with the heads side by side and with their features strided: the same code otherwise, so
that what is read must come from the run. Which rows are whose, `tests.attention.wild.proof` shows by the model alone
where it can see the softmax.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback.attention import HeadSlice, RuntimeVerifier, find_attention, survey
from tests.attention.wild.idioms import attend, join
from tests.attention.wild.proof import contradictions
from tests.attention.wild.truth import MODEL, WIDTH, Case, H, separate
from tests.attention.wild.verdict import RIGHT, judge


class Written(nn.Module):
    """Four maps; heads are side by side, or strided."""

    is_strided = False

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        sizes = (WIDTH, H) if self.is_strided else (H, WIDTH)
        x = x.unflatten(-1, sizes)
        return (x.transpose(-2, -1) if self.is_strided else x).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(self.attend(*(self.split(one(x)) for one in (self.q, self.k, self.v)))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


class Sums(Written):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q[:, :, :, None] * k[:, :, None]).sum(-1).softmax(-1)
        return (weights[..., None] * v[:, :, None]).sum(dim=-2)


class SumsOfExpanded(Written):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        pairs = q.unsqueeze(3).expand(-1, -1, -1, n, -1) * k.unsqueeze(2).expand(-1, -1, n, -1, -1)
        return F.softmax(torch.sum(pairs, -1, keepdim=True).squeeze(-1), -1) @ v


class Cosines(Written):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (5 * F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)).softmax(-1) @ v


class Distances(Written):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (-torch.cdist(q, k)).softmax(-1) @ v


class Sorted(Written):
    """Keys and values in the order of a number of each key, taken back in the end."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        order = k.sum(-1).argsort(-1)
        k, v = (one.gather(2, order[..., None].expand_as(one)) for one in (k, v))
        return attend(q, k, v)


class FewAsk(Written):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        top = (q @ k.mT).amax(-1).topk(3, sorted=False).indices[..., None].expand(-1, -1, -1, q.shape[-1])
        asked = attend(q.gather(2, top), k, v)
        return v.mean(2, keepdim=True).expand_as(q).scatter(2, top, asked)


class OneSequenceAtATime(Written):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda one: super(OneSequenceAtATime, self).forward(one[None])[0])(x)


class OneHeadAtATime(Written):
    """Mapped over the heads, which are the second dim of what goes in and come out last but one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.func.vmap(attend, in_dims=1, out_dims=-2)(q, k, v).transpose(-3, -2)


class Nested(Written):
    def forward(self, x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(list(x), layout=torch.jagged)
        q, k, v = (self.apart(one(nested)) for one in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.o(out).to_padded_tensor(0.0)

    def apart(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (WIDTH, H)).transpose(-2, -1) if self.is_strided else x.unflatten(-1, (H, WIDTH))
        return x.contiguous().transpose(1, 2)  # else no kernel takes it


KINDS = [Sums, SumsOfExpanded, Cosines, Distances, Sorted, FewAsk, OneSequenceAtATime, OneHeadAtATime, Nested]
PROVED = [Sums, SumsOfExpanded, Cosines, Distances]  # whose softmax the proof sees, token by token


def strided(kind: type[Written]) -> type[Written]:
    return type(f"Strided{kind.__name__}", (kind,), {"is_strided": True})


def case_of(kind: type[Written]) -> Case:
    core = separate(pattern="(d h) c" if kind.is_strided else "(h d) c")
    return Case(kind, (replace(core, output=separate().output),))


@pytest.mark.parametrize("kind", [one for kind in PROVED for one in (kind, strided(kind))])
def test_the_declared_heads_of_vmap_and_custom_autograd_modules_are_true(kind):
    assert contradictions(case_of(kind), step=7) == []


@pytest.mark.parametrize("kind", [one for kind in KINDS for one in (kind, strided(kind))])
@pytest.mark.some_slow(quick=10)
def test_heads_are_read_through_vmap_checkpoints_and_custom_autograd_functions(kind):
    verdict = judge(case_of(kind), "forward")
    assert (verdict.verdict, verdict.reason) == (RIGHT, "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.some_slow(quick=5)
def test_a_wrong_claim_about_heads_under_vmap_is_contradicted_by_the_first_forward(kind):
    model = nn.Sequential(strided(kind)())
    (layer,) = find_attention(model)
    side_by_side = {role: HeadSlice(model[0], f"{role[0]}.weight", H, WIDTH) for role in ("query", "key", "value")}
    for slices, is_true in ((layer.slices, True), ({**layer.slices, **side_by_side}, False)):
        verifier = RuntimeVerifier([replace(layer, slices=slices)])
        verifier.arm()
        model(torch.randn(2, 7, MODEL))
        verifier.suspend()
        assert (list(verifier.contradictions()) == []) is is_true


class CosinesOfFeatures(Written):
    """Features attend to features, in a forward that looks the same."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.cosine_similarity(q[..., :, None], k[..., None, :], dim=-3).softmax(-1)  # (b, h, d, d)
        return (weights @ v.mT).mT


class HeadsAttendToHeads(Written):
    """The sum runs over the same dim, and the other dims are swapped: one token, and all of its heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        weights = (q[:, :, :, None] * k[:, :, None]).sum(-1).softmax(-1)
        return (weights[..., None] * v[:, :, None]).sum(-2).transpose(1, 2)


class MappedOverParts(Written):
    """Each part of the input has its head: the same column of two heads is another feature."""

    def forward(self, x: Tensor) -> Tensor:
        def head(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(x @ q.mT, x @ k.mT, x @ v.mT)

        parts = [one.weight[:, :WIDTH].unflatten(0, (H, WIDTH)) for one in (self.q, self.k, self.v)]
        return self.o(torch.vmap(head, out_dims=2)(x.unflatten(-1, (H, WIDTH)).movedim(2, 0), *parts).flatten(2))


@pytest.mark.parametrize("kind", [CosinesOfFeatures, HeadsAttendToHeads, MappedOverParts])
def test_modules_under_vmap_without_heads_over_tokens_are_refused_with_one_warning(kind):
    model = nn.Sequential(kind())
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        assert find_attention(model, forward=lambda: model(torch.randn(2, 7, MODEL))) == []
    assert len(reported) == 1, "and that is said"


def test_flex_attention_is_read_and_its_module_is_left_unchanged():
    from torch.nn.attention import flex_attention as flex

    class Flex(Written):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex.flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - (i - j).abs() / (h + 1))

    before = {name: value for name, value in vars(flex).items() if name != "__builtins__"}
    for kind in (Flex, strided(Flex)):
        model = nn.Sequential(kind())
        (layer,) = survey(model).layers
        rows = torch.arange(MODEL).view(WIDTH, H).T if kind.is_strided else torch.arange(MODEL).view(H, WIDTH)
        for role in ("query", "key", "value"):
            assert torch.equal(layer.weight(role), model[0].get_parameter(f"{role[0]}.weight")[rows])
    assert {name: value for name, value in vars(flex).items() if name != "__builtins__"} == before


def test_a_vmap_without_parameters_is_left_to_torch():
    calls = []

    class Masked(Written):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            def hidden(i: Tensor, j: Tensor) -> Tensor:
                calls.append(i)
                return i >= j

            places = torch.arange(100)
            mask = torch.vmap(torch.vmap(hidden, (None, 0)), (0, None))(places, places)[: q.shape[2], : k.shape[2]]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    assert len(survey(nn.Sequential(Masked())).layers) == 1
    assert len(calls) < 100, "a hundred parts are not run one by one"


def test_tracing_works_if_autograd_function_apply_is_a_builtin_method(monkeypatch):
    # So it is in torch 2.14: what has no `__func__` had every traced run fail.
    written_in_c = torch._C._FunctionBase.__dict__["apply"]
    assert not hasattr(written_in_c, "__func__")
    monkeypatch.setattr(torch.autograd.Function, "apply", written_in_c)
    layers = find_attention(nn.Sequential(Written()))
    assert [layer.num_heads for layer in layers] == [H]
    assert torch.autograd.Function.__dict__["apply"] is written_in_c


class _Weighed(torch.autograd.Function):
    @staticmethod
    @torch.no_grad()
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return attend(q, k, v)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            own = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            return torch.autograd.grad(attend(*own), own, grad)


_weighed = _Weighed.apply  # as code at the top of a file keeps it


class WithoutRecording(Written):
    """A forward of a function that records nothing by itself."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Weighed.apply(q, k, v)


class AttentionByAKeptFunction(Written):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _weighed(q.tanh(), k.tanh(), v)


def test_a_custom_autograd_function_called_under_no_grad_is_traced():
    (layer,) = find_attention(nn.Sequential(WithoutRecording()))
    assert torch.equal(layer.weight("key").flatten(0, 1), layer.module.k.weight)


def test_attention_hidden_in_a_custom_autograd_function_is_refused_for_that():
    model = nn.Sequential(AttentionByAKeptFunction())
    (refusal,) = survey(model).refused
    assert refusal.reason == "what the function `_Weighed` computes is in no graph, as it has a backward of its own"
