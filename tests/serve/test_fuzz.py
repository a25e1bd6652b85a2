"""Requests made up from the server's own OpenAPI description, right and wrong: no 5xx, and OpenAI's error shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ssd_ascend.serve.app import POSTS
from tests.serve.live import PATIENCE_S, LiveServer

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(-1, 40),
    "max_completion_tokens": st.integers(-1, 40),
    "n": st.integers(-1, 3),
}
"""Fields whose full range would only make the parrot talk for long."""
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": st.text(max_size=10)}),
    min_size=1,
    max_size=3,
)
"""Conversations that are right: the schema alone rarely leads to one."""


def from_schema(schema: dict[str, Any], definitions: dict[str, Any], name: str = "") -> st.SearchStrategy[Any]:
    """Values that a JSON schema allows, as far as our schemas go."""
    if "$ref" in schema:
        return from_schema(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    if name in LIKELY:
        return LIKELY[name]
    if name == "messages":
        return TURNS | TURNS | from_schema(schema, definitions)
    if "anyOf" in schema:
        return st.one_of([from_schema(option, definitions) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object" if "properties" in schema:
            required = set(schema.get("required", ()))
            fields = {key: from_schema(value, definitions, key) for key, value in schema["properties"].items()}
            return st.fixed_dictionaries(
                {key: value for key, value in fields.items() if key in required},
                optional={key: value for key, value in fields.items() if key not in required},
            )
        case "object":
            return st.dictionaries(st.text(max_size=5) | st.integers(0, 300).map(str), JUNK, max_size=3)
        case "array":
            return st.lists(from_schema(schema["items"], definitions), max_size=3)
        case "string":
            return st.text(max_size=20)
        case "integer":
            return st.integers(schema.get("minimum", -5), schema.get("maximum", 300))
        case "number":
            return st.floats(-3, 3)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return JUNK


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client
    server.wait_until_idle()


@pytest.fixture(scope="module")
def definitions(server: LiveServer) -> dict[str, Any]:
    description = server.get("/openapi.json").json()
    assert set(POSTS) < set(description["paths"])
    found: dict[str, Any] = description["components"]["schemas"]
    return found


@pytest.mark.parametrize("path", sorted(POSTS))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_request_breaks_the_server(
    http: httpx.Client, definitions: dict[str, Any], path: str, data: st.DataObject
) -> None:
    schema = definitions[POSTS[path][1].__name__]
    body = data.draw(from_schema(schema, definitions))
    kept = data.draw(st.sets(st.sampled_from(sorted(schema["properties"])), max_size=4))
    body = {name: value for name, value in body.items() if name in kept or name in schema.get("required", ())}
    body.pop("model", None)
    for name in data.draw(st.lists(st.sampled_from(sorted(schema["properties"])), max_size=1)):
        body[name] = data.draw(JUNK)
    response = http.post(path, content=json.dumps(body))  # which writes infinities, though JSON has none
    event(f"status {response.status_code}")
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif body.get("stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json()
