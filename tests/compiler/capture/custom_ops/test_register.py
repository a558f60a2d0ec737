"""register_rule: what is a rule, and what is refused in one line."""

from typing import Any

import pytest
import torch
from support.models.functions import Clip, LinearLoss
from support.models.library_ops import swish

from meshfold.capture.custom_ops.register import register_rule
from meshfold.errors import OptionError
from meshfold.ir.custom_ops import CustomRule
from meshfold.ir.options import CompileOptions

X, W = torch.randn(6, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
Y = torch.randint(0, 7, (6,))


def test_a_rule_is_a_record() -> None:
    rule = register_rule(LinearLoss, "n _, _ _, n ->", example=(X, W, Y, "sum"))
    assert (rule.operands, rule.results, rule.shards) == (
        (("n", ""), ("", ""), ("n",)),
        ((),),
        ("n",),
    )
    assert rule.target == "support.models.functions:LinearLoss" and rule.function is LinearLoss
    assert CompileOptions(custom_rules=(rule,)).custom_rules == (rule,)


def test_ops_of_torch_library_go_by_object_and_by_name() -> None:
    for op in (swish, "meshfold_tests::swish", torch.ops.meshfold_tests.swish):
        rule = register_rule(op, "a b, b -> a b", shards="b")
        assert rule.target == "meshfold_tests.swish.default" and rule.shards == ("b",)


@pytest.mark.parametrize(
    ("op", "equation", "options", "text"),
    [
        (LinearLoss, "n k", {}, "'n k' is no equation; write one like"),
        (LinearLoss, "N _ -> ", {}, "'N' is no label"),
        (LinearLoss, "n n, _ _, _ -> ", {}, "has 'n' twice; write _"),
        (LinearLoss, "n _, _ _, n ->", {"shards": "m"}, "shards: 'm' is on no argument"),
        (LinearLoss, "n _, _ _, n ->", {"flops": 3}, "flops: no cost as a function of shapes"),
        (LinearLoss, "n _, _ _, n ->", {"speed": len}, "speed: no cost as a function of shapes"),
        (swish, "a b, b -> a b", {"fake": len}, "fake: is for Functions"),
        (3, "a -> a", {}, "rule 3: no op; pass a torch.autograd.Function"),
        ("mine::absent", "a -> a", {}, "rule mine::absent: torch has no such op"),
        ("aten::linear", "a -> a", {}, "meshfold has a rule for this op"),
        (LinearLoss, "n k -> ", {"example": (X, W, Y, "sum")}, "does not fit its example on"),
        (LinearLoss, "n _, _ _, n ->", {"example": (X, W, Y, "mean")}, "is wrong: result 0"),
        (LinearLoss, "n _, _ _, n ->", {"example": (X, W)}, "the op raises on its example"),
    ],
)
def test_what_is_no_rule_is_refused(
    op: Any, equation: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        register_rule(op, equation, **options)
    assert "\n" not in str(caught.value)


def test_options_take_rules_alone() -> None:
    with pytest.raises(OptionError, match="custom_rules: 'a -> a' is no rule"):
        CompileOptions(custom_rules=("a -> a",))  # type: ignore[arg-type]


def test_a_backward_that_is_not_linear_holds_for_shards() -> None:
    assert isinstance(register_rule(Clip, "a b -> a b", example=(X,)), CustomRule)
