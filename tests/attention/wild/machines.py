"""Attention where something of torch or of Python stands between its code and what runs."""

from __future__ import annotations

import copy
import types

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import bias as attention_bias

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, rows, separate


@case(separate(proved=()))
class MaskAsASubclass(Four):
    """`torch.nn.attention.bias`: a mask that is a tensor of a class of its own."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        mask = attention_bias.causal_lower_right(x.shape[1], x.shape[1])
        return self.o(join(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


@case(separate(proved=()), may_refuse="nested|could not be run|jagged")
class Jagged(Four):
    """Sequences of different lengths as one nested tensor."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        lengths = [n - i % 2 for i in range(len(x))]
        nested = torch.nested.as_nested_tensor([x[i, :m] for i, m in enumerate(lengths)], layout=torch.jagged)
        q, k, v = (m(nested).unflatten(-1, [H, WIDTH]).transpose(1, 2) for m in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return torch.nested.to_padded_tensor(self.o(out), 0.0)


def _traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.randn(2, 7, 24), check_trace=False)  # type: ignore[no-any-return]


@case(separate(), convert=_traced, may_refuse="jit")
class TracedByTorch(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


def _patched(module: nn.Module) -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (WIDTH, H)).permute(0, 3, 1, 2) for m in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).permute(0, 2, 3, 1).flatten(2))

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
    return module


class _Patched(Four):
    """Its forward was replaced by a method that is bound to it, with other heads."""

    def __init__(self) -> None:
        super().__init__()
        _patched(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate(pattern="(d h) c"))
class ForwardReplaced(_Patched):
    pass


@case(separate(pattern="(d h) c"))
class ForwardReplacedByAClosure(Four):
    """The function that took the place of its forward holds the module itself."""

    def __init__(self) -> None:
        super().__init__()
        module = self

        def forward(x: Tensor) -> Tensor:
            q, k, v = (m(x).unflatten(-1, (WIDTH, H)).permute(0, 3, 1, 2) for m in (module.q, module.k, module.v))
            return module.o(attend(q, k, v).permute(0, 2, 3, 1).flatten(2))

        self.forward = forward  # type: ignore[method-assign]


@case(
    Core(rows("q.weight"), None, rows("v.weight"), rows("o.weight", "c (h d)"), proved=("query", "value", "output")),
    may_refuse="hook|are sums of",
)
class LoRAByHooks(Four):
    """A low-rank update of the keys by a hook: rows of the base alone are half of the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(MODEL, 3, bias=False), nn.Linear(3, MODEL, bias=False)
        self.k.register_forward_hook(lambda module, args, out: out + self.b(self.a(args[0])))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(
    separate("student.q", "student.k", "student.v", "student.o", number=0),
    separate("teacher.q", "teacher.k", "teacher.v", "teacher.o", number=1),
)
class StudentAndTeacher(nn.Module):
    """A teacher that is a frozen copy, run without gradients."""

    def __init__(self) -> None:
        super().__init__()

        class Attention(Four):
            def forward(self, x: Tensor) -> Tensor:
                return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))

        self.student = Attention()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        reported = self.student(x)
        with torch.no_grad():
            true = self.teacher(x)
        return torch.cat([reported, true], -1)


@case(separate("student.q", "student.k", "student.v", "student.o"),
      separate("teacher.q", "teacher.k", "teacher.v", "teacher.o", number=1, proved=()))  # fmt: skip
class TeacherInInferenceMode(StudentAndTeacher):
    def forward(self, x: Tensor) -> Tensor:
        reported = self.student(x)
        with torch.inference_mode():
            true = self.teacher(x)
        return reported + true.clone()


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        class Attention(Four):
            def forward(self, x: Tensor) -> Tensor:
                return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))

        self.generator, self.discriminator = Attention(), Attention()


@case(separate("generator.q", "generator.k", "generator.v", "generator.o", proved=("query", "key")),
      Core(*(rows(f"discriminator.{m}.weight", source="generator.o") for m in "qkv"),
           rows("discriminator.o.weight", "c (h d)"), number=1))  # fmt: skip
class Adversaries(_Two):
    """What one makes is judged by the other, twice: attached and detached."""

    def forward(self, x: Tensor) -> Tensor:
        fake = self.generator(x)
        return self.discriminator(fake) - self.discriminator(fake.detach()).mean() * 0


@case(separate(), inputs=("b n c",))
class ContextVariables(Four):
    """Queries are kept as attributes between two methods, as code with hooks in mind does."""

    def forward(self, x: Tensor) -> Tensor:
        self._project(x)
        return self._finish()

    def _project(self, x: Tensor) -> None:
        self.last = {name: split(getattr(self, name)(x)) for name in "qkv"}

    def _finish(self) -> Tensor:
        q, k, v = (self.last.pop(name) for name in "qkv")
        self.weights = (q @ k.mT / WIDTH**0.5).softmax(-1)
        return self.o(join(self.weights @ v))


@case(separate())
class InPlace(Four):
    """Scores are scaled, masked and divided in place, and the outputs of heads are written into a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores /= WIDTH**0.5
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
        weights = torch.softmax(scores, -1)
        out = torch.zeros_like(x)
        for head in range(H):
            out[..., head * WIDTH : (head + 1) * WIDTH] = weights[:, head] @ v[:, head]
        return self.o(out)


@case(Core(*(rows(f"{m}.weight") for m in "qkv"), rows("o.weight", "c (h d)"), proved=(), heads_alone=True))
class TokenByToken(Four):
    """One query at a time asks the keys so far, as in decoding; the proof does not put its softmaxes together."""

    def forward(self, x: Tensor) -> Tensor:
        keys, values, out = [], [], []
        for t in range(x.shape[1]):
            one = x[:, t : t + 1]
            keys.append(split(self.k(one)))
            values.append(split(self.v(one)))
            out.append(attend(split(self.q(one)), torch.cat(keys, 2), torch.cat(values, 2)))
        return self.o(join(torch.cat(out, 2)))


@case(separate(proved=()), may_refuse="could not be run by itself")
class MappedOverTheBatch(Four):
    """A function of one sequence, mapped over the batch."""

    def one(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, m.weight, m.bias).view(-1, H, WIDTH).transpose(0, 1) for m in (self.q, self.k, self.v))
        out = F.softmax(q @ k.mT / WIDTH**0.5, dim=-1) @ v
        return F.linear(out.transpose(0, 1).flatten(1), self.o.weight, self.o.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.one)(x)
