"""The quick tier: which tests it takes first, so that no file is left out."""

from types import SimpleNamespace

from quick import choose, order


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def test_files_whose_tests_all_take_long_leave_time_for_the_others():
    items = [Item(nodeid=f"{i}.py::test", location=(f"{i}.py", 0, "test")) for i in range(5)]
    seconds = dict(zip(items, (60.0, 1.0, 90.0, 2.0, 3.0), strict=True))
    assert choose(order(items, seconds), seconds, 70.0) == {*items[:2], *items[3:]}
    assert choose(order(items, seconds), seconds, 30.0) == {items[1], *items[3:]}


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
