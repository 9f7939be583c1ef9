"""Fewer cases than all combinations of options."""

from itertools import combinations


def pairs(case):
    """Every pair of values of two fields."""
    return combinations(enumerate(case), 2)


def every_pair(cases, parts=pairs):
    """Those of the cases, tuples of values, that have every pair of values which any case has.

    ``every_pair(product((1, 2), "ab", "xy"))`` are four of eight cases. Always the case with most
    pairs that no other has yet. ``parts`` gives what else shall occur of a case.
    """
    parts_of = {case: set(parts(case)) for case in cases}
    left, chosen = set().union(*parts_of.values()), []
    while left:
        chosen.append(max(parts_of, key=lambda case: len(parts_of[case] & left)))
        left -= parts_of[chosen[-1]]
    return chosen
