"""A function mode that sees every torch function of a forward, and calls each as it was called."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hdi_callback.attention.observe.compare.cores import no_softmax
from hdi_callback.attention.observe.mode_stack import take_off
from hdi_callback.attention.observe.quiet import quiet, without_transforms
from hdi_callback.attention.observe.recorder import Recorder
from hdi_callback.attention.observe.row_reader import ReadRows
from hdi_callback.attention.observe.scores.lineage import Lineage, Scores
from hdi_callback.attention.observe.scores.masks import MaskTerm
from hdi_callback.attention.observe.scores.products import PRODUCTS, operands, product_of, tied_product_of

# Functions that neither make nor change numbers that matter here; the first is how attributes are read.
_PASSED = frozenset((
    "__get__", "__set__", "__delete__", "size", "dim", "stride", "numel", "is_floating_point", "is_complex",
    "is_contiguous", "storage_offset", "data_ptr", "element_size", "get_device", "is_nested", "__len__", "__hash__",
    "__repr__", "__bool__", "backward", "item", "tolist", "has_names", "is_cuda", "register_hook", "requires_grad_",
    "untyped_storage", "nelement", "ndimension", "_is_view", "is_inference",
))  # fmt: skip
_SAMPLED = frozenset(("linear", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm", "normalize"))
_KERNEL = re.compile(r"attn|attention|flash", re.IGNORECASE)


class ObservingMode(TorchFunctionMode):
    """Watch the functions of a forward.

    Args:
        recorder: records linear maps and attentions.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder, self._lineage, self._chosen = recorder, Lineage(), recorder.reader.chosen
        self.failures: list[str] = []

    def forget(self) -> None:
        """Let go of all tensors, at the end of a forward."""
        self._lineage.clear()
        self._chosen.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function as it was called, and record it if it matters."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _PASSED:
            result = func(*args, **kwargs)
            if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in ("mT", "T"):
                self._lineage.follow("transpose", (args[0], -2, -1), {}, result)
            return result
        if name == "multi_head_attention_forward" and func is F.multi_head_attention_forward:
            return self._inside(func, args, kwargs)
        result = func(*args, **kwargs)
        handler, picks = self._handler_of(name, func, args, kwargs), self._chosen.may_concern(name, args)
        if handler is not None or picks:
            self._recorder.is_recorded = torch.is_grad_enabled()
            try:
                with quiet(_device(args, kwargs)):
                    if picks:
                        self._chosen.follow(name, args, kwargs, result)
                    if handler is not None:
                        handler(name, args, kwargs, result)
            except Exception as error:  # the forward goes on, and the reading says why it is not whole
                self.failures.append(f"{name}: {type(error).__name__} ({error})")
        return result

    def _handler_of(self, name: str, func: Any, args: Any, kwargs: Any) -> Callable[..., None] | None:
        """Choose the handler of a call; most calls have none."""
        handlers: dict[str, Callable[..., None]] = {
            "scaled_dot_product_attention": self._saw_fused,
            "linear": self._saw_linear,
            "conv1d": self._saw_convolution,
            "conv2d": self._saw_convolution,
            "conv3d": self._saw_convolution,
            "layer_norm": self._saw_norm,
            "rms_norm": self._saw_norm,
            "normalize": self._saw_norm,
            "softmax": self._saw_softmax,
            "_softmax": self._saw_softmax,
        }
        if name in _SAMPLED and not self._recorder.maps.keeps_samples:
            # Of maps and norms samples alone are kept; what they do to scores is followed all the same.
            return handlers[name] if self._lineage.any_of((*args, *kwargs.values())) is not None else None
        if name in handlers:
            return handlers[name]
        if name in PRODUCTS:
            return self._saw_product
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) and _KERNEL.search(str(func)):
            return self._saw_kernel
        if name == "__setitem__" or self._lineage.any_of((*args, *kwargs.values())) is not None:
            return self._saw_other
        return None

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Watch torch's own attention from the inside, whose first step is to ask for modes like this one.

        The mode comes back with the check of shapes, the first thing that is done after that.

        Returns:
            What torch's attention gives.
        """
        functional: Any = F
        check = functional._mha_shape_check
        is_on = False

        thread = threading.get_ident()

        def check_and_watch(*shapes: Any) -> Any:
            nonlocal is_on
            result = check(*shapes)
            if not is_on and threading.get_ident() == thread:
                torch.overrides._push_mode(self)  # type: ignore[no-untyped-call]
                is_on = True
            return result

        functional._mha_shape_check = check_and_watch
        try:
            return func(*args, **kwargs)
        finally:
            functional._mha_shape_check = check
            if is_on:
                take_off(self)  # another observer may lie above it

    # --- maps and norms

    def _saw_linear(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        inputs = args[0] if args else kwargs["input"]
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        found = self._lineage.find(inputs)
        if found is not None and found[1] == "weights":
            self._lineage.follow(name, args, kwargs, result)
            return
        parameter, rows = _parameter(weight)
        is_transposed = False
        if weight.dim() == parameter.dim() == 2:
            is_transposed = weight.stride() == parameter.mT.stride() != parameter.stride()
            rows = _first_column(weight, parameter) if is_transposed else rows
            if weight.shape[1] != parameter.shape[0 if is_transposed else 1]:  # of a part of the features that come in
                return
        self._recorder.maps.map_ran(parameter, inputs, result, rows=rows, is_transposed=is_transposed)

    def _saw_convolution(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if isinstance(weight, Tensor) and all(size == 1 for size in weight.shape[2:]):
            if self._lineage.any_of(args[:1]) is not None:
                self._lineage.follow(name, args, kwargs, result)
                return
            inputs = args[0] if args else kwargs["input"]
            self._recorder.maps.map_ran(_parameter(weight)[0], inputs, result, 1 - weight.dim())

    def _saw_norm(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        inputs = args[0] if args else kwargs["input"]
        if self._lineage.any_of((inputs,)) is not None:
            self._lineage.follow(name, args, kwargs, result)
            return
        weight = next((one for one in (*args[1:], *kwargs.values()) if isinstance(one, nn.Parameter)), None)
        self._recorder.maps.norm_ran(weight, inputs, result)

    # --- attention

    def _saw_softmax(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        inputs = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(dim, int) or result.dim() < 2:
            return
        axis = dim if dim < 0 else dim - result.dim()
        found = self._lineage.find(inputs)
        if found is None:
            scores = Scores(None, None, row_axis=-1 if axis != -1 else -2, key_axis=axis)
        elif found[1] == "scores":
            scores = found[0].branched()
        else:
            self._lineage.follow(name, args, kwargs, result)
            return
        scores.kind = "softmax" if scores.query is not None else "additive"
        scores.taken = self._recorder.weights_ran(scores, inputs, result, axis)
        self._lineage.tag(result, scores, "weights")

    def _saw_product(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        pair = operands(name, args, kwargs)
        if pair is None or not isinstance(result, Tensor):
            self._lineage.follow(name, args, kwargs, result)
            return
        left, right = pair
        for one in pair:
            found = self._lineage.find(one)
            if (
                found is not None
                and found[1] != "statistic"
                and self._averages(name, args, kwargs, result, one, found[0])
            ):
                self._saw_average(name, args, kwargs, result, one, *found)
                return
        for one, other in ((right, left), (left, right)):
            parameter, rows = _parameter(one)
            if isinstance(parameter, nn.Parameter):
                if self._lineage.any_of((other,)) is not None:  # heads that are mixed
                    self._lineage.follow(name, args, kwargs, result)
                    return
                self._saw_map(name, args, kwargs, result, parameter, rows, one, other, is_left=one is not right)
                return
        product = product_of(name, args, kwargs, result) or tied_product_of(name, args, kwargs)
        if product is None:
            return
        scores = self._lineage.start(result, product)
        if name == "baddbmm":
            alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
            scores.scale = float(alpha)
            if beta:
                bias = (args[0] if args else kwargs["input"]).detach()
                scores.biases.append((bias, float(beta)))
                scores.terms.append(MaskTerm(bias, "added"))

    def _saw_map(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        result: Tensor,
        parameter: Tensor,
        rows: int,
        weight: Tensor,
        inputs: Tensor,
        is_left: bool,
    ) -> None:
        if name == "einsum":
            product = product_of(name, args, kwargs, result)
            letters = args[0].replace(" ", "")
            if product is None or weight.dim() < 2 or "." in letters:
                return
            a, b = letters.split("->")[0].split(",")
            out = letters.split("->")[1]
            ours, theirs = (b, a) if weight is not args[1] else (a, b)
            made = [one for one in ours if one not in theirs and one in out]
            taken = [one for one in ours if one in theirs and one not in out]
            order = [out.index(one) for one in out if one not in made] + [out.index(one) for one in made]
            flat = result.permute(order).flatten(-len(made)) if made else result
            kept = [theirs.index(one) for one in theirs if one not in taken] + [theirs.index(one) for one in taken]
            self._recorder.maps.map_ran(parameter, inputs.permute(kept).flatten(-len(taken)), flat)
        elif weight.dim() == 2:
            # A matrix that is multiplied from the right as it is stored has its rows for what comes in; from the left
            # it has its columns for it, and takes the last dim but one: features in front of tokens, or tokens.
            if parameter.dim() == 2 and weight.stride() not in (parameter.stride(), parameter.mT.stride()):
                return  # its numbers in another shape
            is_transposed = (weight.stride() == parameter.stride()) != is_left
            at = _first_column(weight, parameter) if is_transposed else rows
            dim = -2 if is_left and inputs.dim() > 1 else -1
            self._recorder.maps.map_ran(parameter, inputs, result, dim, rows=at, is_transposed=is_transposed)

    def _averages(self, name: str, args: Any, kwargs: Any, result: Tensor, weights: Tensor, scores: Scores) -> bool:
        """Return whether a product sums over the dimension of the keys, with anything but a parameter."""
        product, pair = product_of(name, args, kwargs, result), operands(name, args, kwargs)
        if product is None or pair is None or isinstance(_parameter(_other(pair, weights))[0], nn.Parameter):
            return False
        return (product.left_axis if pair[0] is weights else product.right_axis) == scores.key_axis

    def _saw_average(
        self, name: str, args: Any, kwargs: Any, result: Tensor, weights: Tensor, scores: Scores, stage: str
    ) -> None:
        """A product with weights, or with scores that were never turned into weights by a softmax."""
        product, pair = product_of(name, args, kwargs, result), operands(name, args, kwargs)
        assert product is not None
        assert pair is not None
        if pair[1] is weights:
            product = product.swapped
        if stage == "scores" and scores.query is None:
            return
        kind = scores.kind or "linear"
        read = scores.taken if isinstance(scores.taken, ReadRows) else None
        if kind not in ("softmax", "additive"):
            read = ReadRows(None, no_softmax(kind))
        elif read is None:
            read = ReadRows(None, "its weights were not observed")
        output = product.canonical(result)
        if scores.query is not None and scores.key is not None and kind != "softmax":
            read.axes = self._recorder.reader.axes_of(
                output.shape[:-2], int(scores.query.shape[-2]), int(scores.key.shape[-2])
            )
        self._recorder.core_ran(name, scores, product.right.mT, output, read, kind=kind)

    def _saw_fused(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        mask = arguments.get("attn_mask")
        terms = [MaskTerm(None, "causal")] if arguments.get("is_causal") else []
        if isinstance(mask, Tensor):
            terms.append(MaskTerm(mask.detach(), "visible" if mask.dtype is torch.bool else "added"))
        unread = "" if mask is None or isinstance(mask, Tensor) else f"its mask is a {type(mask).__name__}"
        if isinstance(mask, Tensor) and type(mask) is not Tensor and type(mask) is not nn.Parameter:
            unread = f"its mask is a {type(mask).__name__}"
            lower_right = "lower_right" in str(getattr(mask, "variant", "")).lower()
            if type(mask).__name__ == "CausalBias":
                offset = int(arguments["key"].shape[-2]) - int(arguments["query"].shape[-2]) if lower_right else 0
                terms, unread = [MaskTerm(None, "causal", offset)], ""
        self._recorder.fused_ran(
            name,
            arguments["query"],
            arguments["key"],
            arguments["value"],
            result,
            terms=terms,
            scale=arguments.get("scale"),
            unread=unread,
        )

    def _saw_kernel(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point()]
        outputs = [
            one for one in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(one, Tensor)
        ]
        if len(tensors) < 3 or not outputs or tensors[0].dim() < 3:
            return
        query, key, value = (one.transpose(1, 2) if one.dim() == 4 else one for one in tensors[:3])
        self._recorder.fused_ran(
            name,
            query,
            key,
            value,
            outputs[0].transpose(1, 2) if outputs[0].dim() == 4 else outputs[0],
            unread=f"its kernel `{name}` keeps its weights to itself, and what it takes for a mask is not known",
        )

    def _saw_other(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        self._lineage.follow(name, args, kwargs, result)


def _other(pair: tuple[Tensor, Tensor], one: Tensor) -> Tensor:
    return pair[1] if pair[0] is one else pair[0]


def _parameter(tensor: Tensor) -> tuple[Tensor, int]:
    """Find the parameter that a tensor is a part of, and the first of its rows that it holds."""
    tensor = without_transforms(tensor)
    if isinstance(tensor, nn.Parameter):
        return tensor, 0
    base = tensor._base if type(tensor) is Tensor and tensor._is_view() else None
    if isinstance(base, nn.Parameter) and base.dim() >= 2 and base.shape[0] and base.is_contiguous():
        return base, (tensor.storage_offset() - base.storage_offset()) // max(base.stride(0), 1)
    return tensor, 0


def _first_column(part: Tensor, parameter: Tensor) -> int:
    return int(part.storage_offset() - parameter.storage_offset()) % max(int(parameter.stride(0)), 1)


def _device(args: Any, kwargs: Any) -> torch.device:
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor):
            return one.device
        if isinstance(one, (tuple, list)):
            for inner in one:
                if isinstance(inner, Tensor):
                    return inner.device
    return torch.device("cpu")
