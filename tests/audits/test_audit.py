"""Models and checkpoints judged layer by layer, compared with the same model in memory."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from hdi_callback import audit, head_diversity
from hdi_callback.audits.audit import Audit
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.readings import Record

transformers = pytest.importorskip("transformers")


class Encoder(nn.Module):
    """What a checkpoint is of."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), layers)


class Needy(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 4)


def build_encoder() -> Encoder:
    return Encoder(1)


NOT_A_MODEL = 3


def assert_same(found, other):
    """To what float32 keeps: products are rounded otherwise where weights begin elsewhere in memory."""
    assert len(found) == len(other)
    for left, right in zip(map(asdict, found), map(asdict, other)):
        numbers = {name for name, value in left.items() if isinstance(value, float)}
        assert {name: left[name] for name in numbers} == pytest.approx(
            {name: right[name] for name in numbers}, abs=1e-6
        )
        assert {name: left[name] for name in left.keys() - numbers} == {
            name: right[name] for name in right.keys() - numbers
        }


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    """Three layers of eight heads that share four keys; in layer 1 two key heads are one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96,
        vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        keys = model.model.layers[1].self_attn.k_proj.weight
        keys[24:32] = keys[8:16]
    return model


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(path, max_shard_size="40KB")
    return path


def test_a_pair_that_is_one_head_is_found_with_its_layer(llama):
    found = audit(llama)
    assert [(alert.layer, alert.finding.heads) for alert in found.unusual] == [("model.layers.1.self_attn", (1, 3))]
    assert found.verdict.startswith("1 of 3 layers is unusual. model.layers.1.self_attn: heads 1 and 3")
    layer = found.layers[1]
    assert (layer.num_heads, layer.num_key_heads, layer.worst_pair) == (8, 4, (1, 3))
    assert layer.worst_alignment == pytest.approx(1, abs=1e-5)


def test_the_numbers_are_those_of_the_key_weights(llama):
    exact = head_diversity(llama.model.layers[2].self_attn.k_proj.weight.unflatten(0, (4, 8)), method="exact")
    layer = audit(llama).layers[2]
    assert layer.hdi == pytest.approx(float(exact.index), abs=1e-5)
    assert layer.chance == pytest.approx(float(exact.chance), abs=1e-6)
    assert layer.energy_alignment == pytest.approx(float(exact.energy_alignment), abs=1e-5)
    assert layer.effective_heads == pytest.approx(float(exact.effective_heads), abs=1e-4)


def test_a_folder_of_shards_reads_as_the_model_that_was_saved(llama, folder):
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same(audit(folder).layers, audit(llama).layers)


def test_a_healthy_model_names_its_closest_pair(folder):
    found = audit(folder, exclude=["*.1.*"])
    assert not found.unusual
    assert found.verdict.startswith("Nothing unusual in 2 layers. The two closest heads are ")


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration"])
def test_other_layouts_read_from_files_as_from_memory(kind, tmp_path):
    torch.manual_seed(0)
    config = {
        "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64),
        "BertForMaskedLM": lambda: transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=64
        ),
        "T5ForConditionalGeneration": lambda: transformers.T5Config(
            d_model=32, d_kv=8, num_heads=4, num_layers=1, d_ff=32, vocab_size=64
        ),
    }[kind]()
    model = getattr(transformers, kind)(config)
    model.save_pretrained(tmp_path)
    found = audit(tmp_path)
    assert len(found.layers) > 1
    assert not found.not_audited
    assert_same(found.layers, audit(model).layers)


def test_a_base_model_in_the_files_is_read_into_the_model_with_a_head(llama, tmp_path):
    llama.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    assert [layer.hdi for layer in audit(tmp_path).layers] == [layer.hdi for layer in audit(llama).layers]


def test_a_safetensors_file_needs_the_config_of_its_model(llama, folder, tmp_path):
    llama.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "config.json").unlink()
    file = tmp_path / "whole" / "model.safetensors"
    with pytest.raises(MisconfigurationError, match="write --config"):
        audit(file)
    assert_same(audit(file, config=folder).layers, audit(llama).layers)


def test_a_checkpoint_of_lightning_is_built_from_its_hyperparameters(tmp_path):
    model = Encoder(3)
    state = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "hyper_parameters": {"layers": 3}, "global_step": 7}, tmp_path / "a.ckpt")
    found = audit(tmp_path / "a.ckpt", model_class=f"{__name__}:Encoder")
    assert_same(found.layers, audit(model).layers)
    assert found.record.step == 7


def test_a_file_of_an_early_torch_is_read_as_well(tmp_path):
    model = Encoder()
    torch.save(model.state_dict(), tmp_path / "a.bin", _use_new_zipfile_serialization=False)
    assert_same(audit(tmp_path / "a.bin", model_class=Encoder).layers, audit(model).layers)


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"state_dict": {}, "hyper_parameters": {"layers": Trap()}}, tmp_path / "a.ckpt")
    with pytest.raises(MisconfigurationError, match="which would be executed"):
        audit(tmp_path / "a.ckpt", model_class=Encoder)
    assert not (tmp_path / "executed").exists()


def test_code_in_a_folder_is_not_executed(folder, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoConfig": "trap.Config"}})
    )
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with pytest.raises(MisconfigurationError, match="module:function"):
        audit(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_layers_that_are_not_in_the_files_are_named_with_the_reason(llama, tmp_path):
    state = {name: value for name, value in llama.state_dict().items() if "layers.2.self_attn.k" not in name}
    llama.save_pretrained(tmp_path, state_dict=state)
    found = audit(tmp_path)
    assert found.layers[2].absent == "`k_proj.weight`: it is not in the file"
    assert found.layers[2].hdi is None
    assert found.layers[0].hdi is not None
    assert "1 layer could not be audited" in found.verdict


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_refused_and_not_read_as_numbers(llama, tmp_path, dtype):
    from safetensors.torch import save_file

    state = {name: value.clone() for name, value in llama.state_dict().items() if "layers" in name}
    state = {name: value.to(dtype) if "k_proj" in name else value for name, value in state.items()}
    llama.config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    found = audit(tmp_path)
    assert all("quantised" in layer.absent for layer in found.layers)
    assert found.verdict == "Nothing could be audited."


def test_nan_weights_are_a_finding_of_an_audit():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4)})
    with torch.no_grad():
        model["attn"].in_proj_weight[40, 0] = float("nan")
    found = audit(model)
    assert [(alert.layer, alert.rule, alert.level) for alert in found.unusual] == [
        ("attn", "weights not finite", "critical")
    ]
    assert found.verdict.startswith("1 of 1 layer is unusual. attn: ")


def test_dead_heads_are_counted_by_name():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4)})
    with torch.no_grad():
        model["attn"].in_proj_weight[32 + 16 : 32 + 24] = 0
    found = audit(model)
    assert found.layers[0].dead_heads == (2,)
    assert "dead heads" in {alert.rule for alert in found.unusual}


def test_an_audit_judges_the_weights_of_a_checkpoint_without_regard_to_pretraining():
    """A run leaves alone what was so in the weights that it loaded; an audit is asked about just that."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(64, 4)})
    with torch.no_grad():
        keys = model["attn"].in_proj_weight[64:128].unflatten(0, (4, 16))
        keys *= torch.logspace(0, -2, 16)[:, None]  # a spectrum as training leaves it
        keys[3] = keys[0] + 0.01 * keys[3]
    assert [(alert.rule, alert.finding.heads) for alert in audit(model).unusual] == [("worst pair", (0, 3))]


def test_a_single_key_head_is_reported_as_not_comparable():
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1, intermediate_size=32,
        vocab_size=64,
    )  # fmt: skip
    found = audit(transformers.LlamaForCausalLM(config))
    assert found.layers[0].absent == "it has one key head, which there is nothing to compare with"


def test_an_audit_draws_no_random_number_and_changes_no_weight(llama):
    before, weights = torch.get_rng_state(), [value.clone() for value in llama.parameters()]
    audit(llama)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(weights, llama.parameters()))


def test_a_function_that_builds_a_model_is_called():
    assert [layer.name for layer in audit(f"{__name__}:build_encoder").layers] == ["encoder.layers.0.self_attn"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no/such/place", "There is no file or folder `no/such/place`. Write a folder"),
        ("", "must be a torch.nn.Module, a path or a name"),
        (f"{__name__}:nothing", "has no `nothing`"),
        ("no_such_module:build", "`no_such_module` cannot be imported"),
        (f"{__name__}:NOT_A_MODEL", "must be a function that builds a model, got a int"),
        (f"{__name__}:Needy", "it must build a model without arguments"),
        (3, "must be a torch.nn.Module, a path or a name"),
    ],
)
def test_input_that_cannot_be_audited_is_an_error_with_the_remedy(what, said):
    with pytest.raises(MisconfigurationError) as caught:
        audit(what)
    assert said in str(caught.value)


def test_broken_files_are_errors_that_name_them(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(MisconfigurationError, match="There are no weights in"):
        audit(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(MisconfigurationError, match="cannot be read as a safetensors file"):
        audit(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(MisconfigurationError, match="lacks 1 of its 1 shards"):
        audit(tmp_path)
    (tmp_path / "a.ckpt").write_bytes(b"PK nothing")
    with pytest.raises(MisconfigurationError, match=r"a\.ckpt` cannot be read"):
        audit(tmp_path / "a.ckpt", model_class=Encoder)
    with pytest.raises(MisconfigurationError, match="write --class"):
        audit(tmp_path / "a.ckpt")


def test_a_notebook_shows_the_verdict_and_escapes_names(llama):
    model = nn.ModuleDict({"<b>": nn.MultiheadAttention(32, 4)})
    shown = audit(model)._repr_html_()
    assert "&lt;b&gt;" in shown
    assert "<b>:" not in shown
    assert "model.layers.1.self_attn: heads 1 and 3 are" in audit(llama)._repr_html_()


def test_a_printed_audit_is_a_table_with_the_verdict_last(llama):
    found = audit(llama)
    lines = str(found).splitlines()
    assert lines[-1] == found.verdict
    assert [line.split()[0] for line in lines[1:-1]] == [layer.name for layer in found.layers]
    assert "1 and 3" in lines[2]
    assert f"{found.layers[1].hdi:.2f} / {found.layers[1].chance:.2f}" in lines[2]
    assert repr(found) == "<Audit of LlamaForCausalLM: 3 layers, 1 unusual>"


def test_a_printed_audit_names_what_was_not_audited():
    found = Audit("m", (), {"blocks.0": "its heads cannot be told apart"}, (), Record(0, {}), ())
    assert str(found) == "not audited: blocks.0: its heads cannot be told apart\nNothing could be audited."


def test_an_audit_as_plain_data_survives_json(folder):
    data = json.loads(json.dumps(audit(folder).to_dict()))
    assert data["is_unusual"] is True
    assert data["findings"][0]["heads"] == [1, 3]
    assert len(data["layers"]) == 3


def test_weights_of_another_shape_than_the_config_says_are_not_read(llama, tmp_path):
    from safetensors.torch import save_file

    state = {name: value.clone() for name, value in llama.state_dict().items() if "layers" in name}
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({**state, name: state[name][:16].clone()}, tmp_path / "model.safetensors")
    llama.config.save_pretrained(tmp_path)
    found = audit(tmp_path)
    absent = [layer.absent for layer in found.layers]
    assert absent == ["", "`k_proj.weight`: it is (16, 64) in the file and (32, 64) in the model", ""]


def test_a_file_without_a_mapping_is_refused_as_a_checkpoint(tmp_path):
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(MisconfigurationError, match="holds a list, expected a checkpoint or a state dict"):
        audit(tmp_path / "list.pt", model_class=Encoder)


BUILT = Encoder(1)


def test_a_model_is_named_like_a_function_that_builds_one():
    assert audit(f"{__name__}:BUILT").layers == audit(BUILT).layers


def test_a_folder_may_hold_its_weights_under_another_name(llama, folder, tmp_path):
    llama.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert_same(audit(tmp_path).layers, audit(folder).layers)
