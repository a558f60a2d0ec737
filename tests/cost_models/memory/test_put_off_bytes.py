"""What is put off, by hand."""

from meshfold.cost_models.memory.put_off_bytes import HeldProducts, PutOffBytes


def test_what_several_products_need_is_there_until_the_last_of_them() -> None:
    held = HeldProducts()
    assert held.add(40, {1: 10, 2: 20}, 5) == {1, 2}
    assert held.add(25, {2: 20, 3: 30}, 0) == {3}
    assert held.with_waiting(8) == PutOffBytes(68, ((40, 10, 5), (25, 50, 0)))


def test_nothing_is_put_off() -> None:
    assert HeldProducts().with_waiting(0) == PutOffBytes()
