"""`Action`: the report of an intervention: its effect, or the reason why it had none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Action:
    """The report of an intervention, as a sentence and as data.

    Attributes:
        step: optimizer steps taken before it.
        intervention: name of the intervention.
        layer: the layer whose alert it answered.
        message: one sentence.
        is_dry_run: True if nothing was changed: it would have been done.
        facts: further numbers.
        is_refusal: True if nothing was done, for the reason that the message gives; it does not count for `at_most`.
    """

    step: int
    intervention: str
    layer: str
    message: str
    is_dry_run: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_refusal: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The action as plain data, as the history keeps it.

        Returns:
            Its fields.
        """
        return asdict(self)
