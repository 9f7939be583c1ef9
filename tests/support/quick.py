"""What ``pytest --quick`` runs: a test of every file, then one case of every quick test, then more.

How long a test takes is known from the last run that pytest's cache holds, so the selection keeps
itself. A test that it does not know is taken for quick.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

SECONDS = 90.0
"""After which no test begins, counted from the start of the process."""
UNKNOWN = 0.25
"""Seconds that a test is taken to need which has not run yet: the mean."""
SLOW = 2.0
"""Seconds of a test that is chosen after all others."""
CACHED = "fusible/seconds"
FIRST = (False, -1, 0)
"""What `order` gives to a test of each file."""


class Durations:
    """Keeps how long each test took."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.seconds = config, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test."""
        if not report.skipped:
            self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write what ran into pytest's cache, where there is one."""
        cache = getattr(self.config, "cache", None)
        if cache is not None and self.seconds and not hasattr(self.config, "workerinput"):
            known = cache.get(CACHED, {})
            cache.set(CACHED, known | {k: round(s, 2) for k, s in self.seconds.items()})


class Quick:
    """Chooses the tests."""

    def __init__(self, config: pytest.Config) -> None:
        cache = getattr(config, "cache", None)
        self.known: dict[str, float] = cache.get(CACHED, {}) if cache is not None else {}
        self.workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self.left_out = Counter[str]()
        self.late = Counter[str]()
        self.start = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep what the time suffices for and the machine can run, a test of each file in front."""
        possible = [item for item in items if not item.get_closest_marker("skip")]
        seconds = self.seconds(possible)
        rank = order(possible, seconds)
        chosen = choose(rank, seconds, 0.8 * SECONDS * self.workers)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        self.left_out = Counter(item.location[0] for item in possible if item not in chosen)
        kept = [item for item in items if item in chosen]
        items[:] = sorted(kept, key=lambda item: rank[item] != FIRST)

    def seconds(self, items: Iterable[pytest.Item]) -> dict[pytest.Item, float]:
        """Of each test; one that shares a fixture with its module may have to make it."""
        largest = Counter[str]()
        for item in filter(shares, items):
            file = item.location[0]
            largest[file] = max(largest[file], self.known.get(item.nodeid, 0.0))
        return {
            item: max(
                self.known.get(item.nodeid, UNKNOWN),
                largest[item.location[0]] if shares(item) else 0.0,
            )
            for item in items
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip what is left on a machine that is slower than it was."""
        if time.monotonic() - self.start > SECONDS:
            self.late[item.location[0]] += 1
            pytest.skip("left out: the time is over")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell the process that began this one."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[OUT] = [dict(self.left_out), dict(self.late)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker tells: each has chosen the same, and was late for tests of its own."""
        left_out, late = getattr(node, "workeroutput", {}).get(OUT, (self.left_out, {}))
        self.left_out = Counter(left_out)
        self.late.update(late)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was left out, by folder and file."""
        cases, folders = self.left_out + self.late, defaultdict[str, list[str]](list)
        for file, count in sorted(cases.items()):
            folder, _, name = file.rpartition("/")
            folders[folder].append(f"{name} {count}")
        terminalreporter.section(f"{OUT}: {cases.total()} cases")
        for folder, files in folders.items():
            terminalreporter.line(f"{folder}: {', '.join(files)}")


OUT = "left out of the quick run"


def order(items: Iterable[pytest.Item], seconds: dict[pytest.Item, float]) -> dict[Any, Any]:
    """First a test of each file, then first cases of quick tests, second cases, ..., slow tests."""
    cases, found, files = Counter[str](), {}, dict[str, pytest.Item]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        found[item] = seconds[item] > SLOW, cases[test], zlib.crc32(test.encode())
        cases[test] += 1
        quickest = files.setdefault(item.location[0], item)
        if seconds[item] < seconds[quickest]:
            files[item.location[0]] = item
    return found | dict.fromkeys(files.values(), FIRST)


def choose(rank: dict[Any, Any], seconds: dict[Any, float], left: float) -> set[Any]:
    """The tests, in order and of equal ones the shortest first, that fit in the seconds left."""
    chosen = set()
    for item in sorted(rank, key=lambda item: (rank[item], seconds[item])):
        if seconds[item] <= left:
            left -= seconds[item]
            chosen.add(item)
    return chosen


def shares(item: pytest.Item) -> bool:
    """Whether a test uses a fixture that its module or class makes once."""
    made = item._fixtureinfo.name2fixturedefs.items()
    return any(
        made_by[-1].scope in ("module", "class") and not name.startswith("_xunit")
        for name, made_by in made
    )


def register(config: pytest.Config) -> None:
    """Add what the options ask for."""
    config.pluginmanager.register(Durations(config))
    if config.getoption("--quick"):
        config.pluginmanager.register(Quick(config))
