"""Fixtures of all tests."""

# ruff: noqa: E402 (helpers are imported when pytest knows that it shall rewrite their assertions)

import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest

# The helpers' assertions hold under ``python -O`` too, and show their values, as those of tests do.
pytest.register_assert_rewrite(
    *(file.stem for file in (Path(__file__).parent / "support").glob("*.py"))
)

import checks
import other_cpu
import quick
import torch

from fusible.fuser.registry import registry

# `make torchtitan` runs this: what torchtitan requires does not go with constraints.txt.
collect_ignore = (
    [] if importlib.util.find_spec("torchtitan") else ["integrations/test_torchtitan.py"]
)


def pytest_addoption(parser):
    """Options of these tests."""
    for option, module in (("--other-cpu", other_cpu), ("--quick", quick)):
        parser.addoption(option, action="store_true", help=module.__doc__.partition("\n")[0])


def pytest_configure(config):
    """Workers share the cores: more threads than those make each other slow."""
    if config.getoption("--other-cpu"):
        other_cpu.use()
    quick.register(config)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector from going through all tests, while they are made and afterwards.

    They are a million objects that live until the end: half of the collection's time, and a seventh
    of what a test that compiles takes. A tenth of that goes to its runs every 700 objects: a
    compilation makes millions.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)
        gc.enable()


LONG = (
    "kernels/sm100/test_sm100_cudnn.py",
    "ops/test_expert_parallel.py",
    "system/test_expert_parallel_training.py",
    "system/test_fsdp.py",
    "system/test_transformers_ep.py",
)
"""Files of which a test, or what their tests share, takes half a minute."""


def pytest_collection_modifyitems(items):
    """Begin with the long tests, that no worker waits for one at the end, nor shares one's file.

    Skip what is marked `gpu` on a machine without one.
    """
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


LISTED = {
    "registers": "registers a thread at launch, no spills",
    "emulator": "what equals the emulator of FP8 sums",
}
"""Properties that tests record, and the titles under which they are listed."""


def pytest_terminal_summary(terminalreporter):
    """List what passed tests have recorded."""
    reports = terminalreporter.getreports("passed")
    recorded = {entry for report in reports for entry in report.user_properties}
    for listed, title in LISTED.items():
        lines = sorted(text for name, text in recorded if name == listed)
        if lines:
            terminalreporter.section(title)
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _process_state():
    """The same random numbers for every test; what it sets for the process, it sets back.

    A test that fails half way, or forgets, must not decide what the worker's next tests do.
    """
    before = checks.snapshot()
    torch.manual_seed(0)
    yield
    changed = checks.restore(before)
    checks.share_gpu_memory()
    assert not changed, f"the test leaves {', '.join(changed)} set otherwise than before"


@pytest.fixture(autouse=True)
def _no_source_lines():
    """Kernels are traced without the source line of every operation.

    The CuTe DSL looks for them in all frames, for its diagnostics: a fifth of a compilation. The
    code it makes is the same.
    """
    tracer = sys.modules.get("cutlass._mlir_helpers.op")
    if hasattr(tracer, "_get_caller_frame_info"):
        tracer._get_caller_frame_info = lambda: None


@pytest.fixture
def own_fusions():
    """The registry, for tests that register fusions or rules; afterwards as it was."""
    rules, functions = registry.rules, registry.functions
    yield registry
    registry.rules = rules
    registry.functions = functions
    registry.version += 1


@pytest.fixture
def default_device():
    """Sets the device that tensors are made on unless they say where, as users may."""
    yield torch.set_default_device
    torch.set_default_device(None)


@pytest.fixture(scope="module")
def one_thread():
    """Of tiny tensors, two threads wait for each other wherever tests run in parallel."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def poisoned():
    """New memory holds NaN, so that an element that nothing wrote is seen."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def cpu_or_cuda(request, default_device):
    """The device that new tensors are on unless the test says where: each in turn."""
    if request.param == "cuda":
        default_device("cuda")
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=checks.hopper)])
def cpu_or_hopper(request, default_device):
    """As ``cpu_or_cuda``; a Hopper GPU, where plans for ``sm90`` run by the kernels themselves."""
    if request.param == "cuda":
        if "sm100" in str(request.node.callspec):
            pytest.skip("what stands in for Blackwell's kernels is tested on the CPU")
        default_device("cuda")
    return request.param


@pytest.fixture
def fresh_compiler():
    """No compiled code from before, and none left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def mesh():
    """The device mesh of one process, by gloo."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch with gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
