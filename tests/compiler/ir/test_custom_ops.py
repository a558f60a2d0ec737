"""Data of ops that the user's code defines."""

from meshfold.ir.custom_ops import CustomCosts, CustomOp, is_function


def test_functions_have_a_colon_in_their_name() -> None:
    assert is_function("package.module:Outer.Name") and not is_function("aten.linear.default")


def test_costs_and_what_is_called_tell_no_two_ops_apart() -> None:
    """Equal layers fold, and what their rules compute is no data."""
    plain = CustomOp((("a",),), (("a",),), ("a",))
    other = CustomOp((("a",),), (("a",),), ("a",), costs=CustomCosts(flops=len), function=len)
    assert plain == other and hash(plain) == hash(other) and plain.facts == other.facts
    assert plain != CustomOp((("a",),), (("a",),), ("a",), is_linear=True)


def test_saved_bytes_are_no_work() -> None:
    assert CustomCosts(backward_bytes=len).states_work
    assert not CustomCosts(saved_bytes=len).states_work
