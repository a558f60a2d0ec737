"""What errors say of values that nobody knows while a model is traced."""

import torch

from meshfold.capture.known_values.refusals import (
    function_name,
    refused_branch,
    refused_number,
)


def test_a_branch_names_its_line_and_what_to_do() -> None:
    text = str(refused_branch("torch.Tensor.__bool__", "model.py:3"))
    assert "model.py:3" in text and "fixed_inputs" in text and "\n" not in text


def test_a_choice_of_rows_shows_the_known_loop_over_experts() -> None:
    assert "self.experts" in str(refused_number("torch.where", "model.py:3"))
    assert "self.experts" not in str(refused_number(function_name(torch.Tensor.item), "m.py:3"))


def test_packed_sequences_have_a_remedy_of_their_own() -> None:
    assert "pass padded sequences" in str(refused_number("_pack_padded_sequence", "m.py:3"))


def test_a_number_says_which_inputs_can_be_fixed() -> None:
    assert "in fixed_inputs" in str(refused_number("torch.split_with_sizes", "m.py:3"))
