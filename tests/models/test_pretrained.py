"""Pretrained weights: what is loaded is what was saved, and named; anything else is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sentinel_bench import runner
from sentinel_bench.config import Cell, Component, Scenario
from sentinel_bench.data import _hub
from sentinel_bench.errors import ConfigError
from sentinel_bench.models import pretrained
from sentinel_bench.models.build import build_model, model_config
from sentinel_bench.models.families import FAMILIES
from sentinel_bench.pipeline.stages import split

VOCABULARY = 50
FAMILY_PRESETS = [
    "llama-tiny", "gpt2-tiny", "opt-tiny", "bloom-tiny", "deepseek-tiny", "llama4-tiny"
]  # fmt: skip


def scenario_of(preset: str = "gpt2-tiny", seq_len: int = 8, **model: Any) -> Scenario:
    return Scenario(
        model={"preset": preset, "layers": 2, **model},
        data={"tokenizer": "tokenizer.json"},
        grid={"stages": 2},
        train={"seq_len": seq_len},
    )


def save(folder: Path, preset: str = "gpt2-tiny") -> Any:
    """Save a model as transformers has it: with tied embeddings and dropout."""
    config = model_config(scenario_of(preset), VOCABULARY)
    for key, value in FAMILIES[config.model_type].fixed.items():
        if isinstance(value, float):
            setattr(config, key, 0.1)
    torch.manual_seed(5)
    model = FAMILIES[config.model_type].model(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a tiny GPT-2."""
    save(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.mark.parametrize("preset", FAMILY_PRESETS)
def test_a_loaded_model_is_the_saved_one_untied_and_without_dropout(
    tmp_path: Path, preset: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = save(tmp_path, preset)
    capfd.readouterr()
    state = torch.get_rng_state()
    loaded = build_model(scenario_of(preset, pretrained=str(tmp_path)), VOCABULARY)
    assert torch.equal(torch.get_rng_state(), state)
    assert capfd.readouterr() == ("", "")
    ids = torch.randint(VOCABULARY, (3, 8))
    h = ids
    for stage in split(loaded, [1, 1]):
        h = stage(h)
    torch.testing.assert_close(h, model(input_ids=ids).logits, rtol=1e-5, atol=1e-6)
    embedding, head = loaded.get_input_embeddings(), loaded.get_output_embeddings()
    assert embedding.weight.data_ptr() != head.weight.data_ptr()
    runs = FAMILIES[loaded.config.model_type].runs
    assert {key: getattr(loaded.config, f"_{key}") for key in runs} == runs


def test_the_seed_does_not_change_pretrained_weights(saved: Path) -> None:
    one = scenario_of(pretrained=str(saved))
    two = one.model_copy(update={"seeds": one.seeds.model_copy(update={"model": 9})})
    states = [build_model(s, VOCABULARY).state_dict() for s in (one, two)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def identity_of(scenario: Scenario) -> dict[str, Any]:
    none = Component(name="none")
    return runner.identity(Cell(scenario=scenario, attack=none, defense=none), "data")


def test_the_identity_of_a_cell_holds_the_digest_of_what_is_loaded(saved: Path) -> None:
    scenario = scenario_of(pretrained=str(saved))
    before = identity_of(scenario)["weights"]
    (saved / "README.md").write_text("not loaded")
    assert identity_of(scenario)["weights"] == before
    file = saved / "model.safetensors"
    elsewhere = saved.parent / "blob"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert identity_of(scenario)["weights"] == before
    tensors = load_file(elsewhere)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 1
    save_file(tensors, elsewhere, metadata={"format": "pt"})
    assert identity_of(scenario)["weights"] != before
    assert "weights" not in identity_of(scenario_of())


def test_a_name_on_the_hub_is_identified_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, file: str, *, revision: str | None, local_files_only: bool) -> str:
        asked.append((name, file, revision, local_files_only))
        return f"/cache/snapshots/abc123/{file}"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    scenario = scenario_of(pretrained="somebody/model-of-a-test", revision="v1")
    expected = {"hub": "somebody/model-of-a-test", "revision": "abc123"}
    assert identity_of(scenario)["weights"] == expected
    assert asked == [("somebody/model-of-a-test", "config.json", "v1", True)]


def test_without_internet_a_hub_name_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable() -> None:
        raise _hub.UnreachableError("no answer")

    monkeypatch.setattr(_hub, "check_reachable", unreachable)
    with pytest.raises(ConfigError, match=r"needs internet once: .* give the folder") as error:
        identity_of(scenario_of(pretrained="nobody/not-in-any-cache"))
    assert "\n" not in str(error.value)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def one_missing(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.0.mlp.c_fc.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def another_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_inner": 99}))


def untouched(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    "spoil, changes, message",
    [
        (no_config, {}, "holds no config.json"),
        (broken_config, {}, "cannot be loaded"),
        (cut_off, {}, "cannot be loaded"),
        (no_weights, {}, "cannot be loaded"),
        (one_missing, {}, "lacks 1 of the weights of a gpt2, such as transformer.h.0.mlp.c_fc"),
        (another_width, {}, "n_inner 99, not 256; set model.preset to one of its shape"),
        (
            untouched,
            {"preset": "opt-tiny"},
            "of the family gpt2, and model.preset opt-tiny of opt; set",
        ),
        (untouched, {"layers": 3}, "n_layer 2, not 3"),
        (untouched, {"seq_len": 9}, "knows 8 positions, and train.seq_len is 9"),
        (untouched, {"revision": "main"}, "model.revision is of a hub name"),
    ],
)
def test_weights_that_do_not_fit_are_told_in_one_line(
    saved: Path, spoil: Callable[[Path], None], changes: dict[str, Any], message: str
) -> None:
    spoil(saved)
    with pytest.raises(ConfigError, match=message) as error:
        build_model(scenario_of(**{"pretrained": str(saved), **changes}), VOCABULARY)
    assert "\n" not in str(error.value)


def test_a_corpus_with_more_tokens_than_the_model_knows_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match="knows 50 tokens, and the corpus has 51"):
        build_model(scenario_of(pretrained=str(saved)), 51)


def test_weights_that_do_not_fit_are_told_before_anything_is_loaded(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(FAMILIES["gpt2"].model, "from_pretrained", fail)
    fits = scenario_of(pretrained=str(saved))
    pretrained.check_files(fits, VOCABULARY)
    with pytest.raises(ConfigError, match="knows 50 tokens"):
        pretrained.check_files(fits, 51)
    with pytest.raises(ConfigError, match="n_layer 2, not 3"):
        pretrained.check_files(scenario_of(pretrained=str(saved), layers=3))
    pretrained.check_files(scenario_of())


@pytest.mark.parametrize("name", ["./nothing", "~/nothing-there", "/nothing"])
def test_a_folder_that_is_not_there_is_told_and_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        pretrained.identity(scenario_of(pretrained=name).model)


def test_settings_that_do_not_fit_pretrained_weights_are_refused_before_the_run() -> None:
    bpe = Scenario(model={"preset": "gpt2-tiny", "pretrained": "x/y"})
    with pytest.raises(ConfigError, match=r"add --set data\.tokenizer=x/y"):
        pretrained.check(bpe)
    with pytest.raises(ConfigError, match=r"model\.revision is of pretrained weights"):
        pretrained.check(Scenario(model={"revision": "main"}))
    pretrained.check(Scenario())
