"""`GraphCut`: the function mode of a traced run.

The graph is cut at each product with a parameter: its result is a leaf of random features (`parameter_products`,
`contractions`, by `weight_views`). The scales of norms count as constants (`plain_norms`), attention is written out as
plain products (`plain_attention`), a map that mixes heads is left out (`head_mixing`), and all-to-all calls stay in
the graph (`exchange`). Each of these files lists in `HANDLERS` the functions of torch that it replaces, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hdi_callback.attention.trace import parameter_products, plain_attention, plain_batches, plain_norms, plain_sums
from hdi_callback.attention.trace.draw import MOST_ELEMENTS, Draw
from hdi_callback.attention.trace.exchange import Exchange, handler_of_ranks
from hdi_callback.attention.trace.head_mixing import HeadMixing
from hdi_callback.attention.trace.maps import MapStub
from hdi_callback.attention.trace.traced_run import Leaf, TracedRun
from hdi_callback.attention.trace.weight_views import WeightViews

if TYPE_CHECKING:
    from hdi_callback.attention.trace.run import Traceable

_PLACES = (torch, Tensor, F, torch.linalg, torch.special)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    getattr(place, name): handler
    for room in (parameter_products, plain_attention, plain_batches, plain_norms, plain_sums)
    for handler, names in room.HANDLERS.items()
    for name in names
    for place in _PLACES
    if callable(getattr(place, name, None))
}


class GraphCut(TorchFunctionMode):
    """Cuts the graph at products with parameters, and leaves out operations that hide which feature goes where.

    Args:
        run: what the run shows.
        draw: the outputs of linear maps.
        copy: that is run.
        exchange: the all-to-all calls of the run.
    """

    def __init__(self, run: TracedRun, draw: Draw, copy: Traceable, exchange: Exchange) -> None:
        super().__init__()
        self.run, self.draw, self.exchange = run, draw, exchange
        self.views, self.mixing = WeightViews(copy.stubs, copy.parameters), HeadMixing(run, copy.mixing)
        self.before: Callable[..., Tensor] | None = None
        self.calls: dict[str, int] = {}
        self.keeps_top, self.has_all = copy.keeps_top, False  # all were chosen in place of the top k
        self.hidden = 0  # softmaxes that ran where autograd records nothing
        self.exponentials = 0  # and exponentials
        self.of_scores = 0  # exponentials of scores, where it records

    def __enter__(self) -> Any:
        self.before, MapStub.draw_output = MapStub.draw_output, self.draw_output
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        MapStub.draw_output, self.before = self.before, None  # else the last run and its model would stay in memory
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, handler = kwargs or {}, _HANDLERS.get(func)
        if handler is None and isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            handler = handler_of_ranks(func)
        result = NotImplemented if handler is None else handler(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        made = func(*args, **kwargs)
        made = func(*args, **kwargs) if self.views.has_filled((*args, *kwargs.values()), made) else made
        if func in parameter_products.MIXING_TOKENS:
            parameter_products.note_mixed_tokens(self, func, made)
        return made

    def draw_output(
        self,
        parameter: str,
        map_input: Tensor,
        features: int,
        *,
        module: MapStub | None = None,
        start: int = 0,
        axes: tuple[int, ...] = (),
        is_of_parts: bool = False,
        takes_part: bool = False,
    ) -> Tensor:
        """Return random features for each position of the input of a map.

        Args:
            parameter: dotted path of its matrix.
            map_input: its input, ``(..., in_features)``.
            features: how many it gives.
            module: the map, where it is a module.
            start: which feature of the matrix is the first of them.
            axes: dims of the parameter that number the features, where it is no module's matrix.
            is_of_parts: a matrix for each head, of a part of its own of the features that come in.
            takes_part: the first columns of the matrix alone are used.

        Returns:
            ``(..., features)``.

        Raises:
            ValueError: if that would take too much memory.
        """
        if map_input.numel() // max(1, map_input.shape[-1]) * features > MOST_ELEMENTS:
            raise ValueError("a traced run would take too much memory")
        if features == map_input.shape[-1] and self.mixing.is_at(parameter, map_input):
            return map_input
        call = self.calls.get(parameter, 0)
        self.calls[parameter] = call + 1
        # Without autograd a map chooses or reorders tokens: the same in all runs, compared by what is recorded.
        draw = self.draw if torch.is_grad_enabled() else replace(self.draw, shares=(1.0, 0.0))
        with torch._C.DisableTorchFunction():
            drawn = draw(parameter, call, (*map_input.shape[:-1], features)).requires_grad_()
        original = None if module is None else module.original[0]
        map_input = (
            map_input if torch.is_grad_enabled() else map_input.detach()
        )  # a view of what has a gradient claims one
        self.run.leaves.append(Leaf(parameter, drawn, map_input, start, axes, original, is_of_parts, takes_part))
        return drawn.clone(memory_format=torch.contiguous_format)
