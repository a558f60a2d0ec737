"""Random ops become tensors of random numbers that ranks share, and ordinary ops on them.

    rand, rand_like                u
    randn, randn_like              n
    uniform(x, a, b)               u * (b - a) + a
    normal(x, mean, std)           n * std + mean
    bernoulli(p)                   u < p                            drop path, dropout of channels
    exponential(x, lambda)         -log(1 - u) / lambda, above 0    Gumbel noise
    randint(low, high)             floor(u * (high - low)) + low
    multinomial(p, 1)              argmax(p / exponential())        categories, without replacement

u and n are draws, uniform and normal (meshfold.ops.draws), in the shape of the result.
They read nothing: of the tensor that an op fills only the shape counts. What is asked for in
complex numbers or of a generator of the model's own has no such form and stays as it is.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from meshfold.capture.trace.raw_program import Key, Operand, RawArg, RawOp, RawProgram
from meshfold.ir.op_graph import NORMAL, UNIFORM, Symbol, Value
from meshfold.ops.registry import torch_target
from meshfold.torch_compat.dtypes import dtype_name, symbol, torch_dtype


def with_draws(program: RawProgram) -> RawProgram:
    """`program` with random ops written as draws."""
    values = dict(program.values)
    ops: list[RawOp] = []
    for op in program.ops:
        ops += _written(op, values)
    return replace(program, ops=ops, values=values)


def _written(op: RawOp, values: dict[Key, Value]) -> list[RawOp]:
    """The ops in place of `op`: itself if it has no form. The last makes its result."""
    form = _FORMS.get(op.target)
    if form is None:
        return [op]
    draw = _Draw(op, values)
    if draw.dtype.is_complex or draw.arguments.get("generator") is not None:
        return [op]
    if draw.arguments.get("replacement") and draw.arguments["num_samples"] > 1:
        return [op]
    form(draw)
    *before, last = draw.ops
    return [*before, replace(last, outputs=op.outputs)]


class _Draw:
    """A random op and the ops that are written in its place; `values` takes what they make."""

    def __init__(self, op: RawOp, values: dict[Key, Value]) -> None:
        self.op = op
        self.values = values
        self.result = values[op.outputs[0]]
        self.dtype = torch_dtype(self.result.dtype)
        self.ops: list[RawOp] = []
        schema = torch_target(op.target)._schema  # type: ignore[attr-defined]
        names = [argument.name for argument in schema.arguments]
        self.arguments: dict[str, RawArg] = dict(zip(names, op.args, strict=False)) | dict(
            op.kwargs
        )

    def make(self, target: str, made: torch.dtype, /, *args: RawArg, **kwargs: RawArg) -> Operand:
        """One op more, in the shape of the result."""
        key = f"{self.op.outputs[0]}:{len(self.ops)}"
        self.values[key] = replace(self.result, dtype=dtype_name(made))
        named = tuple(kwargs.items())
        self.ops.append(replace(self.op, target=target, args=args, kwargs=named, outputs=(key,)))
        return Operand(key)

    def draw(self, target: str, dtype: torch.dtype) -> Operand:
        """Random numbers."""
        device = Symbol("device", "cpu")  # stands for the rank's
        return self.make(target, dtype, self.result.shape, symbol(dtype), device)

    def scaled(self, x: Operand, factor: RawArg, offset: RawArg) -> Operand:
        """x * factor + offset, each a number or a tensor without a gradient."""
        if factor != 1:
            x = self.make("aten.mul.Tensor", self.dtype, x, self.constant(factor))
        if offset != 0:
            x = self.make("aten.add.Tensor", self.dtype, x, self.constant(offset))
        return x

    def cast(self, x: Operand) -> Operand:
        return self.make("aten._to_copy.default", self.dtype, x, dtype=symbol(self.dtype))

    def constant(self, factor: RawArg) -> RawArg:
        """torch gives the parameters of a random op no gradient."""
        if not isinstance(factor, Operand):
            return factor
        key = f"{self.op.outputs[0]}:{len(self.ops)}"
        self.values[key] = self.values[factor.key]
        self.ops.append(
            replace(
                self.op, target="aten.detach.default", args=(factor,), kwargs=(), outputs=(key,)
            )
        )
        return Operand(key)


def _uniform(draw: _Draw) -> None:
    low, high = draw.arguments.get("from", 0.0), draw.arguments.get("to", 1.0)
    draw.scaled(draw.draw(UNIFORM, draw.dtype), high - low, low)


def _normal(draw: _Draw) -> None:
    mean, std = draw.arguments.get("mean", 0.0), draw.arguments.get("std", 1.0)
    draw.scaled(draw.draw(NORMAL, draw.dtype), std, mean)


def _bernoulli(draw: _Draw) -> None:
    """Compared in float32 at least: in bfloat16 a probability of 0.999 would be 1."""
    probability = draw.arguments.get("p", draw.arguments["self"])
    if isinstance(probability, Operand):
        given = torch_dtype(draw.values[probability.key].dtype)
        wide = torch.promote_types(given, torch.float32)
        u = draw.draw(UNIFORM, wide)
        draw.cast(draw.make("aten.lt.Tensor", torch.bool, u, probability))
    else:
        u = draw.draw(UNIFORM, torch.float32)
        draw.cast(draw.make("aten.lt.Scalar", torch.bool, u, probability))


def _exponential(draw: _Draw) -> None:
    """Never 0: its logarithm is taken."""
    dtype = draw.dtype
    u = draw.draw(UNIFORM, dtype)
    minus = draw.make("aten.neg.default", dtype, u)
    logarithm = draw.make("aten.log1p.default", dtype, minus)
    plus = draw.make("aten.neg.default", dtype, logarithm)
    positive = draw.make("aten.clamp_min.default", dtype, plus, torch.finfo(dtype).eps / 2)
    draw.scaled(positive, 1.0 / draw.arguments.get("lambd", 1.0), 0)


def _whole(draw: _Draw) -> None:
    """In float64, which has all 32 bits of a draw."""
    low, high = draw.arguments.get("low", 0), draw.arguments["high"]
    u = draw.draw(UNIFORM, torch.float64)
    scaled = draw.make("aten.mul.Tensor", torch.float64, u, high - low)
    whole = draw.cast(draw.make("aten.floor.default", torch.float64, scaled))
    draw.scaled(whole, 1, low)


def _chosen(draw: _Draw) -> None:
    """As torch does it: the largest of p / e, or the n largest, are n of p without replacement."""
    probability, count = draw.arguments["self"], draw.arguments["num_samples"]
    made = draw.result
    draw.result = replace(draw.values[probability.key], requires_grad=False)
    draw.dtype = torch_dtype(draw.result.dtype)
    p = draw.constant(probability)
    _exponential(draw)
    ratio = draw.make("aten.div.Tensor", draw.dtype, p, Operand(draw.ops[-1].outputs[0]))
    draw.result = made
    if count == 1:
        draw.make("aten.argmax.default", torch.int64, ratio, -1, True)
        return
    largest = draw.make("aten.topk.default", draw.dtype, ratio, count, -1)
    places = f"{largest.key}:places"
    draw.values[places] = made
    draw.ops[-1] = replace(draw.ops[-1], outputs=(str(largest.key), places))
    draw.make("aten.alias.default", torch.int64, Operand(places))


_FORMS: dict[str, Callable[[_Draw], None]] = {
    **{f"aten.{name}": _uniform for name in ("rand.default", "rand_like.default")},
    "aten.rand.generator": _uniform,
    "aten.uniform.default": _uniform,
    **{f"aten.{name}": _normal for name in ("randn.default", "randn_like.default")},
    "aten.randn.generator": _normal,
    "aten.normal_functional.default": _normal,
    **{
        f"aten.normal.{name}": _normal
        for name in ("float_float", "Tensor_float", "float_Tensor", "Tensor_Tensor")
    },
    **{f"aten.bernoulli.{name}": _bernoulli for name in ("default", "p", "Tensor")},
    "aten.exponential.default": _exponential,
    "aten.multinomial.default": _chosen,
    **{f"aten.randint.{name}": _whole for name in ("default", "low", "generator", "low_generator")},
    **{f"aten.randint_like.{name}": _whole for name in ("default", "low_dtype")},
}
