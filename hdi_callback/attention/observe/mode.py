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

from hdi_callback.attention.observe.compare.cores import ReadRows, no_softmax
from hdi_callback.attention.observe.mode_stack import take_off
from hdi_callback.attention.observe.quiet import is_plain, unnoticed, without_transforms
from hdi_callback.attention.observe.recorder import Recorder
from hdi_callback.attention.observe.scores.call import Call, from_the_end
from hdi_callback.attention.observe.scores.lineage import Lineage, Scores
from hdi_callback.attention.observe.scores.masks import MaskTerm
from hdi_callback.attention.observe.scores.products import PRODUCTS, Product, operands, product_of
from hdi_callback.guard import guarded

# Functions that neither make nor change numbers that matter here; the first is how attributes are read.
_PASSED = frozenset((
    "__get__", "__set__", "__delete__", "size", "dim", "stride", "numel", "is_floating_point", "is_complex",
    "is_contiguous", "storage_offset", "data_ptr", "element_size", "get_device", "is_nested", "__len__", "__hash__",
    "__repr__", "__bool__", "backward", "item", "tolist", "has_names", "is_cuda", "register_hook", "requires_grad_",
    "untyped_storage", "nelement", "ndimension", "_is_view", "is_inference",
))  # fmt: skip
_KERNEL = re.compile(r"attn|attention|flash", re.IGNORECASE)


class ObservingMode(TorchFunctionMode):
    """Watch the functions of a forward.

    Args:
        recorder: records linear maps and attentions.
        failures: where it is noted what goes wrong.
    """

    def __init__(self, recorder: Recorder, failures: list[str]) -> None:
        super().__init__()
        self._recorder, self._lineage, self._chosen = recorder, Lineage(), recorder.reader.chosen
        self._failures = failures

    def forget(self) -> None:
        """Release all tensors, at the end of a forward."""
        self._lineage.clear()
        self._chosen.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function as it was called, and record it if it matters."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return self._inside(func, args, kwargs)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    @guarded("observing a function")
    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a function that was called, if it matters."""
        name = getattr(func, "__name__", "")
        if name in _PASSED:
            if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in ("mT", "T"):
                self._lineage.follow(Call("transpose", (args[0], -2, -1), {}, result))
            return
        call = Call(name, args, kwargs, result)
        handler, picks = self._handler_of(func, call), self._chosen.may_concern(call)
        if handler is not None or picks:
            self._recorder.is_recorded = torch.is_grad_enabled()
            device = next((tensor.device for tensor in call.tensors()), torch.device("cpu"))
            with unnoticed(name, device, self._failures):
                if picks and all(map(is_plain, call.tensors())):
                    self._chosen.follow(call)
                if handler is not None:
                    handler(self, call)

    def _failed(self, work: str, error: Exception) -> None:
        self._failures.append(f"{work}: {type(error).__name__} ({error})")

    def _handler_of(self, func: Any, call: Call) -> Callable[[ObservingMode, Call], None] | None:
        """Choose the handler of a call; most calls have none."""
        handler = _HANDLERS.get(call.name)
        if handler in _OF_SAMPLES and not self._recorder.maps.keeps_samples:
            # Of maps and norms only samples are kept; their effect on scores is followed as well.
            return handler if self._lineage.any_of(call.tensors()) is not None else None
        if handler is not None:
            return handler
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) and _KERNEL.search(str(func)):
            return ObservingMode._record_kernel
        is_followed = call.name == "__setitem__" or self._lineage.any_of(call.tensors()) is not None
        return ObservingMode._follow if is_followed else None

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Observe torch's own attention from the inside; its first step is to ask for modes like this one.

        The mode comes back with the check of shapes, the first thing that is done after that.

        Returns:
            What torch's attention gives.
        """
        functional: Any = F
        check, thread = functional._mha_shape_check, threading.get_ident()
        is_on = False

        def check_and_watch(*shapes: Any) -> Any:
            nonlocal is_on
            result = check(*shapes)
            if not is_on and threading.get_ident() == thread:
                is_on = True
                self._begin_inside()
            return result

        functional._mha_shape_check = check_and_watch
        try:
            return func(*args, **kwargs)
        finally:
            functional._mha_shape_check = check
            if is_on:
                self._end_inside()

    @guarded("observing torch's attention from the inside")
    def _begin_inside(self) -> None:
        torch.overrides._push_mode(self)  # type: ignore[no-untyped-call]

    @guarded("observing torch's attention from the inside", otherwise=take_off)
    def _end_inside(self) -> None:
        take_off(self)  # another observer may lie above it

    def _follow(self, call: Call) -> None:
        self._lineage.follow(call)

    # --- maps and norms

    def _record_linear(self, call: Call) -> None:
        inputs, weight = call.argument(0, "input"), call.argument(1, "weight")
        found = self._lineage.find(inputs)
        if found is not None and found[1] == "weights":
            self._follow(call)
            return
        parameter, rows = _parameter(weight)
        is_transposed = False
        if weight.dim() == parameter.dim() == 2:
            is_transposed = weight.stride() == parameter.mT.stride() != parameter.stride()
            rows = _first_column(weight, parameter) if is_transposed else rows
            if weight.shape[1] != parameter.shape[0 if is_transposed else 1]:  # covers a part of the input features
                return
        self._recorder.maps.map_ran(parameter, inputs, call.result, rows=rows, is_transposed=is_transposed)

    def _record_convolution(self, call: Call) -> None:
        inputs, weight = call.argument(0, "input"), call.argument(1, "weight")
        if not isinstance(weight, Tensor) or any(size != 1 for size in weight.shape[2:]):
            return
        if self._lineage.any_of((inputs,)) is not None:
            self._follow(call)
        else:
            self._recorder.maps.map_ran(_parameter(weight)[0], inputs, call.result, 1 - weight.dim())

    def _record_norm(self, call: Call) -> None:
        inputs = call.argument(0, "input")
        if self._lineage.any_of((inputs,)) is not None:
            self._follow(call)
            return
        weight = next((value for value in call.values[1:] if isinstance(value, nn.Parameter)), None)
        self._recorder.maps.norm_ran(weight, inputs, call.result)

    # --- attention

    def _record_softmax(self, call: Call) -> None:
        inputs, dim, result = call.argument(0, "input"), call.argument(1, "dim"), call.result
        if not isinstance(dim, int) or result.dim() < 2:
            return
        axis = from_the_end(dim, result.dim())
        found = self._lineage.find(inputs)
        if found is None:
            scores = Scores(None, None, row_axis=-1 if axis != -1 else -2, key_axis=axis)
        elif found[1] == "scores":
            scores = found[0].branched()
        else:
            self._follow(call)
            return
        scores.kind = "softmax" if scores.query is not None else "additive"
        scores.taken = self._recorder.weights_ran(scores, inputs, result, axis)
        self._lineage.tag(result, scores, "weights")

    def _record_product(self, call: Call) -> None:
        pair = operands(call)
        if pair is None or not isinstance(call.result, Tensor):
            self._follow(call)
            return
        left, right = pair
        product = product_of(call, left, right)
        for one, other, oriented in ((left, right, product), (right, left, product and product.swapped)):
            found = self._lineage.any_of((one,))
            if found is None or oriented is None or oriented.tied > 1 or _is_parameter(other):
                continue
            _, scores, stage = found
            if oriented.left_axis == scores.key_axis:  # it sums over the keys
                self._record_average(call, oriented, scores, stage)
                return
        for weight, inputs, is_left in ((right, left, False), (left, right, True)):
            if _is_parameter(weight):
                if self._lineage.any_of((inputs,)) is not None:  # heads that are mixed
                    self._follow(call)
                else:
                    self._record_map(call, product, weight, inputs, is_left)
                return
        if product is not None:
            self._start(call, product)

    def _start(self, call: Call, product: Product) -> None:
        scores = self._lineage.start(call.result, product)
        if call.name == "baddbmm":
            alpha, beta = call.kwargs.get("alpha", 1), call.kwargs.get("beta", 1)
            scores.scale = float(alpha)
            if beta:
                bias = call.argument(0, "input").detach()
                scores.biases.append((bias, float(beta)))
                scores.terms.append(MaskTerm(bias, "added"))

    def _record_map(self, call: Call, product: Product | None, weight: Tensor, inputs: Tensor, is_left: bool) -> None:
        (parameter, rows), maps = _parameter(weight), self._recorder.maps
        if call.name == "einsum":
            if product is None or product.tied > 1 or weight.dim() < 2 or "." in call.args[0]:
                return
            a, b, out = call.args[0].replace(" ", "").replace("->", ",").split(",")
            ours, theirs = (a, b) if is_left else (b, a)
            made = [letter for letter in ours if letter in out and letter not in theirs]
            taken = [letter for letter in ours if letter in theirs and letter not in out]
            order = [out.index(letter) for letter in out if letter not in made] + [out.index(letter) for letter in made]
            kept = [theirs.index(letter) for letter in theirs if letter not in taken] + [
                theirs.index(letter) for letter in taken
            ]
            flat = call.result.permute(order).flatten(-len(made))
            maps.map_ran(parameter, inputs.permute(kept).flatten(-len(taken)), flat)
        elif weight.dim() == 2:
            # Multiplied from the right as it is stored, a matrix has input features as rows; from the left its columns
            # are, and it takes the last dim but one: features before tokens, or tokens.
            if parameter.dim() == 2 and weight.stride() not in (parameter.stride(), parameter.mT.stride()):
                return  # its numbers in another shape
            is_transposed = (weight.stride() == parameter.stride()) != is_left
            at = _first_column(weight, parameter) if is_transposed else rows
            dim = -2 if is_left and inputs.dim() > 1 else -1
            maps.map_ran(parameter, inputs, call.result, dim, rows=at, is_transposed=is_transposed)

    def _record_average(self, call: Call, product: Product, scores: Scores, stage: str) -> None:
        """Record a product with weights, or with scores that went through no softmax."""
        if stage == "scores" and scores.query is None:
            return
        kind, read = scores.kind or "linear", scores.taken
        if kind not in ("softmax", "additive"):
            read = ReadRows(unread=no_softmax(kind))
        elif read is None:
            read = ReadRows(unread="its weights were not observed")
        output = product.canonical(call.result)
        if scores.query is not None and scores.key is not None and kind != "softmax":
            queries, keys = int(scores.query.shape[-2]), int(scores.key.shape[-2])
            read.axes = self._recorder.reader.axes_of(output.shape[:-2], queries, keys)
        self._recorder.core_ran(call.name, scores, product.right.mT, output, read, kind=kind)

    def _record_fused(self, call: Call) -> None:
        query, key, value, mask = (
            call.argument(place, name) for place, name in enumerate(("query", "key", "value", "attn_mask"))
        )
        terms = [MaskTerm(None, "causal")] if call.argument(5, "is_causal") else []
        unread = "" if mask is None or type(mask) in (Tensor, nn.Parameter) else f"its mask is a {type(mask).__name__}"
        if type(mask).__name__ == "CausalBias":
            is_lower_right = "lower_right" in str(getattr(mask, "variant", "")).lower()
            offset = int(key.shape[-2]) - int(query.shape[-2]) if is_lower_right else 0
            terms, unread = [MaskTerm(None, "causal", offset)], ""
        elif isinstance(mask, Tensor):
            terms.append(MaskTerm(mask.detach(), "visible" if mask.dtype is torch.bool else "added"))
        scale = call.argument(6, "scale")
        self._recorder.fused_ran(call.name, query, key, value, call.result, terms=terms, scale=scale, unread=unread)

    def _record_kernel(self, call: Call) -> None:
        tensors = [tensor for tensor in call.values if isinstance(tensor, Tensor) and tensor.is_floating_point()]
        if len(tensors) < 3 or not call.results or tensors[0].dim() < 3:
            return
        # `aten::_scaled_dot_product_*` takes (batch, heads, length, width); flash attention and what is underneath, in
        # aten as well, takes (batch, length, heads, width).
        is_heads_first = "scaled_dot_product" in call.name
        query, key, value, output = (
            one.transpose(1, 2) if one.dim() == 4 and not is_heads_first else one
            for one in (*tensors[:3], call.results[0])
        )
        unread = (
            f"its kernel `{call.name}` does not return its weights, and which of its arguments is the mask is not known"
        )
        self._recorder.fused_ran(call.name, query, key, value, output, unread=unread)


_HANDLERS: dict[str, Callable[[ObservingMode, Call], None]] = {
    "scaled_dot_product_attention": ObservingMode._record_fused,
    "linear": ObservingMode._record_linear,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), ObservingMode._record_convolution),
    **dict.fromkeys(("layer_norm", "rms_norm", "normalize"), ObservingMode._record_norm),
    **dict.fromkeys(("softmax", "_softmax"), ObservingMode._record_softmax),
    **dict.fromkeys(PRODUCTS, ObservingMode._record_product),
}
_OF_SAMPLES = (ObservingMode._record_linear, ObservingMode._record_convolution, ObservingMode._record_norm)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(_parameter(tensor)[0], nn.Parameter)


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
