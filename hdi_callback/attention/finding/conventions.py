"""Modules that resemble attention, by names and by the code of their forward.

It only decides which unread modules are reported, and nothing about their heads.
"""

from __future__ import annotations

import dis
import inspect
import re
import types
from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

from hdi_callback.attention.layer.heads import INPUT_ROLES, Role
from hdi_callback.attention.layer.registry import Place

ROLE_NAMES: dict[Role, tuple[str, ...]] = {
    "query": ("q_proj", "query", "q", "q_lin", "query_proj", "Wq", "wq", "W_q", "w_q", "to_q", "q_linear", "linear_q"),
    "key": ("k_proj", "key", "k", "k_lin", "key_proj", "Wk", "wk", "W_k", "w_k", "to_k", "k_linear", "linear_k"),
    "value": ("v_proj", "value", "v", "v_lin", "value_proj", "Wv", "wv", "W_v", "w_v", "to_v", "v_linear", "linear_v"),
    "output": (
        "out_proj", "o_proj", "o", "out_lin", "output_proj", "Wo", "wo", "W_o", "w_o", "to_out", "out_linear",
        "linear_out", "linear_o", "c_proj", "proj", "dense", "out", "projection",
    ),
}  # fmt: skip
FUSED_NAMES = ("qkv", "Wqkv", "wqkv", "c_attn", "to_qkv", "qkv_proj", "in_proj", "query_key_value", "qkv_linear")

_ATTENTION_NAME = re.compile(r"(?i:attention|attn|attend|multi_?head)|MLA$|MHA$|SA$")
_ATTENDS = re.compile(r"(?i:attend|attention|attn|softmax)")
_RESULT = re.compile(r"Output|Result")  # classes of what comes back, such as BaseModelOutputWithNoAttention
# Functions of torch that the code of attention calls.
_COMPUTES = frozenset({
    "scaled_dot_product_attention", "multi_head_attention_forward", "flash_attn_func", "flex_attention",
    "flash_attn_varlen_func", "memory_efficient_attention",
})  # fmt: skip
_WEIGHS, _MULTIPLIES = (
    frozenset({"softmax", "Softmax", "sparsemax", "entmax15"}),
    frozenset({"matmul", "bmm", "einsum"}),
)


def looks_like_attention(place: Place) -> bool:
    """Return whether a module is called attention or computes a softmax, and holds matrices of its own.

    Args:
        place: the module and its place in the model.

    Returns:
        True if so; a whole model may be called anything.
    """
    if place.parent is None or _matrices(place.module) < 2:
        return False
    return is_named_attention(place.module) or has_code_of_attention(place)


def has_code_of_attention(place: Place) -> bool:
    """Return whether a module, whatever it is called, computes a softmax and holds matrices of its own.

    Args:
        place: the module and its place in the model.

    Returns:
        True if so.
    """
    module = place.module
    plain_parts = (child for child in module.children() if not list(child.parameters()))
    return _matrices(module) > 1 and any(map(computes_attention, (module, *plain_parts)))


def has_vectors_alone(model: nn.Module) -> bool:
    """Return whether all parameters of a model are vectors and numbers, from which its matrices may be cut.

    Args:
        model: the whole of it.

    Returns:
        True if so.
    """
    return not _matrices(model) and any(True for _ in model.parameters())


def is_called_attention(module: nn.Module) -> bool:
    """Return whether the name of a class contains a word for attention.

    Args:
        module: the module.

    Returns:
        True if so.
    """
    return bool(_ATTENTION_NAME.search(type(module).__name__))


def is_named_attention(module: nn.Module) -> bool:
    """Return whether the name of a class, or those of its projections, are usual ones of attention.

    Args:
        module: the module.

    Returns:
        True if so; code alone that resembles attention may compute a softmax of another kind.
    """
    return is_called_attention(module) or _has_usual_names(module)


def _has_usual_names(module: nn.Module) -> bool:
    names = module._modules
    is_fused = any(name in names for name in FUSED_NAMES) and any(name in names for name in ROLE_NAMES["output"])
    return is_fused or all(any(name in names for name in ROLE_NAMES[role]) for role in INPUT_ROLES)


def _matrices(module: nn.Module) -> int:
    """Count the matrices in a module; quantised maps keep no parameters."""
    stored = sum(is_lazy(parameter) or parameter.dim() >= 2 for parameter in module.parameters())
    hidden = sum("Linear" in type(part).__name__ and hasattr(part, "in_features") for part in module.modules())
    return max(stored, hidden)


def computes_attention(module: nn.Module) -> bool:
    """Return whether the code of a module's forward, or of its other methods, calls attention functions.

    Args:
        module: the module.

    Returns:
        True if so, by the names that it uses.
    """
    forward = inspect.getattr_static(type(module), "forward", None)
    if not isinstance(forward, types.FunctionType):  # compiled, as by torch.jit.script, whose class gives no forward
        graph = getattr(module, "inlined_graph", None)
        return any(f"aten::{name}" in str(graph) for name in _COMPUTES | _WEIGHS) if graph is not None else False
    if forward is nn.MultiheadAttention.forward or isinstance(module, nn.Softmax):
        return False
    # A layer of a graph network sends its messages in methods beside its forward.
    # `__init__` makes the parts, and runs none.
    members = [member for name, member in vars(type(module)).items() if name != "__init__"]
    own = [forward, *(member for member in members if isinstance(member, types.FunctionType))]
    return any(_calls_attention(function.__code__) for function in own)


def _calls_attention(code: types.CodeType) -> bool:
    within = list(_with_inner(code))  # functions that are written in it, as `vmap` takes them
    steps = [step for one in within for step in dis.get_instructions(one)]
    called = (step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    if any(_ATTENDS.search(str(name)) and not _RESULT.search(str(name)) for name in called):
        return True
    names = {name for one in within for name in one.co_names}
    is_product = _MULTIPLIES & names or any(step.argrepr in ("@", "@=") for step in steps)
    return bool(_COMPUTES & names) or bool(_WEIGHS & names and is_product)


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)
