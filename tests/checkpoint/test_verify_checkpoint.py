"""scripts/verify_checkpoint.py: what passes, and that each kind of fault is named by its layer."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoint import edit, run_script, save_small, small_model

from afmoe.checkpoint import verify
from afmoe.checkpoint.certificate import certify
from afmoe.checkpoint.config_file import read_config
from afmoe.checkpoint.layouts import LAYOUTS
from afmoe.checkpoint.model_files import ModelFiles
from afmoe.checkpoint.pretrained import load_pretrained, save_pretrained
from afmoe.checkpoint.reference import ReferenceLayers
from afmoe.checkpoint.shapes import canonical_specs
from afmoe.errors import ConfigError

EXPERT = "model.layers.2.mlp.experts.{}.up_proj.weight"
VARIANTS = {
    "default": {},
    "tied, no shared expert": {"tie_word_embeddings": True, "num_shared_experts": 0, "mup_enabled": False},
    "biases, yarn": {
        "attention_bias": True,
        "num_dense_layers": 0,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    },
    "dense only": {"num_dense_layers": 4, "pad_token_id": 3},
}

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")


def verified(*arguments):
    return run_script("verify_checkpoint", *arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_sound_checkpoint_passes_in_every_layout(tmp_path, name, layout):
    directory = save_small(tmp_path / "model", layout, **VARIANTS[name])
    certificate = certify(directory, num_tokens=40)
    assert certificate.passes, certificate.failures
    # measured: at most 5e-7 in a layer, 2e-7 in the logits
    assert max(result.largest_error for result in certificate.layers) < 3e-6
    assert set(certificate.ends) == {"embedding", "logits"}
    assert all(not result.same_experts and not result.non_finite for result in certificate.layers)
    for result in certificate.layers:
        assert result.feed_forward == "dense" or 3 <= result.num_experts_reached <= 11


def test_a_checkpoint_in_bf16_is_verified_in_fp32(tmp_path):
    save_pretrained(small_model(), tmp_path / "model", "hf", torch.bfloat16)
    assert max(result.largest_error for result in certify(tmp_path / "model").layers) < 3e-6


def test_the_certificate_on_the_screen_and_as_json(tmp_path, capsys):
    directory = save_small(tmp_path / "model")
    assert verified(directory, "--json", tmp_path / "certificate.json", "--tokens", 8) == 0
    screen = capsys.readouterr().out
    for text in (
        "sliding dense",
        "full experts",
        "logits",
        "PASS: 4 of 4 layers within 1e-05",
        "transformers 5.",
    ):
        assert text in screen, screen
    content = json.loads((tmp_path / "certificate.json").read_text())
    assert content["passes"]
    assert content["sha256"].keys() == {"config.json", "generation_config.json", "model.safetensors"}
    assert f"sha256 {content['sha256']['model.safetensors']}  model.safetensors" in screen
    assert [layer["layer"] for layer in content["layers"]] == [0, 1, 2, 3]


def test_a_part_is_called_a_part(tmp_path, capsys):
    directory = save_small(tmp_path / "model")
    assert verified(directory, "--layers", 2, "--tokens", 4) == 0
    screen = capsys.readouterr().out
    assert "PARTIAL PASS: 2 of 4 layers" in screen
    assert "window 4 (not reached: --tokens 68 would)" in screen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_expert_exchanged_in_a_converted_checkpoint_names_the_layer(tmp_path, layout, capsys):
    source = save_small(tmp_path / "source")
    assert run_script("convert_checkpoint", source, tmp_path / "copy", "--layout", layout) == 0
    assert verified(tmp_path / "copy", "--tokens", 40) == 0
    assert f"bit for bit with {source}: every tensor equal" in capsys.readouterr().out

    save_pretrained(exchanged_model(tmp_path / "copy"), tmp_path / "other", layout)
    (tmp_path / "other" / "conversion.json").write_text((tmp_path / "copy" / "conversion.json").read_text())
    assert verified(tmp_path / "other", "--json", tmp_path / "certificate.json", "--tokens", 40) == 1
    content = json.loads((tmp_path / "certificate.json").read_text())
    assert [text.split(":")[0] for text in content["failures"]] == ["layer 2"]
    assert {item["key"]: item["found_as"] for item in content["differences"]} == {
        EXPERT.format(3): EXPERT.format(7),
        EXPERT.format(7): EXPERT.format(3),
    }
    # not by the bits alone: the computation shows it too
    failing = [layer for layer in content["layers"] if max(layer["errors"].values()) > 1e-5]
    assert [layer["layer"] for layer in failing] == [2]
    assert failing[0]["errors"]["experts"] > 1
    assert failing[0]["errors"]["feed_forward"] > 1e-2
    assert failing[0]["worst_expert"] in (3, 7)
    # the one file alone is a whole model of its own: nothing to see
    assert verified(tmp_path / "other", "--alone", "--tokens", 40) == 0


def exchanged_model(directory):
    model = load_pretrained(directory)
    weights = model.model.layers[2].mlp.experts.up_proj
    with torch.no_grad():
        weights[[3, 7]] = weights[[7, 3]]
    return model


@pytest.mark.parametrize("layout", ["hf_fused", "prime", "canonical"])
@pytest.mark.parametrize("fault", ["gate and up", "down of two experts"])
def test_a_mistake_of_our_own_conversion_shows_in_one_directory(tmp_path, layout, fault, monkeypatch):
    directory = save_small(tmp_path / "model", layout)
    read_layer = ModelFiles.read_layer

    def mistaken(self, layer, *arguments):
        tensors = read_layer(self, layer, *arguments)
        if layer == 2 and fault == "gate and up":
            names = [f"model.layers.2.mlp.experts.{part}_proj" for part in ("gate", "up")]
            tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
        if layer == 2 and fault == "down of two experts":
            tensors["model.layers.2.mlp.experts.down_proj"] = tensors[
                "model.layers.2.mlp.experts.down_proj"
            ].roll(1, 0)
        return tensors

    monkeypatch.setattr(ModelFiles, "read_layer", mistaken)
    certificate = certify(directory, num_tokens=40)
    assert [text.split(":")[0] for text in certificate.failures] == ["layer 2"]


def test_an_expert_that_no_token_reaches_is_still_compared(tmp_path):
    # one token reaches 3 of 11 experts
    directory = save_small(tmp_path / "model")
    other = save_small(tmp_path / "other")
    save_file(load_file(directory / "model.safetensors"), other / "model.safetensors")
    reached = certify(directory, num_tokens=1).layers[2]
    assert reached.num_experts_reached == 3
    unreached = next(expert for expert in range(11) if expert not in chosen_by_one_token(directory))
    edit(other, lambda state: state | {EXPERT.format(unreached): -state[EXPERT.format(unreached)]})
    certificate = certify(other, against=directory, num_tokens=1)
    result = certificate.layers[2]
    assert result.errors["output"] < 1e-6
    assert result.errors["experts"] > 1
    assert result.worst_expert == unreached


def chosen_by_one_token(directory):
    config = read_config(directory)
    files = ModelFiles(directory, canonical_specs(config))
    chosen = []
    compare = verify._compare

    def remember(ours, theirs, result):
        chosen.append(None if ours.expert_ids_TK is None else set(ours.expert_ids_TK.flatten().tolist()))
        compare(ours, theirs, result)

    verify._compare = remember
    try:
        reference = ReferenceLayers(directory, "hf")
        verify.verify_layers(files, config, reference, num_layers=3, num_tokens=1)
    finally:
        verify._compare = compare
    return chosen[2]


def test_a_layer_that_our_model_computes_otherwise_fails_and_no_other(tmp_path, monkeypatch):
    directory = save_small(tmp_path / "model")
    our_layer = verify._our_layer

    def mistaken(files, config, layer):
        model = our_layer(files, config, layer)
        if layer == 1:
            # what a forgotten route_scale would be
            model.layers[0].mlp.router.route_scale = 1.0
        return model

    monkeypatch.setattr(verify, "_our_layer", mistaken)
    certificate = certify(directory, num_tokens=40)
    assert [result.passes for result in certificate.layers] == [True, False, True, True]


def test_a_tie_is_where_the_scores_leave_the_choice_open():
    # of the second token the two best experts differ by 1e-7, of the third one side chose the worst
    ids = [torch.tensor([[1], [2], [0]]), torch.tensor([[1], [0], [2]])]
    scores = torch.tensor([[0.1, 0.9, 0.2], [0.5, 0.1, 0.5 + 1e-7], [0.9, 0.1, 0.2]])
    runs = [verify._Run({}, torch.zeros(3, 1), expert_ids_TK=chosen, scores_TE=scores) for chosen in ids]
    assert verify._is_tie(runs[0], runs[1]).tolist() == [False, True, False]


def test_a_rounded_copy_is_compared_with_the_source_rounded_likewise(tmp_path):
    source = save_small(tmp_path / "source")
    copy = tmp_path / "copy"
    assert run_script("convert_checkpoint", source, copy, "--layout", "canonical", "--dtype", "bfloat16") == 0
    certificate = certify(copy, against=source, num_tokens=40)
    assert certificate.passes, certificate.failures
    assert certificate.transformers_read.endswith("(hf), rounded to bfloat16")


def test_what_is_no_number_fails_by_name(tmp_path, capsys):
    directory = save_small(tmp_path / "model")
    edit(directory, lambda state: state | {EXPERT.format(3): state[EXPERT.format(3)] * math.nan})
    assert verified(directory, "--tokens", 40, "--json", tmp_path / "certificate.json") == 1
    screen = capsys.readouterr().out
    assert "unusual: model.layers.2.mlp.experts.up_proj holds values that are not finite" in screen
    assert "  layer 2: relative error nan" in screen
    assert json.loads((tmp_path / "certificate.json").read_text())["layers"][2]["errors"]["experts"] == "nan"


def test_an_expert_that_is_a_copy_of_another_is_called_unusual(tmp_path, capsys):
    directory = save_small(tmp_path / "model")
    edit(directory, lambda state: state | {EXPERT.format(3): state[EXPERT.format(7)]})
    assert verified(directory, "--tokens", 40) == 0
    assert "layer 2: up_proj of experts 3 and 7 is the same tensor" in capsys.readouterr().out


def test_other_models_and_other_mistakes_are_one_line(tmp_path, capsys):
    directory = save_small(tmp_path / "model")
    other = save_small(tmp_path / "other", route_scale=1.0)
    for arguments, message in (
        ([directory, "--against", other], "are not the same model: route_scale is 2.5 and 1.0"),
        ([directory, "--layers", 9], "--layers must lie in [1, 4], got 9"),
        ([directory, "--tokens", 0], "--tokens must be at least 1, got 0"),
        ([tmp_path / "nowhere"], "nowhere is no directory"),
        ([directory, "--against", other, "--alone"], "give --against or --alone, not both"),
    ):
        assert verified(*arguments) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_model_that_transformers_cannot_compute_is_refused(tmp_path):
    directory = save_small(tmp_path / "model", "canonical", score_func="softmax")
    with pytest.raises(ConfigError, match="score_func"):
        certify(directory)
