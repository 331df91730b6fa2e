from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest
from torch import nn

from hdi_callback.attention import survey
from hdi_callback.dashboards.console import print_layers
from tests.models import LAYERS, Classifier

CODE = (
    "from hdi_callback.attention import survey\n"
    "from hdi_callback.dashboards.console import print_layers\n"
    "from tests.models import Classifier\n"
    "found = survey(Classifier())\n"
    "print_layers(found.layers, found.refused, every_n_steps=50)\n"
)


def test_plain_lines_where_there_is_no_terminal(capsys):
    found = survey(Classifier())
    print_layers(found.layers, found.refused, every_n_steps=50)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hdi_callback watches 2 attention layers, every 50 optimizer steps"
    assert [line.split(":")[0].strip() for line in lines[1:]] == LAYERS


def test_a_table_on_a_terminal(root):
    controller, terminal = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", CODE], cwd=root, stdout=terminal, env=os.environ | {"COLUMNS": "120", "TERM": "xterm"}
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(controller, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(controller)
    assert done.wait() == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    assert "┃ layer" in text
    assert all(name in text for name in LAYERS)


def test_what_is_not_watched_is_told_with_the_reason(capsys):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = 3
            self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(32, 32) for _ in range(4))

    found = survey(nn.ModuleDict({"odd": Odd(), "good": Classifier()}))
    print_layers(found.layers, found.refused, every_n_steps=5)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("odd:")]
    assert "not watched: it could not be run with inputs that are made up" in line, "it has no forward"


@pytest.mark.parametrize(("heads", "key_heads", "shown"), [(4, 4, ": 4 heads"), (4, 2, ": 4 (2 key) heads")])
def test_grouped_key_heads_are_shown(capsys, heads, key_heads, shown):
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.num_key_value_heads = heads, key_heads
            self.q_proj, self.out_proj = nn.Linear(32, 32), nn.Linear(32, 32)
            self.k_proj, self.v_proj = nn.Linear(32, 8 * key_heads), nn.Linear(32, 8 * key_heads)

        def forward(self, x):
            parts = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
            out = nn.functional.scaled_dot_product_attention(*parts, enable_gqa=True)
            return self.out_proj(out.transpose(1, 2).flatten(2))

    found = survey(nn.ModuleDict({"attn": Grouped()}))
    print_layers(found.layers, found.refused, every_n_steps=5)
    assert f"attn{shown} of width 8" in capsys.readouterr().out
