"""One outlet, one alert or one tag that fails never keeps the others from their data."""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hdi_callback.dashboards.console import AlertLines, print_layers
from hdi_callback.dashboards.loggers import LoggerSink
from hdi_callback.dashboards.tensorboard import Board, lay_out_charts
from hdi_callback.dashboards.wandb import RunLog, RunTables
from hdi_callback.errors import HeadCollapseWarning
from hdi_callback.monitoring.alerts import Alert, Finding
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.session.sink import OnAlert, Result
from hdi_callback.monitoring.warn_once import WarnOnce
from tests.wandb_files import read_wandb


def alert(layer: str, level: str = "warning", rule: str = "mean alignment") -> Alert:
    return Alert(3, layer, rule, level, f"step 3, {layer}: what happened", Finding("what happened", level=level))


def result(values: dict[str, float], alerts=(), step: int = 3) -> Result:
    layers = {name: LayerRecord({"hdi": value, "hdi_worst_pair": 1 - value}) for name, value in values.items()}
    return Result(Record(step, layers, axis=step), tuple(alerts))


class RefusesOne:
    """A writer that cannot write what is about one layer."""

    def __init__(self, refused: str) -> None:
        self.refused, self.written, self.texts = refused, {}, {}

    def add_custom_scalars(self, layout): ...

    def add_scalar(self, tag, value, step):
        if tag.endswith(self.refused):
            raise ValueError(f"{tag} cannot be written")
        self.written[tag] = value

    def add_text(self, tag, text, step):
        raise OSError("the disk is full")


def test_every_alert_is_delivered_to_a_function_that_raises_at_each():
    delivered = []

    def on_alert(news):
        delivered.append(news.layer)
        raise KeyError(news.layer)

    with pytest.raises(KeyError, match="a"):
        OnAlert(on_alert).write(result({}, [alert(name) for name in "abc"]))
    assert delivered == ["a", "b", "c"]


def test_a_tag_that_cannot_be_written_does_not_lose_other_curves_and_marks():
    writer = RefusesOne("/b")
    board = Board(writer, ["hdi", "hdi_worst_pair"])
    with pytest.raises(ValueError, match="hdi/b cannot be written"):
        board.write(result({"a": 0.1, "b": 0.2, "c": 0.3}, [alert("b"), alert("c")]))
    curves = {f"{metric}/{name}" for metric in ("hdi", "hdi_worst_pair") for name in "ac"}
    assert set(writer.written) == curves | {"hdi/mean", "hdi/min", "alert/hdi/c"}


def test_alerts_of_one_layer_and_step_share_a_mark_and_later_ones_get_another():
    writer = RefusesOne("refused")
    board = Board(writer, ["hdi"], ["a"])
    for step in (3, 7):
        both = [alert("a"), alert("a", rule="trend")]
        with pytest.raises(OSError, match="full"):
            board.write(result({"a": 0.1 * step}, both, step=step))
    marks = {tag: value for tag, value in writer.written.items() if tag.startswith("alert/")}
    assert marks == {"alert/hdi/a": pytest.approx(0.3), "alert/hdi/a/step 7": pytest.approx(0.7)}


def test_the_table_of_layers_names_every_rule_whose_alert_is_active():
    active = [alert("a"), alert("a", rule="merged scores"), alert("b", "notice", rule="trend")]
    last = replace(result({"a": 0.3, "b": 0.4}), active=tuple(active), is_last=True)
    columns, rows = RunTables(["hdi"]).add(last)["attention_heads/layer_table"]
    assert [row[columns.index("alert")] for row in rows] == ["mean alignment, merged scores", ""]


def test_a_line_that_cannot_be_printed_loses_neither_the_next_line_nor_the_warning():
    lines = []

    def say(text):
        lines.append(text)
        if "layer.a" in text:
            raise BrokenPipeError

    reported = [alert("layer.a", "critical"), alert("layer.b", rule="worst pair")]
    with pytest.raises(BrokenPipeError), pytest.warns(HeadCollapseWarning, match=r"layer\.a"):
        AlertLines(say).write(result({}, reported))
    assert len(lines) == 2
    assert "layer.b" in lines[1]


def test_names_are_printed_on_a_stream_that_is_ascii_only():
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii", write_through=True)
    AlertLines(lambda text: print(text, file=stream)).write(result({}, [alert("köpfe.0")]))
    assert r"k\xf6pfe.0" in buffer.getvalue().decode("ascii")
    stream.write("still open")


def test_a_table_shows_names_with_brackets_unchanged(monkeypatch, capsys):
    rich_console = pytest.importorskip("rich.console")
    terminal = rich_console.Console(force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(rich_console, "Console", lambda: terminal)

    class Layer:
        name, kind, num_heads, num_key_heads, head_dim, value_dim = "blocks[/0].attn", "own", 4, 4, 8, 8

    print_layers([Layer()], [], every_n_steps=2)
    assert "blocks[/0].attn" in capsys.readouterr().out


@pytest.mark.slow
def test_the_summary_of_wandb_has_the_extremes_of_names_with_dots_also_of_a_layer_found_late(tmp_path):
    import wandb

    run = wandb.init(mode="offline", dir=tmp_path, project="test", settings=wandb.Settings(silent=True))
    log = RunLog(run, ["hdi", "hdi_worst_pair"], ["blocks.0.attn"], "hdi_step")
    for step, (first, late) in enumerate([(0.5, None), (0.2, 0.9), (0.7, 0.8)]):
        values = {"blocks.0.attn": first} | ({} if late is None else {r"late.1\x.attn": late})
        log.write(result(values, step=step))
    run.finish()
    wandb.teardown()
    summary = read_wandb(tmp_path).summary
    assert summary["hdi/blocks.0.attn"] == {"last": 0.7, "min": 0.2}
    assert summary["hdi_worst_pair/blocks.0.attn"] == {"last": pytest.approx(0.3), "max": 0.8}
    assert summary[r"hdi/late.1\x.attn"] == {"last": 0.8, "min": 0.8}
    assert summary["hdi/min"]["min"] == 0.2


def test_an_exception_whose_message_raises_costs_one_warning():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with WarnOnce().guard("a thing with \ud800 in its name"):
            raise MuteError
    (only,) = caught
    assert str(only.message) == r"a thing with \ud800 in its name failed (MuteError). Training goes on."


def test_tensorboard_charts_of_many_layers_hold_eight_with_their_marks_and_the_scale():
    writer = RefusesOne("refused")
    writer.add_custom_scalars = lambda layout: writer.written.update(layout)
    names = [f"layer.{number}" for number in range(10)]
    lay_out_charts(writer, ["hdi", "hdi_worst_pair"], layers=names)
    charts = writer.written["head diversity, layers in groups"]
    assert list(charts) == ["hdi_worst_pair: layer.0 to layer.7", "hdi_worst_pair: layer.8 to layer.9"]
    kind, patterns = charts["hdi_worst_pair: layer.8 to layer.9"]
    tags = [f"{start}hdi_worst_pair/{name}" for start in ("", "alert/") for name in names]
    shown = {
        tag for tag in [*tags, "scale/chance", "hdi/layer.8"] if any(re.search(pattern, tag) for pattern in patterns)
    }
    assert kind == "Multiline"
    assert shown == {tag for tag in tags if tag.endswith(("8", "9"))} | {"scale/chance"}
    writer.written.clear()
    lay_out_charts(writer, ["hdi", "hdi_worst_pair"], layers=names[:8])
    assert "head diversity, layers in groups" not in writer.written


def test_after_sixty_alert_lines_one_line_names_the_place_of_the_others():
    lines = []
    printed = AlertLines(lines.append, "here.jsonl")
    for step in range(70):
        printed.write(result({"a": 0.5}, [alert("a", rule=f"rule {step}")], step=step))
    assert len(lines) == 61
    assert lines[-1] == "hdi_callback prints no further alerts; all of them are in here.jsonl."


def test_tables_are_logged_with_new_alerts_at_most_every_five_minutes_and_at_the_end(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    tables, quiet, loud = RunTables(["hdi"]), result({"a": 0.5}), result({"a": 0.5}, [alert("a")])
    assert tables.add(quiet) == {}
    assert len(tables.add(loud)["attention_heads/alert_table"][1]) == 1
    now[0] += 299
    assert tables.add(loud) == {}
    now[0] += 2
    assert len(tables.add(quiet)["attention_heads/alert_table"][1]) == 2
    now[0] += 1000
    assert tables.add(quiet) == {}
    assert len(tables.add(replace(quiet, is_last=True))) == 2


def test_an_alert_of_many_layers_is_one_line_with_three_of_their_names_and_how_many_more():
    lines = []
    AlertLines(lines.append).write(result(dict.fromkeys("abcdef", 0.5), [alert(name, rule="own") for name in "abcdef"]))
    assert lines == ["hdi_callback warning: step 3, a: what happened (and so in b, c, d and 2 more)"]


def test_loggers_are_told_apart_by_their_methods():
    texts = []
    comet = SimpleNamespace(log_text=lambda text, step: texts.append((text, step)), log_image=None, log_other=None)
    aim = SimpleNamespace(track=None, get_image_sequence=None, get_text_sequence=None)
    logger = SimpleNamespace(experiment=comet, log_metrics=lambda metrics, step: None)
    sink = LoggerSink(logger, ["hdi"], "")
    sink.write(result({"a": 0.5}, [alert("a")]))
    assert texts == [("warning: step 3, a: what happened", 3)]
    assert sink.pictures() is not None
    assert LoggerSink(SimpleNamespace(experiment=aim), ["hdi"], "").pictures() is not None
    assert LoggerSink(SimpleNamespace(), ["hdi"], "").pictures() is None


def test_a_run_of_wandb_gets_the_tables_with_the_row_of_their_reading():
    logged = []
    run = SimpleNamespace(
        define_metric=lambda *args, **options: None,
        log=lambda row, commit=True: logged.append((row, commit)),
        alert=lambda **options: None,
    )
    RunLog(run, ["hdi"], ["a"]).write(replace(result({"a": 0.5}), is_last=True))
    (tables, is_row), (row, is_committed) = logged
    assert (is_row, is_committed) == (False, True)
    assert tables["attention_heads/layer_table"].data == [[3, "a", "", "", 0.5]]
    assert row["hdi/a"] == 0.5
