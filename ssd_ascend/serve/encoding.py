"""JSON on its way out: the one encoder of this room, and a whole response of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

encode_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode


def json_response(body: object, *, status: int = 200) -> Response:
    """A response that is one JSON value."""
    return Response(encode_json(body), status_code=status, media_type="application/json")
