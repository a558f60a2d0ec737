"""The MODEL argument of the command line: a factory or a Hugging Face configuration file.

    package.module:factory    factory() returns (model, example_inputs); behind them may come a loss
                              function, where the loss is not inside, and rules of custom ops
                              (meshfold.register_rule). The working directory is importable. With
                              --batch or --seq, which it must then accept,
                              factory(batch=B, seq=S).
    path/file.py:factory   the same, of a file.
    path/to/config.json       the model class is the file's first architecture, else the class for
                              its model_type; example inputs, labels included so that the loss is
                              inside, follow from what the class is for.

Models from a configuration are built on the device asked for: "meta" to plan, since no plan needs
weights, "cpu" to run. Raises OptionError, one line, whatever is wrong with the argument.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from meshfold.capture.trace.loss_function import LossFunction
from meshfold.errors import OptionError
from meshfold.ir.custom_ops import CustomRule
from meshfold.ir.plan import Plan
from meshfold.models.config_file import Configuration, read_configuration
from meshfold.models.factory import find_factory
from meshfold.models.user_code import user_code
from meshfold.torch_compat.process_groups import as_one_process

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

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of parameters."""

_NEEDS_MASK = ("longt5", "switch_transformers")
"""Model types that make a mask of padding by themselves, but not where they are traced."""


@dataclass(frozen=True)
class BuiltModel:
    """A model with keyword arguments for one call of it. loss_fn: what computes the loss of what it
    returns, if not the model itself. rules: of its custom ops."""

    model: nn.Module
    example_inputs: dict[str, Any]
    loss_fn: LossFunction | None = None
    rules: tuple[CustomRule, ...] = ()


def build_model(
    argument: str | Configuration,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    default_batch: int = 1,
    device: str = "meta",
) -> BuiltModel:
    """The model that MODEL names, or of a configuration that was read; in train mode if from a
    configuration.

    batch, sequence: sizes of the example inputs; a configuration without them gets `default_batch`
    and the longest sequence up to SEQUENCE_LIMIT that the model takes. The global random state is
    seeded with 0 while the model and the inputs are made, and as before afterwards.
    """
    for name, size in (("batch", batch), ("seq", sequence)):
        if size is not None and size < 1:
            raise OptionError(f"--{name} {size}: no size; write 1 or more")
    # A model that looks for other processes when it is built is that of one.
    with torch.random.fork_rng(devices=[]), as_one_process():
        torch.manual_seed(0)
        if isinstance(argument, str):
            if not is_configuration(argument):
                return _from_factory(argument, batch, sequence)
            argument = read_configuration(Path(argument))
        return _from_configuration(argument, batch or default_batch, sequence, device)


def build_for_plan(
    argument: str | Configuration, plan: Plan, *, device: str = "meta"
) -> BuiltModel:
    """The model that build_model makes, with example inputs of the sizes that the plan was made
    for. A factory is given those of batch and seq that it has arguments for."""
    sizes = {"batch": plan.model.batch_size, "seq": sequence_length(plan)}
    if isinstance(argument, str) and not is_configuration(argument):
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
    return _accepted_by(find_factory(argument))


def _accepted_by(factory: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some of the interpreter's own have no signature
        return ()
    return tuple(name for name in ("batch", "seq") if name in parameters)


def fields_with_defaults(given: Configuration) -> dict[str, Any]:
    """The fields of a configuration, with the defaults of those it has not. Raises OptionError, as
    build_model."""
    transformers = _transformers(given.path)
    _architecture(given, transformers)
    return {**_config(given, transformers).to_dict(), **given.fields}


def _from_factory(argument: str, batch: int | None, sequence: int | None) -> BuiltModel:
    factory = find_factory(argument)
    sizes = {k: v for k, v in (("batch", batch), ("seq", sequence)) if v is not None}
    accepted = _accepted_by(factory)
    for name in sizes:
        if name not in accepted:
            raise OptionError(
                f"{argument}: --{name} is given but the factory takes no argument {name!r}; "
                "add it or leave the option out"
            )
    with user_code(f"{argument}: the factory", remedy="correct it"):
        made = factory(**sizes)
        if isinstance(made, tuple) and len(made) in (2, 3, 4):
            model, inputs, *others = made
            if isinstance(model, nn.Module) and isinstance(inputs, Mapping):
                inputs = dict(inputs)
                for name, value in inputs.items():
                    if isinstance(value, torch.Tensor) and not value.numel():
                        raise OptionError(f"{argument}: input {name!r} is empty; give it entries")
                if all(isinstance(name, str) for name in inputs):
                    _check_dtypes(argument, model)
                    return BuiltModel(model, inputs, *_loss_and_rules(argument, others))
        raise OptionError(
            f"{argument}: the factory must return (torch.nn.Module, dict of keyword arguments), "
            f"it returned {_describe(made)}; correct it"
        )


def _loss_and_rules(
    argument: str, others: Sequence[object]
) -> tuple[LossFunction | None, tuple[CustomRule, ...]]:
    """What a factory returned behind the example inputs: a loss function, and rules."""
    loss_fn: LossFunction | None = None
    rules: list[CustomRule] = []
    for item in others:
        if callable(item) and loss_fn is None:
            loss_fn = item
            continue
        for rule in item if isinstance(item, tuple | list) else (item,):
            if not isinstance(rule, CustomRule):
                raise OptionError(
                    f"{argument}: the factory returned {_describe(rule)} behind the example "
                    "inputs; return a loss function there, or what meshfold.register_rule does"
                )
            rules.append(rule)
    return loss_fn, tuple(rules)


def _check_dtypes(argument: str, model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
            raise OptionError(
                f"{argument}: {name} is {str(tensor.dtype).removeprefix('torch.')}, which meshfold "
                "cannot train; convert the model to bfloat16, say"
            )


def _from_configuration(
    given: Configuration, batch: int, sequence: int | None, device: str
) -> BuiltModel:
    path = given.path
    transformers = _transformers(path)
    class_name, task = _architecture(given, transformers)
    config = _config(given, transformers)
    dtype = _dtype(given)
    with user_code(f"{path}: {class_name}", remedy="correct the fields"):
        with torch.device(device):
            model = getattr(transformers, class_name)._from_config(config, dtype=dtype)
        # As a training script has it; capture keeps the mode of the model.
        model.train()
    remedy = "correct the fields, or write a factory, package.module:factory"
    with user_code(f"{path}: making inputs of {class_name}", remedy=remedy), torch.device(device):
        return BuiltModel(model, _example_inputs(path, task, config, dtype, batch, sequence))


def _transformers(path: Path) -> ModuleType:
    # An optional dependency, loaded only for the files that need it.
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise OptionError(
            f"{path}: needs the transformers package; pip install 'meshfold[hf]'"
        ) from error


def _architecture(given: Configuration, transformers: ModuleType) -> tuple[str, str]:
    """(class name, task)."""
    path, fields = given.path, given.fields
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    by_task = {task: getattr(tables, table) for task, table in _TASKS.items()}
    model_type = fields["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise OptionError(f"{path}: model_type: transformers knows no {model_type!r}; correct it")
    known = {by_task[task][model_type]: task for task in by_task if model_type in by_task[task]}
    named = fields.get("architectures") or [next(iter(known), None)]
    wanted = named[0] if isinstance(named, list) else named
    if isinstance(wanted, str) and wanted in known:
        return wanted, known[wanted]
    raise OptionError(
        f"{path}: architectures: {wanted or model_type} has no loss that meshfold can train; "
        f"possible: {', '.join(known) or 'none of this model_type'}"
    )


def _config(given: Configuration, transformers: ModuleType) -> Any:
    with user_code(f"{given.path}: transformers", remedy="correct the fields"):
        return transformers.CONFIG_MAPPING[given.fields["model_type"]].from_dict(dict(given.fields))


def _dtype(given: Configuration) -> torch.dtype:
    # "torch_dtype" is the field's name in files written before transformers 5.
    name = given.fields.get("dtype") or given.fields.get("torch_dtype") or "float32"
    dtype: Any = getattr(torch, str(name), None)
    if dtype not in _FLOATS:
        names = ", ".join(str(one).removeprefix("torch.") for one in _FLOATS)
        raise OptionError(f"{given.path}: dtype: {name!r} cannot be trained; write one of {names}")
    return dtype  # type: ignore[no-any-return]


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
    if length < 1 or not isinstance(config.vocab_size, int) or config.vocab_size < 1:
        raise OptionError(
            f"{path}: vocab_size: {config.vocab_size} for sequences of {length}; write 1 or more"
        )
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
