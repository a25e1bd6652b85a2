"""What an NPU is asked of its own: forms of fused attention in processes that may die, and the price of updates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ssd_ascend.backends.base import Backend, Examinable, Finding


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_NPU_EMULATOR", "1")  # for the child processes


@pytest.mark.usefixtures("emulated")
def test_every_form_is_answered(backend: Backend) -> None:
    from ssd_ascend.backends.npu.forms import FORMS  # needs torch_npu, which the backend has loaded

    assert isinstance(backend, Examinable)
    found = {finding.name: finding for finding in backend.examine(backend.device(0))}
    assert set(FORMS) < set(found)
    for name, form in FORMS.items():
        if form.relied_on:
            assert (found[name].state, found[name].remedy) == ("ok", ""), found[name]
    assert found["update of one attention call"].state == "measured"
    for issue in ("13699", "15503"):
        finding = next(f for name, f in found.items() if issue in name)
        assert (finding.state, "emulated" in finding.detail) == ("skipped", True)


def test_a_form_that_kills_its_process_is_an_answer(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from ssd_ascend.backends.npu import examine
    from ssd_ascend.backends.npu.forms import FORMS

    names, asked = list(FORMS), []

    def child(index: int, left: Sequence[str], file: Path) -> str:
        """Dies of the third; wrong about the fifth."""
        asked.append(len(left))
        with file.open("a") as out:
            for name in left:
                out.write(f'{{"begins": "{name}"}}\n')
                if name == names[2]:
                    return "its process ended with status -11: "
                kind = "wrong" if name == names[4] else "right"
                out.write(f'{{"name": "{name}", "kind": "{kind}", "detail": "error 1"}}\n')
        return "done"

    monkeypatch.setattr(examine, "_child", child)
    found: dict[str, Finding] = {finding.name: finding for finding in examine._forms(0)}
    assert list(found) == names
    assert asked == [len(names), len(names) - 3]
    assert [name for name, f in found.items() if f.state == "failed"] == [names[2], names[4]]
    assert "-11" in found[names[2]].detail
    assert found[names[2]].remedy == FORMS[names[2]].remedy
