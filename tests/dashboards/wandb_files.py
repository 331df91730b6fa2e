"""Read back the file that an offline W&B run left behind.

The file is a LevelDB log: after a header of seven bytes, blocks of 32 KiB with records, each behind a header of seven
bytes (checksum, length, kind); a record that does not fit a block is cut in pieces. Each is a message of wandb.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
PATIENCE = 60  # seconds
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class WandbRun:
    """What the run file holds: logged rows, how metrics were defined, alerts, and the last summary."""

    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


def read_wandb(folder: Path) -> WandbRun:
    """Read the one offline run below a folder, which has been finished."""
    from google.protobuf.json_format import MessageToDict

    (path,) = Path(folder).rglob("*.wandb")
    run = WandbRun()
    for kind, record in _finished_records(path):
        if kind == "history":
            run.history.append(
                {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
        elif kind == "metric":
            reported = MessageToDict(record.metric, preserving_proto_field_name=True)
            run.metrics.append({"name": "", "glob_name": "", "summary": {}, **reported})
        elif kind == "summary":
            for item in record.summary.update:
                run.summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        elif kind == "alert":
            run.alerts.append(MessageToDict(record.alert, preserving_proto_field_name=True))
    return run


def _finished_records(path: Path) -> list[tuple[str, Any]]:
    """Wait for the last record of a run: `finish` returns before the process that writes the file has closed it."""
    from wandb.proto import wandb_internal_pb2

    deadline = time.monotonic() + PATIENCE
    while True:
        records = [wandb_internal_pb2.Record.FromString(data) for data in _log_records(path.read_bytes())]
        found = [(record.WhichOneof("record_type"), record) for record in records]
        if any(kind == "exit" for kind, _ in found):
            return found
        assert time.monotonic() < deadline, f"{path} has no exit record: was the run finished?"
        time.sleep(0.05)


def _log_records(data: bytes) -> Iterator[bytes]:
    assert data[:4] in (b":W&B", b""), "not a W&B run file"
    position, pieces = HEADER, b""
    while position + HEADER <= len(data):
        room = BLOCK - position % BLOCK
        if room < HEADER:  # the rest of a block is padding
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        piece = data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if len(piece) < length:  # still being written
            return
        assert kind in (WHOLE, FIRST, MIDDLE, LAST), f"unknown record kind {kind}"
        pieces = piece if kind in (WHOLE, FIRST) else pieces + piece
        if kind in (WHOLE, LAST):
            yield pieces
