"""The quick tier: which tests it takes first, so that no file is left out."""

from types import SimpleNamespace

from quick import order


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def test_a_test_of_each_file_comes_first_and_slow_ones_last():
    def item(file, test, case):
        return Item(nodeid=f"{file}::{test}[{case}]", location=(file, 0, test))

    a = [item("a.py", "test_a", i) for i in range(3)]
    slow = [item("b.py", "test_slow", i) for i in range(2)]
    c = [item("c.py", "test_c", 0), item("c.py", "test_d", 0)]
    items = [*a, *slow, *c]
    seconds = dict.fromkeys(items, 0.1) | {slow[0]: 5.0, slow[1]: 4.0, a[1]: 0.05}
    found = sorted(items, key=order(items, seconds).__getitem__)
    assert set(found[:3]) == {a[1], slow[1], c[0]}
    assert set(found[3:5]) == {a[0], c[1]}
    assert found[5:] == [a[2], slow[0]]
