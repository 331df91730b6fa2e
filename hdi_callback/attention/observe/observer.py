"""`AttentionObserver`: observe attention in a real forward.

What is observed
----------------
Between `arm` and `disarm`, in the first forward of each module, the first that autograd records if there is one:

- **Every attention**: each average of values with weights that are a softmax over tokens, wherever it is and
  whatever its module is called: `F.scaled_dot_product_attention`, `nn.MultiheadAttention`, products written out with
  ``@``, `torch.matmul`, `torch.bmm`, `torch.baddbmm` or `torch.einsum`, and kernels registered as operators of torch.
  Attention with other weights (additive, sigmoid, relu, none at all) is named with its kind.
- **Attention rows** of about 64 queries against all keys: the weights before dropout, after rotation, norms, scale,
  softcap, masks, biases and sinks. Where the model forms them they are taken, where a kernel keeps them they are
  computed from its inputs, and reduced by the function that is passed as `reduce_rows`.
- **A few tokens** of the inputs and outputs of linear maps and norms and of the inputs of attention, from which
  `verdicts` returns whether heads are where layers claim them, `unexplained` which attention no layer explains.

What is not observed, each with its reason in `closed`, `absent` or the core's `unread`
---------------------------------------------------------------------------------------
- what `torch.compile` or TorchScript runs, and torch's fast path in evaluation: observing would change how it runs;
- recomputation within backward (activation checkpointing): the forward itself was observed;
- weights of kernels whose masks are not known (flash-attn by way of its operator, `flex_attention`);
- tensors that are spread over devices, nested or quantised; transforms of `torch.func`; copies in other threads.

The model's functions are called with the arguments that they are called with anyway; nothing random is drawn, no
gradient is recorded, and the host does not wait for the device until `verdicts` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from hdi_callback.attention.layer.changing_hooks import Effect, note_effect
from hdi_callback.attention.layer.heads import AttentionLayer
from hdi_callback.attention.observe.compare.cores import ObservedCore
from hdi_callback.attention.observe.compare.judge import judge
from hdi_callback.attention.observe.compare.proposals import propose
from hdi_callback.attention.observe.compare.samples import MapCall
from hdi_callback.attention.observe.compare.unexplained import Unexplained, unexplained
from hdi_callback.attention.observe.compare.verdicts import Verdict
from hdi_callback.attention.observe.forward import ObservedForward
from hdi_callback.attention.observe.regions import split_open_and_closed
from hdi_callback.attention.observe.row_reader import Request, SeenBefore
from hdi_callback.attention.observe.scores.rows import RowChunk
from hdi_callback.attention.observe.window import Window

_ROLES_UNKNOWN = "two of its dimensions are of one size, and which numbers heads was not known when it ran"


class AttentionObserver:
    """Observe attention in armed forwards; see this module's docstring.

    Args:
        model: the model whose modules are watched.
        layers: the layers whose heads are claimed.
        max_queries: how many queries of each attention are read, over all sequences of a batch.
        reduce_rows: what is made of each piece of attention rows; results are added with ``+``. None: none are read.
        reduce_norms: what is made of the queries and of the keys of an attention, ``(..., H, length, width)``, and of a
            mask ``(..., 1, length)`` of those that are no padding, or None.
        padding: ``(batch, length)``, True at tokens that are padding, where it is known, or what gives it for a number
            of sequences and of queries while attention runs; may be set before each forward.

    Attributes:
        closed: modules that are not observed, by path, with the reason.
        failures: what went wrong while observing; the forward was not touched by it.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True))
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        ...
        ...     def forward(self, x):
        ...         return self.attn(x, x, x, need_weights=False)[0]
        >>> model = Model()
        >>> observer = AttentionObserver(model, reduce_rows=lambda chunk: chunk.weights)
        >>> observer.arm()
        >>> _ = model(torch.randn(1, 5, 8))
        >>> observer.disarm()
        >>> [(core.module, core.kind, tuple(core.rows.shape)) for core in observer.cores]
        [('attn', 'softmax', (1, 2, 5, 5))]
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AttentionLayer] = (),
        *,
        max_queries: int = 64,
        reduce_rows: Callable[[RowChunk], Any] | None = None,
        reduce_norms: Callable[[Tensor, Tensor | None], Any] | None = None,
        padding: Tensor | Callable[[int, int], Tensor | None] | None = None,
    ) -> None:
        self.padding = padding
        self.closed: dict[str, str] = {}
        self.failures: list[str] = []
        self._model, self._layers, self._max_queries = model, tuple(layers), max_queries
        self._reduce_rows, self._reduce_norms = reduce_rows, reduce_norms
        self._window = Window()
        self._forward: ObservedForward | None = None
        self._computed: dict[tuple[int, int, int], tuple[Any, Any]] = {}
        self._seen: dict[tuple[Any, ...], SeenBefore] = {}

    @property
    def cores(self) -> Sequence[ObservedCore]:
        """Every attention that ran since `arm`, in the order in which they ran."""
        return [] if self._forward is None else self._forward.recorder.cores

    @property
    def layers(self) -> Sequence[AttentionLayer]:
        """The layers whose heads are claimed; may be set, for forwards that are armed from then on."""
        return self._layers

    @layers.setter
    def layers(self, layers: Sequence[AttentionLayer]) -> None:
        self._layers = tuple(layers)

    @property
    def has_run(self) -> bool:
        """Whether a forward was observed since `arm`."""
        return self._window.has_run

    @property
    def reason(self) -> str:
        """Why no forward was observed since `arm`; empty if one was, or if none ran."""
        return "" if self._window.has_run else self._window.reason

    @property
    def skipped(self) -> dict[str, str]:
        """Modules that were skipped when they were called since `arm`, by path, with the reason."""
        return self._window.skipped

    def arm(self, *, keeps_samples: bool = True, without_rows: Sequence[AttentionLayer] = ()) -> None:
        """Observe forwards from now on, and discard earlier observations.

        Args:
            keeps_samples: keep the few tokens that `verdicts` and `proposals` compare.
            without_rows: those of the layers whose attention rows and norms are not read this time.
        """
        self.release()
        opened, closed = split_open_and_closed(self._model)
        self.closed = {name: reason for name, (_, reason) in closed.items()}
        names = {id(parameter): name for name, parameter in self._model.named_parameters(remove_duplicate=False)}
        names |= {id(module): name for name, module in self._model.named_modules()}
        heads = {names.get(id(layer.module), layer.name): layer.num_heads for layer in self._layers}
        claimed = frozenset(id(part) for layer in self._layers for part in layer.module.modules())
        request = Request(
            self._reduce_rows,
            self._reduce_norms,
            self._max_queries,
            keeps_samples,
            self.padding,
            heads,
            claimed,
            self._modules_with_rows(without_rows),
            self._seen,
        )
        self._forward = ObservedForward(request, names)
        self.failures = self._forward.failures
        self._window.open(self._forward, opened, {name: module for name, (module, _) in closed.items()})

    def _modules_with_rows(self, without_rows: Sequence[AttentionLayer]) -> dict[int, bool]:
        """Return for the module of each layer whether the rows inside it are read."""
        if not without_rows:
            return {}
        passed_over = {layer.name for layer in without_rows}
        read = {id(layer.module) for layer in self._layers if layer.name not in passed_over}
        return {id(layer.module): id(layer.module) in read for layer in self._layers}

    def disarm(self) -> None:
        """Stop observing, and keep the observations."""
        self._window.close()
        if self._forward is not None and self._forward.recorder.maps.keeps_samples:
            for core in self.cores:
                if core.dims is not None:
                    self._seen.setdefault(core.place, SeenBefore(core.dims, core.is_self))

    def suspend(self) -> None:
        """Remove all hooks from the model, also those that stay because a graph was compiled with them."""
        self._window.suspend()

    def resume(self) -> None:
        """Put back the hooks that stay on the model, after `suspend`."""
        self._window.resume()

    def release(self) -> None:
        """Stop observing, and discard the observations."""
        self.disarm()
        self._forward = None
        self._computed = {}

    def note_hooks(self) -> None:
        """Record the effect of forward hooks on the outputs of linear maps; the host waits for the device."""
        effects: dict[nn.Module, list[Effect]] = {}
        for module, effect in () if self._forward is None else self._forward.recorder.maps.hook_effects():
            effects.setdefault(module, []).append(effect)
        for module, found in effects.items():
            worst: Effect = "changed" if "changed" in found else "unknown" if "unknown" in found else "none"
            note_effect(module, worst)

    @property
    def absent(self) -> dict[str, str]:
        """Layers whose attention rows were not read: name -> reason."""
        mine = self._cores_by_layer(self._layers)
        return {
            layer.name: why
            for layer in self._layers
            if (why := self._why_absent(layer, mine[layer.name])) and not any(core.rows for core in mine[layer.name])
        }

    def verdicts(self, layers: Sequence[AttentionLayer] | None = None) -> dict[str, Verdict]:
        """Compare every claimed layer with the inputs of attention; the host waits for the device.

        Args:
            layers: the claims; by default those that the observer was made with.

        Returns:
            Name of the layer -> what was observed of its heads.
        """
        layers = self._layers if layers is None else layers
        mine = self._cores_by_layer(layers)
        return {layer.name: self._once(layer, partial(self._verdict, layer, mine[layer.name])) for layer in layers}

    def _verdict(self, layer: AttentionLayer, cores: Sequence[ObservedCore]) -> Verdict:
        verdict = judge(layer, cores, self._maps)
        self._settle(verdict, cores)
        if verdict.core is not None:
            return verdict
        return Verdict("undecided", self._why_absent(layer, cores) or verdict.sentence)

    def _settle(self, verdict: Verdict, cores: Sequence[ObservedCore]) -> None:
        """Keep the roles of dimensions that were established, and no rows that were read by other ones."""
        query = verdict.roles.get("query")
        order = query.order if query is not None else ()
        roles = verdict.roles.values() if verdict.state != "contradicted" else [query] if query and order else ()
        dims = next((role.dims for role in roles if role.dims is not None), None)
        for core in cores:
            if core.dims is None:
                continue
            if dims is not None and core is verdict.core:
                if dims.contradict(core.dims):
                    core.discard_rows(dims, _ROLES_UNKNOWN)
                if order:
                    core.name_heads(order)
            elif core.is_ambiguous:
                core.discard_rows(None, _ROLES_UNKNOWN)
            else:
                continue
            self._seen[core.place] = SeenBefore(core.dims, core.is_self, core.head_order)

    def _once(self, owner: object, compute: Callable[[], Any]) -> Any:
        """Compute a function of one layer or attention and of all that ran, once."""
        key = id(owner), len(self.cores), len(self._maps)
        if key not in self._computed:
            self._computed[key] = owner, compute()  # the owner as well, so that no other gets its id
        return self._computed[key][1]

    def proposals(self, layers: Sequence[AttentionLayer] | None = None) -> dict[str, AttentionLayer | str]:
        """Describe attention that no layer explains, by the features of its inputs.

        Args:
            layers: see `verdicts`.

        Returns:
            Path of its module -> the layer, or why there is none; of several in a module the first.
        """
        explained = [core for verdict in self.verdicts(layers).values() for core in (verdict.core, *verdict.cores)]
        found: dict[str, AttentionLayer | str] = {}
        for one in self.cores:
            if one.module not in found and not any(one is core for core in explained):
                found[one.module] = self._once(one, partial(propose, one, self._maps, self._model))
        return found

    def unexplained(
        self, layers: Sequence[AttentionLayer] | None = None, *, reported: Collection[str] = ()
    ) -> list[Unexplained]:
        """Find the softmax-weighted sums over tokens that no layer explains, or explains in part.

        Args:
            layers: see `verdicts`.
            reported: dotted paths of modules that are reported already, with all that they hold.

        Returns:
            One for each module.
        """
        layers = self._layers if layers is None else layers
        verdicts = self.verdicts(layers)
        reasons = {name: why for name, why in self.proposals(layers).items() if isinstance(why, str)}
        return unexplained(self.cores, self._maps, verdicts, self._paths(layers), reasons, reported=reported)

    @property
    def _maps(self) -> Sequence[MapCall]:
        return [] if self._forward is None else self._forward.recorder.maps.calls

    def _paths(self, layers: Sequence[AttentionLayer]) -> dict[str, str]:
        names = {id(module): name for name, module in self._model.named_modules()}
        return {layer.name: names.get(id(layer.module), layer.name) for layer in layers}

    def _cores_by_layer(self, layers: Sequence[AttentionLayer]) -> dict[str, list[ObservedCore]]:
        return {name: [core for core in self.cores if path in core.parts] for name, path in self._paths(layers).items()}

    def _why_absent(self, layer: AttentionLayer, cores: Sequence[ObservedCore]) -> str:
        path = self._paths([layer])[layer.name]
        for name, reason in {**self.closed, **({} if cores else self.skipped)}.items():
            if name in ("", path) or path.startswith(f"{name}."):
                return reason
        if not self.has_run:
            return self.reason or "no forward ran"
        if not cores:
            return "no attention was observed in its module"
        return next((core.unread for core in cores if core.unread), "")
