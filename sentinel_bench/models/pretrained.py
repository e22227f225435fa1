"""Pretrained weights: where they are, what identifies them, and how they are loaded.

`model.pretrained` is a folder that `save_pretrained` has written, or a name on the hub. Of a folder
the digest of its configuration and weights is part of a cell's identity, of a hub name the commit.
No torch at the top: the identity of a cell is made before the pipeline is imported.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentinel_bench.config import ModelConfig, Scenario
from sentinel_bench.data import _hub
from sentinel_bench.errors import ConfigError
from sentinel_bench.models.presets import layers_per_stage, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from sentinel_bench.models.families import Family

CONFIG = "config.json"
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


def check(scenario: Scenario) -> None:
    """Refuse settings that do not fit pretrained weights; reads no file.

    Raises:
        ConfigError: what is wrong.
    """
    model, tokenizer = scenario.model, scenario.data.tokenizer
    if model.pretrained is None:
        if model.revision is not None:
            raise ConfigError(
                "model.revision is of pretrained weights; give model.pretrained, or leave it out"
            )
        return
    if tokenizer == "bpe":
        raise ConfigError(
            f"model.pretrained {model.pretrained} knows the tokens of its own tokenizer; "
            f"add --set data.tokenizer={model.pretrained}"
        )


def identity(model: ModelConfig) -> dict[str, str] | None:
    """Return what identifies the pretrained weights of a model, None if it has none.

    Raises:
        ConfigError: they are not there.
    """
    if model.pretrained is None:
        return None
    folder = _folder(model)
    if folder is not None:
        return {"digest": _digest(folder)}
    return {"hub": model.pretrained, "revision": _commit(model.pretrained, model.revision)}


def check_files(scenario: Scenario, vocabulary: int = 0) -> None:
    """Refuse weights that are not there, or whose configuration does not fit; loads none of them.

    Args:
        scenario: whose model.
        vocabulary: tokens that the corpus has, if that is known already.

    Raises:
        ConfigError: what is wrong.
    """
    if scenario.model.pretrained is not None:
        identity(scenario.model)
        _config(scenario, vocabulary)


def load(scenario: Scenario, vocabulary: int) -> PreTrainedModel:
    """Return the pretrained model in fp32, on the CPU, without dropout.

    Args:
        scenario: names the weights, and the shape that they must have.
        vocabulary: tokens that the model must know.

    Raises:
        ConfigError: weights cannot be read, are of another shape, or are not all there.
    """
    family, _ = _expected(scenario)
    config = _config(scenario, vocabulary)
    for key, value in {**family.fixed, "use_cache": False}.items():
        setattr(config, key, value)
    loaded, info = _read(
        scenario.model,
        family.model.from_pretrained,
        config=config,
        dtype="float32",
        output_loading_info=True,
        **family.runs,
    )
    wrong = [*info["missing_keys"], *(m[0] for m in info["mismatched_keys"])]
    if wrong:
        raise ConfigError(
            f"model.pretrained {scenario.model.pretrained} lacks {len(wrong)} of the weights of a "
            f"{config.model_type}, such as {sorted(wrong)[0]}; save the whole causal language "
            "model with save_pretrained"
        )
    result: PreTrainedModel = loaded
    return result


def _expected(scenario: Scenario) -> tuple[Family, dict[str, Any]]:
    """Return the family of a scenario's preset, and what a configuration must say of its shape."""
    from sentinel_bench.models.families import FAMILIES

    shape = resolve(scenario.model)
    family = FAMILIES[shape.family]
    return family, family.sizes(shape, sum(layers_per_stage(scenario)))


def _folder(model: ModelConfig) -> Path | None:
    """Return the folder that `model.pretrained` means, None if it is a name on the hub."""
    assert model.pretrained is not None
    path = Path(model.pretrained).expanduser()
    if path.is_dir():
        if model.revision is not None:
            raise ConfigError("model.revision is of a hub name, and model.pretrained is a folder")
        if not (path / CONFIG).is_file():
            raise ConfigError(
                f"model.pretrained {path} holds no {CONFIG}; give a folder that save_pretrained "
                "has written"
            )
        return path
    if path.exists() or path.is_absolute() or model.pretrained.startswith((".", "~")):
        raise ConfigError(
            f"model.pretrained {path} is no folder; give one that save_pretrained has written, "
            "or a hub name"
        )
    return None


def _digest(folder: Path) -> str:
    """Return the SHA-256, in hexadecimal, of the configuration and the weights in a folder."""
    files = sorted({f for name in (CONFIG, *WEIGHTS) for f in folder.glob(name) if f.is_file()})
    whole = hashlib.sha256()
    for file in files:
        try:
            with file.open("rb") as content:
                one = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(
                f"model.pretrained: {file} cannot be read ({error.strerror})"
            ) from error
        whole.update(f"{file.name} {one}\n".encode())
    return whole.hexdigest()


@cache
def _commit(name: str, revision: str | None) -> str:
    """Return the commit of a model on the hub, from the library's own cache if it is there."""
    import huggingface_hub as hub
    import huggingface_hub.utils

    try:
        with _hub.quiet(huggingface_hub.utils):
            try:
                file = hub.hf_hub_download(name, CONFIG, revision=revision, local_files_only=True)
            except Exception:
                _hub.check_reachable()
                file = hub.hf_hub_download(name, CONFIG, revision=revision)
    # the classes are many and unrelated, as in `data.tokens`
    except Exception as error:
        raise ConfigError(
            f"model.pretrained {name!r} could not be read from the hub ({_hub.reason(error)}); it "
            "needs internet once: load it elsewhere and give the folder of its files, or use a "
            "preset without pretrained weights"
        ) from error
    return Path(file).parent.name


def _read(model: ModelConfig, function: Any, **given: Any) -> Any:
    """Call a `from_pretrained` on what `model.pretrained` means, quietly."""
    import huggingface_hub.utils
    from transformers.utils import logging

    assert model.pretrained is not None
    folder = _folder(model)
    source = model.pretrained if folder is None else str(folder)
    if folder is None:
        given["revision"] = _commit(source, model.revision)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with _hub.quiet(huggingface_hub.utils):
            return function(source, **given)
    except Exception as error:  # of several libraries, without a common class
        raise ConfigError(
            f"model.pretrained {model.pretrained} cannot be loaded ({_hub.reason(error)}); save it "
            "again with save_pretrained, or load it with internet"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _config(scenario: Scenario, vocabulary: int) -> PreTrainedConfig:
    """Read the configuration of pretrained weights, and hold it against the scenario.

    Raises:
        ConfigError: another architecture or shape, or too few positions or tokens.
    """
    from transformers import AutoConfig

    model, tokens = scenario.model, scenario.train.seq_len
    family, sizes = _expected(scenario)
    config = _read(model, AutoConfig.from_pretrained, trust_remote_code=False)
    where, own = f"model.pretrained {model.pretrained}", family.config.model_type
    if config.model_type != own:
        raise ConfigError(
            f"{where} is of the family {config.model_type}, and model.preset {model.preset} of "
            f"{own}; set model.preset to one of its family"
        )
    has = {key: getattr(config, key, None) for key in sizes}
    if own == "gpt2" and has["n_inner"] is None:
        has["n_inner"] = 4 * config.n_embd
    told = [f"{key} {has[key]}, not {want}" for key, want in sizes.items() if has[key] != want]
    if told:
        raise ConfigError(
            f"{where} has {', '.join(told)}; set model.preset to one of its shape, or "
            "model.hidden_size and so on"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise ConfigError(
            f"{where} knows {positions} positions, and train.seq_len is {tokens}; lower it"
        )
    if config.vocab_size < vocabulary:
        raise ConfigError(
            f"{where} knows {config.vocab_size:,} tokens, and the corpus has {vocabulary:,}; set "
            "data.tokenizer to that of the model"
        )
    return config
