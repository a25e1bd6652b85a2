"""The document says what the code does, and the code knows every field of the current API."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from ssd_ascend.flags import add_engine_arguments
from ssd_ascend.serve.arguments import parse_arguments, server_config
from ssd_ascend.serve.protocol import ChatRequest, CompletionRequest
from ssd_ascend.serve.reference import BODIES, NOTES, reference, sections
from tests.serve.live import LiveServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("params", "body"), [(chat_params, ChatRequest), (text_params, CompletionRequest)])
def test_every_field_of_the_official_client_is_known(params: Any, body: Any) -> None:
    official = set(params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert official <= set(body.model_fields) | set(body.NO_OP_ONLY)


def test_every_field_is_explained_and_nothing_else_is() -> None:
    assert set(NOTES) == {name for body in BODIES.values() for name in body.model_fields}


def test_the_document_is_up_to_date() -> None:
    """`python -m ssd_ascend.serve.reference` brings it there."""
    _, table, _ = sections((ROOT / "docs" / "api.md").read_text("utf-8"))
    assert table == reference()


@pytest.fixture(scope="module")
def metrics(server: LiveServer) -> set[str]:
    """The names of all series, as a scraper sees them."""
    server.post("/v1/completions", {"prompt": "hi", "max_tokens": 9})
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith("ssd_")]
    return {re.split(r"[{ ]", line)[0] for line in lines}


def test_every_metric_is_in_the_document(metrics: set[str]) -> None:
    documented = (ROOT / "docs" / "api.md").read_text("utf-8")
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in metrics if not name.endswith("_created")}
    assert not [name for name in families if name not in documented]


def test_the_dashboard_asks_for_metrics_that_exist(metrics: set[str]) -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text("utf-8"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"ssd_\w+", target["expr"])
    }
    assert len(asked) > 20
    assert asked <= metrics


def test_the_example_settings_are_settings() -> None:
    args = parse_arguments(["--config", str(ROOT / "deploy" / "server.toml")], add_engine_arguments)
    assert server_config(args).max_queue == 128
    assert args.max_num_seqs == 32
