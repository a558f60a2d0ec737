"""Hooks of all modules of the process are seen."""

from torch.nn.modules.module import register_module_forward_hook

from meshfold.torch_compat.global_hooks import global_hooks, hook_tables


def test_a_hook_of_all_modules_is_seen_until_it_is_removed() -> None:
    assert len(hook_tables()) == 7
    assert global_hooks() == {}
    handle = register_module_forward_hook(lambda *_: None)
    try:
        assert list(global_hooks()) == ["_global_forward_hooks"]
    finally:
        handle.remove()
    assert global_hooks() == {}
