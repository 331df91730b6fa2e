"""Read back the file that an offline W&B run left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class WandbRun:
    """What the run file holds: logged rows, and how metrics were defined."""

    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)


def read_wandb(folder: Path) -> WandbRun:
    """Read the one offline run below a folder, through wandb's own reader and protocol."""
    from google.protobuf.json_format import MessageToDict
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (path,) = Path(folder).rglob("*.wandb")
    store = DataStore()
    store.open_for_scan(str(path))
    run = WandbRun()
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                row[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            run.history.append(row)
        elif kind == "metric":
            told = MessageToDict(record.metric, preserving_proto_field_name=True)
            run.metrics.append({"name": "", "glob_name": "", "summary": {}, **told})
    return run
