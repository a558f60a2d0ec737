"""The MODEL argument of the command line: a factory or a Hugging Face configuration file.

    package.module:factory    factory() returns (model, example_inputs); the working directory is
                              importable. With --batch or --seq, which it must then accept,
                              factory(batch=B, seq=S).
    path/to/config.json       the model class is the file's first architecture, else the class for
                              its model_type; example inputs, labels included so that the loss is
                              inside, follow from what the class is for.

Models from a configuration are built on the device asked for: "meta" to plan, since no plan needs
weights, "cpu" to run. Raises OptionError, one line, whatever is wrong with the argument.
"""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from meshfold.errors import OptionError
from meshfold.ir.plan import Plan

SEQUENCE_LIMIT = 2048
"""Longest default sequence; --seq goes beyond."""

# Tasks with a loss, in the order they are tried when a file names no architecture: the name of the
# transformers table from model_type to class.
_TASKS = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}

_NEEDS_MASK = ("longt5", "switch_transformers")
"""Model types that make a mask of padding by themselves, but not where they are traced."""


@dataclass(frozen=True)
class BuiltModel:
    """A model with keyword arguments for one call of it."""

    model: nn.Module
    example_inputs: dict[str, Any]


def build_model(
    argument: str,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    default_batch: int = 1,
    device: str = "meta",
) -> BuiltModel:
    """The model that MODEL names, in train mode if from a configuration.

    batch, sequence: sizes of the example inputs; a configuration without them gets `default_batch`
    and the longest sequence up to SEQUENCE_LIMIT that the model takes. The global random state is
    seeded with 0 while the model and the inputs are made, and as before afterwards.
    """
    for name, size in (("batch", batch), ("seq", sequence)):
        if size is not None and size < 1:
            raise OptionError(f"--{name} {size}: must be 1 or more")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if is_configuration(argument):
            return _from_file(Path(argument), batch or default_batch, sequence, device)
        return _from_factory(argument, batch, sequence)


def build_for_plan(argument: str, plan: Plan, *, device: str = "meta") -> BuiltModel:
    """The model that MODEL names, with example inputs of the sizes that the plan was made for. A
    factory is given those of batch and seq that it has arguments for."""
    sizes = {"batch": plan.model.batch_size, "seq": sequence_length(plan)}
    if not is_configuration(argument):
        accepted = accepted_sizes(argument)
        sizes = {name: size for name, size in sizes.items() if name in accepted}
    return build_model(argument, batch=sizes.get("batch"), sequence=sizes.get("seq"), device=device)


def is_configuration(argument: str) -> bool:
    """Whether MODEL is a file; else it is a factory."""
    return argument.endswith(".json")


def sequence_length(plan: Plan) -> int | None:
    """The sequence length of the inputs that a plan was made for, if they are sequences."""
    lengths = [s[1] for _, s, dtype in plan.model.inputs if len(s) == 2 and "float" not in dtype]
    return lengths[0] if lengths else None


def accepted_sizes(argument: str) -> tuple[str, ...]:
    """Which of batch and seq a factory has arguments for."""
    accepted = inspect.signature(_find_factory(argument)).parameters
    return tuple(name for name in ("batch", "seq") if name in accepted)


def configuration_fields(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a configuration file, and the same with the defaults of those it has not.
    Raises OptionError, as build_model."""
    fields = _read_fields(path)
    transformers = _transformers(path)
    _architecture(path, fields, transformers)
    return fields, _config(path, fields, transformers).to_dict() | fields


def _from_factory(argument: str, batch: int | None, sequence: int | None) -> BuiltModel:
    factory = _find_factory(argument)
    sizes = {k: v for k, v in (("batch", batch), ("seq", sequence)) if v is not None}
    accepted = inspect.signature(factory).parameters
    for name in sizes:
        if name not in accepted:
            raise OptionError(
                f"{argument}: --{name} is given but the factory takes no argument {name!r}; "
                "add it or leave the option out"
            )
    try:
        made = factory(**sizes)
    except Exception as error:
        raise OptionError(f"{argument}: the factory raised {_one_line(error)}") from error
    if isinstance(made, tuple) and len(made) == 2:
        model, inputs = made
        if isinstance(model, nn.Module) and isinstance(inputs, Mapping):
            return BuiltModel(model, dict(inputs))
    raise OptionError(
        f"{argument}: the factory must return (torch.nn.Module, dict of keyword arguments), "
        f"it returned {_describe(made)}"
    )


def _find_factory(argument: str) -> Callable[..., Any]:
    module_name, colon, name = argument.partition(":")
    if not colon or not module_name or not name:
        raise OptionError(
            f"MODEL {argument!r}: write package.module:factory or the path of a .json file"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.split(".")[0] == error.name.split(".")[0]:
            raise OptionError(f"{argument}: no module {error.name!r} here or installed") from error
        raise OptionError(f"{argument}: importing it raised {_one_line(error)}") from error
    except Exception as error:
        raise OptionError(f"{argument}: importing it raised {_one_line(error)}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise OptionError(f"{argument}: module {module_name!r} has no function {name!r}")
    return factory  # type: ignore[no-any-return]


def _from_file(path: Path, batch: int, sequence: int | None, device: str) -> BuiltModel:
    fields = _read_fields(path)
    transformers = _transformers(path)
    class_name, task = _architecture(path, fields, transformers)
    config = _config(path, fields, transformers)
    dtype = _dtype(path, fields)
    try:
        with torch.device(device):
            model = getattr(transformers, class_name)._from_config(config, dtype=dtype)
    except Exception as error:
        raise OptionError(f"{path}: {class_name} raised {_one_line(error)}") from error
    # As a training script has it; capture keeps the mode of the model.
    model.train()
    try:
        inputs = _example_inputs(path, task, config, dtype, batch, sequence)
    except AttributeError as error:
        raise OptionError(
            f"{path}: no example inputs for {class_name} ({error}); "
            "write a factory, package.module:factory"
        ) from error
    return BuiltModel(model, {name: value.to(device) for name, value in inputs.items()})


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise OptionError(f"{path}: not JSON ({error})") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise OptionError(
            f"{path}: model_type: missing; this is no Hugging Face configuration file"
        )
    return fields


def _transformers(path: Path) -> ModuleType:
    # An optional dependency, loaded only for the files that need it.
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise OptionError(
            f"{path}: needs the transformers package; pip install 'meshfold[hf]'"
        ) from error


def _architecture(
    path: Path, fields: Mapping[str, Any], transformers: ModuleType
) -> tuple[str, str]:
    """(class name, task)."""
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    by_task = {task: getattr(tables, table) for task, table in _TASKS.items()}
    model_type = fields["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise OptionError(f"{path}: model_type: transformers knows no {model_type!r}")
    known = {by_task[task][model_type]: task for task in by_task if model_type in by_task[task]}
    wanted = (fields.get("architectures") or [next(iter(known), None)])[0]
    if wanted in known:
        return wanted, known[wanted]
    raise OptionError(
        f"{path}: architectures: {wanted or model_type} has no loss that meshfold can train; "
        f"possible: {', '.join(known) or 'none of this model_type'}"
    )


def _config(path: Path, fields: Mapping[str, Any], transformers: ModuleType) -> Any:
    try:
        return transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))
    except Exception as error:
        raise OptionError(f"{path}: {_one_line(error)}") from error


def _dtype(path: Path, fields: Mapping[str, Any]) -> torch.dtype:
    # "torch_dtype" is the field's name in files written before transformers 5.
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise OptionError(f"{path}: dtype: {name!r} is no float type of torch")
    return dtype


def _example_inputs(
    path: Path, task: str, config: Any, dtype: torch.dtype, batch: int, sequence: int | None
) -> dict[str, torch.Tensor]:
    if task == "image":
        if sequence is not None:
            raise OptionError(f"{path}: an image model has no sequence; leave --seq out")
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (batch, config.num_channels, height, width)
        return {
            "pixel_values": torch.randn(shape, dtype=dtype),
            "labels": torch.randint(0, config.num_labels, (batch,)),
        }
    longest = _longest(config)
    length = sequence or min(longest, SEQUENCE_LIMIT)
    tokens = torch.randint(0, config.vocab_size, (batch, length))
    labels = torch.randint(0, config.vocab_size, (batch, length))
    inputs = {"input_ids": tokens, "labels": labels}
    if config.model_type in _NEEDS_MASK:
        inputs["attention_mask"] = torch.ones_like(tokens)
    return inputs


def _longest(config: Any) -> int:
    names = ("max_position_embeddings", "n_positions")
    return int(next((getattr(config, n) for n in names if hasattr(config, n)), SEQUENCE_LIMIT))


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
