"""Ten minutes of a server with a tiny model and a real draft worker, which is killed now and then, as is the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.server_soak import measure
from tests.serve.conftest import TEMPLATE
from tests.structured.models import EOS, write_bytes_pair
from tests.unit.text_toys import byte_level_backend, write_directory

pytestmark = pytest.mark.slow

MINUTES = 10.0


def soaked(folder: Path) -> list[str]:
    """The flags of a server for a tiny pair, which is written below `folder`."""
    write_bytes_pair(folder)
    write_directory(folder / "target", byte_level_backend(), eos_token=EOS, chat_template=TEMPLATE)
    flags = ["--model", str(folder / "target"), "--draft", str(folder / "model"), "--speculator", "ssd"]
    flags += ["--lookahead", "4", "--num-kv-blocks", "256", "--max-num-seqs", "8", "--dtype", "float32"]
    return [*flags, "--device", "cpu", "--threads", "1", "--draft-threads", "1"]


def test_ten_minutes(tmp_path: Path) -> None:
    result = measure(MINUTES, soaked(tmp_path))
    print({name: result[name] for name in ("seen", "growth_percent", "failures")})
    assert result["failures"] == []
    assert all(result["seen"][f"kill {who}"] == 2 for who in ("worker", "engine"))
    assert all(result["seen"][act] > 10 for act in ("repeat", "stream", "json", "leave", "several", "long", "nonsense"))
    assert result["growth_percent"]["front_end_mb"] < 2
    assert result["growth_percent"]["engine_mb"] < 5  # a young process, which still meets shapes for the first time
    descriptors = [row["descriptors"] for row in result["rows"]]
    assert descriptors[-1] <= descriptors[0] + 2
