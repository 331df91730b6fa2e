"""Suggested numbers of heads, from the measurements of a run."""

from __future__ import annotations

from typing import Any

from hdi_callback.core.allocation import rank_allocations
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.history import read_lines, read_records
from hdi_callback.monitoring.history.run_folder import find_history


def allocations(run: str, keys: int, multiple_of: int) -> list[dict[str, Any]]:
    """Rank the head widths of each layer by the measurements of the last reading.

    Args:
        run: a history, or the folder of a run.
        keys: keys that a query sees.
        multiple_of: admit only head widths that are multiples of this.

    Returns:
        For each layer its name, its present heads, and either the best choice or the reason why none can be suggested.

    Raises:
        MisconfigurationError: if the run did not measure what is needed.
    """
    path = find_history(run)
    headers = [line for line in read_lines(path) if line["kind"] == "run"]
    facts = {layer["name"]: layer for layer in (headers[-1]["layers"] if headers else [])}
    found: list[dict[str, Any]] = []
    for name, known in facts.items():
        samples, rank, step = _measured(path, name)
        if samples is None or rank is None:
            continue
        ranking = rank_allocations(
            known["num_heads"] * known["head_dim"], keys, effective_samples=samples, head_dim=known["head_dim"],
            input_rank=rank, multiple_of=multiple_of,
        )  # fmt: skip
        best = ranking.best
        found.append(
            {
                "layer": name,
                "step": step,
                "num_heads": known["num_heads"],
                "head_dim": known["head_dim"],
                "best_num_heads": None if best is None else best.num_heads,
                "best_head_dim": None if best is None else best.head_dim,
                "head_dims_as_good": list(ranking.near_best) if ranking.is_conclusive else [],
                "reason": ranking.reason,
            }
        )
    if not found:
        raise MisconfigurationError(
            f"`{path}` has no reading with attention_samples and token_rank, which allocation needs: train with "
            'metrics=["default", "attention_samples", "token_rank"].'
        )
    return found


def _measured(path: Any, layer: str) -> tuple[list[float] | None, float | None, int | None]:
    for record in reversed(read_records(path)):
        numbers = record.layers.get(layer)
        if numbers is not None and "attention_samples" in numbers.arrays and "token_rank" in numbers.values:
            samples = [value for value in numbers.arrays["attention_samples"] if value is not None]
            return samples, numbers.values["token_rank"], record.step
    return None, None, None


def print_allocations(found: list[dict[str, Any]]) -> None:
    """Print one line for each layer.

    Args:
        found: the result of `allocations`.
    """
    from rich.text import Text

    from hdi_callback.command.terminal import console

    out = console()
    for layer in found:
        now = f"{layer['layer']}: {layer['num_heads']} heads of width {layer['head_dim']}"
        if layer["reason"] is None:
            others = ", ".join(map(str, layer["head_dims_as_good"]))
            best = f"{layer['best_num_heads']} of width {layer['best_head_dim']}"
            verdict = f"suggested: {best} (widths that are as good: {others})"
        else:
            verdict = f"no number can be suggested. {layer['reason']}"
        out.print(Text(f"{now}; {verdict}"), soft_wrap=True)
