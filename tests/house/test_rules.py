"""Each rule bites: a source that breaks it is reported, a source that keeps it is not."""

from __future__ import annotations

import pytest

from tests.house import rules
from tests.house.rules import Module


def module(name: str, body: str) -> Module:
    return Module(name, f'"""A room."""\n{body}\n')


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("core.sequence", "from ssd_ascend.engine.scheduler import Scheduler"),
        ("core.sequence", "import ssd_ascend.runtime.inputs"),
        ("speculation.cache", "from ssd_ascend.engine import builder"),
        ("errors", "from ssd_ascend import catalogue"),
        ("kv.blocks", "from ..runtime import graphs"),
        ("runtime.inputs", "if TYPE_CHECKING:\n    from ssd_ascend.engine.engine import Engine"),
        ("layers.linear", "def f():\n    from ssd_ascend.weights.loader import load"),
        ("attic.box", "pass"),
    ],
)
def test_an_import_that_points_up_is_reported(name: str, body: str) -> None:
    assert rules.layer_order([module(name, body)])


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("engine.scheduler", "from ssd_ascend.kv.blocks import BlockManager\nfrom ssd_ascend import env"),
        ("engine.scheduler", "import torch\nfrom os import path"),
        ("core.sequence", "from .sampling import SamplingParams"),
        ("serve.__main__", "from ssd_ascend.cli import main"),
    ],
)
def test_an_import_that_points_down_is_fine(name: str, body: str) -> None:
    assert rules.layer_order([module(name, body)]) == []


def test_a_ring_of_files_is_reported() -> None:
    ring = [
        module("core.a", "from ssd_ascend.core.b import B"),
        module("core.b", "from ssd_ascend.core.c import C"),
        module("core.c", "from ssd_ascend.core import a"),
    ]
    assert rules.rings(ring) == ["core.a -> core.b -> core.c -> core.a"]
    assert rules.rings(ring[:2]) == []


def test_a_ring_of_rooms_is_reported() -> None:
    ring = [
        module("core.a", "from ssd_ascend.config.model import M"),
        module("core.b", ""),
        module("config.model", ""),
        module("config.other", "from ssd_ascend.core.b import B"),
    ]
    assert rules.rings(ring) == ["config -> core -> config"]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("backends.npu.ops", "from ssd_ascend.backends.cuda.ops import rms_norm"),
        ("backends.cuda.graphs", "from ssd_ascend.backends.cpu.backend import CpuBackend"),
        ("backends.cpu.ops", "from ssd_ascend.backends.npu import soc"),
        ("runtime.model_runner", "from ssd_ascend.backends.cpu.backend import CpuBackend"),
        ("runtime.model_runner", "from ssd_ascend.backends.registry import load_backend"),
    ],
)
def test_a_breach_of_the_backend_walls_is_reported(name: str, body: str) -> None:
    assert rules.backend_walls(module(name, body))


@pytest.mark.parametrize(
    ("name", "body"),
    [
        (
            "backends.npu.ops",
            "from ssd_ascend.backends.cpu.ops import rms_norm\nfrom ssd_ascend.backends.base import Ops",
        ),
        ("backends.npu.ops", "from ssd_ascend.backends.npu.soc import Soc"),
        ("engine.builder", "from ssd_ascend.backends.registry import load_backend"),
    ],
)
def test_the_gates_in_the_backend_walls_are_open(name: str, body: str) -> None:
    assert rules.backend_walls(module(name, body)) == []


@pytest.mark.parametrize(
    "body", ["import os\nx = os.environ['A']", "import os\nos.getenv('A')", "from os import environ"]
)
def test_reading_the_environment_is_reported(body: str) -> None:
    assert rules.environment(module("core.x", body))
    assert rules.environment(module("env", body)) == []


@pytest.mark.parametrize(
    "body",
    [
        "import torch_npu",
        "import triton.language as tl",
        "torch.cuda.synchronize()",
        "x = 'hccl'",
        "def f(use_npu): ...",
        "import x as nccl",
        "y = f'{a} on CUDA:0'",
    ],
)
def test_a_device_word_outside_its_backend_is_reported(body: str) -> None:
    assert rules.device_words(module("runtime.graphs", body))
    assert rules.device_words(module("backends.npu.ops", body)) == []


def test_prose_and_longer_words_are_no_device_words() -> None:
    body = 'input_ids = 1  # the NPU wants host lists\ndef f():\n    """CUDA\'s replan is a no-op."""\n'
    assert rules.device_words(module("runtime.graphs", body)) == []


def test_a_module_without_an_opening_is_reported() -> None:
    assert rules.opening(Module("core.x", "import os\n"))
    assert rules.opening(module("core.x", "")) == []


@pytest.mark.parametrize("body", ["def f(): ...", "x = 1", "for a in b: pass", "register()", "def __getattr__(n): ..."])
def test_logic_in_an_init_is_reported(body: str) -> None:
    assert rules.thin_init(module("core.__init__", body))


def test_an_init_may_hand_names_on() -> None:
    body = "from ssd_ascend.core.sequence import Sequence\n__all__ = ['Sequence']\nif TYPE_CHECKING:\n    import x"
    assert rules.thin_init(module("core.__init__", body)) == []
    assert rules.thin_init(module("__init__", "def __getattr__(name): ...")) == []


def test_print_is_reported_outside_the_doors() -> None:
    assert rules.quiet(module("engine.engine", "print('x')"))
    assert rules.quiet(module("doctor", "print('x')")) == []
    assert rules.quiet(module("parity.__main__", "print('x')")) == []


@pytest.mark.parametrize(
    "body",
    [
        "cache = {}",
        "_seen: set[int] = set()",
        "X = 0\ndef f():\n    global X\n    X = 1",
        "TABLE = {}\ndef f():\n    TABLE['a'] = 1",
        "TABLE = {'a': [0]}\ndef f():\n    del TABLE['a']",
        "ITEMS = collections.deque()\ndef f():\n    ITEMS.append(1)",
    ],
)
def test_state_in_a_module_is_reported(body: str) -> None:
    assert rules.no_globals(module("core.x", body))


def test_constants_and_local_state_are_fine() -> None:
    body = "TABLE = {'a': 1}\n_NAMES = ['b']\n__all__ = ['f']\ndef f():\n    found = []\n    found.append(TABLE['a'])"
    assert rules.no_globals(module("core.x", body)) == []


def test_a_long_file_is_reported() -> None:
    assert rules.short(module("core.x", "x = 1\n" * rules.MAX_LINES))
    assert rules.short(module("core.x", "x = 1\n" * 100)) == []


@pytest.mark.parametrize("call", ["argparse.ArgumentParser()", "verbs.add_parser('a', allow_abbrev=True)"])
def test_a_parser_of_shortened_flags_is_reported(call: str) -> None:
    assert rules.full_flags(module("generate", f"import argparse\nparser = {call}"))
    assert rules.full_flags(module("generate", "parser = argparse.ArgumentParser(allow_abbrev=False)")) == []
