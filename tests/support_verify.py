"""Comparisons that run on the ranks of a pool."""

from typing import Any

from meshfold import verify
from meshfold.runtime import CompiledModel


def compare(plan_text: str, model: str) -> Any:
    return verify._compare(lambda _: None, plan_text, model)


def compare_a_wrong_program(plan_text: str, model: str, name: str) -> Any:
    """As compare, with the gradient of one parameter off by a millionth."""
    right = verify.bind

    def wrong(*args: Any) -> CompiledModel:
        compiled = right(*args)
        compiled.get_parameter(name).register_hook(lambda g: g * (1 + 1e-6))
        return compiled

    verify.bind = wrong
    try:
        return compare(plan_text, model)
    finally:
        verify.bind = right
