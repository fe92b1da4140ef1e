"""What `--model` tells of a model without loading its weights: how many parameters, how wide."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class ModelFacts:
    """A model's sizes.

    Attributes:
        name: for messages.
        params: number of parameters.
        hidden: width of the hidden states, where it is known.
    """

    name: str
    params: int
    hidden: int | None = None

    def auto(self) -> dict[str, object]:
        """What "auto" becomes for a model of this width."""
        from shardwise.config.auto import of_width

        return {} if self.hidden is None else of_width(self.hidden)


def read_model(path: Path) -> ModelFacts:
    """Read a model's sizes from local files; nothing is downloaded and no code of the model is run.

    Args:
        path: the `config.json` of a Hugging Face model, a safetensors file or its index, or a folder that holds one.

    Raises:
        ConfigError: there is no such file, or it does not say how large the model is.
    """
    if path.is_dir():
        names = ("config.json", "model.safetensors.index.json", "model.safetensors")
        found = next((path / name for name in names if (path / name).is_file()), None)
        if found is None:
            raise ConfigError(f"--model: {path} holds none of {', '.join(names)}")
        path = found
    if not path.is_file():
        raise ConfigError(f"--model: no such file: {path}; a model is read from local files only")
    if path.suffix == ".safetensors":
        return ModelFacts(path.name, _tensor_sizes(path))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model: {path} cannot be read as JSON: {error}") from error
    if isinstance(content, dict) and isinstance(content.get("weight_map"), dict):
        files = sorted({str(name) for name in content["weight_map"].values()})
        return ModelFacts(path.name, sum(_tensor_sizes(path.parent / name) for name in files))
    if isinstance(content, dict) and isinstance(content.get("model_type"), str):
        return _hugging_face(path, content)
    raise ConfigError(f"--model: {path} is neither a Hugging Face config.json nor a safetensors index")


def _tensor_sizes(path: Path) -> int:
    import math

    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--model: {path} cannot be read as safetensors: {error}") from error


def _hugging_face(path: Path, content: dict[str, Any]) -> ModelFacts:
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("--model: a Hugging Face config needs transformers: pip install transformers") from error
    import torch

    try:
        config = AutoConfig.for_model(content.pop("model_type"), **content)
        causal = any("CausalLM" in name or "LMHead" in name for name in content.get("architectures") or [])
        with torch.device("meta"):
            build: Any = (AutoModelForCausalLM if causal else AutoModel).from_config
            model = build(config)
    except Exception as error:  # of transformers' own kinds, for a file that nobody has checked
        raise ConfigError(f"--model: transformers cannot build {path}: {type(error).__name__}: {error}") from error
    hidden = getattr(config.get_text_config(), "hidden_size", None)
    return ModelFacts(
        path.name, sum(p.numel() for p in model.parameters()), hidden if isinstance(hidden, int) else None
    )
