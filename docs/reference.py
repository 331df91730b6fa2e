"""Write docs/api.md from what the public modules list: ``python docs/reference.py``; `make docs` does it."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

from hdi_callback.integrations.shell import Shell

PAGE = Path(__file__).with_name("api.md")
MODULES = (
    "hdi_callback",
    "hdi_callback.rules",
    "hdi_callback.interventions",
    "hdi_callback.core",
    "hdi_callback.errors",
)
INTRODUCTION = """# Reference

<!-- Written by docs/reference.py from the lists `__all__` of the public modules. -->

Public is what these modules list: """
DEPRECATION = """## Deprecation

Public names, their arguments and defaults, the tags of curves, the lines of a history and the states in checkpoints
keep their meaning. Where one has to change, the old name works for at least two minor versions and six months, with a
`DeprecationWarning` that says what to write instead; CHANGELOG.md lists it when it is deprecated and when it goes.
Histories and checkpoints are read for as long as the major version stays: `tests/fixtures` holds files of earlier
versions, and a test goes on from each of them.

All other modules may change with any version. Earlier names of version 0.1 work until version 0.4:

| earlier | now |
|---|---|
| `HeadWatch` | `HeadSession` |
| `WhileItStands` and its `lasts` | `WhileActive` and `is_active` |
| `hdi_callback.monitoring.watch`: `Watch`, `Outcome`, `Follower` | `Session`, `Result`, `Sink` |
| `hdi_callback.monitoring.faults`: `Faults` | `hdi_callback.monitoring.warn_once`: `WarnOnce` |
| `unasked`, `in_turn` of `HeadDiversityMonitor` and `Settings` | `rule_metrics`, `rotate_layers` |
| `AllocationRanking`: `tells`, `flat` | `is_conclusive`, `near_best` |
| `HeadDiversityMonitor.rest()` | `HeadDiversityMonitor.skip_forward()` |
| `say` of `Host` | `print` |
| `broadcast` of `Host` | nothing calls it; a host that has it works |
| `AttentionSums`: `seeing`, `seen` | `queries_with_keys`, `visible_keys` |
| `loaded` of callbacks, `Settings` and `Alerts`; `Series.is_loaded` | `pretrained`, `is_pretrained` |
| `ReviveHeads(max_loss=...)` | `max_output_error` |
| `hdi_callback.core.handover_loss` | `folding_error` |
| the key `standing` of `hdi alerts --json` and `hdi replay --json` | `active` |
"""


def entry(module: str, name: str) -> str:
    """Write the directive of one public name."""
    thing = getattr(importlib.import_module(module), name)
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return f".. autoexception:: {module}.{name}\n"
    if inspect.isclass(thing):
        # A callback's hooks are called by its trainer, and are its business.
        is_callback = any(base.__module__.startswith(("lightning", "transformers")) for base in thing.__mro__)
        members = "history_path, active_alerts" if is_callback else ""
        inherited = "   :inherited-members:\n" if not is_callback and issubclass(thing, Shell) else ""
        return f".. autoclass:: {module}.{name}\n   :members:{' ' + members if members else ''}\n{inherited}"
    return f".. auto{'function' if callable(thing) else 'data'}:: {module}.{name}\n"


def names_of(module: str) -> list[str]:
    """Give the public names of a module that are not documented with another one."""
    room = importlib.import_module(module)
    names = [name for name in room.__all__ if not inspect.ismodule(getattr(room, name))]
    return names if module == MODULES[0] else [name for name in names if name not in names_of(MODULES[0])]


def page() -> str:
    """Write the page."""
    parts = [INTRODUCTION + ", ".join(f"`{module}`" for module in MODULES) + ".\n"]
    for module in MODULES:
        entries = "\n".join(entry(module, name) for name in names_of(module))
        summary = (importlib.import_module(module).__doc__ or "").strip().split("\n")[0]
        parts.append(f"## `{module}`\n\n{summary}\n\n```{{eval-rst}}\n{entries}```\n")
    return "\n".join([*parts, DEPRECATION])


if __name__ == "__main__":
    PAGE.write_text(page())
