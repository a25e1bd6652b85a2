"""Reads the body of a request within the bounds that a server has for one: for its handlers, by way of `state.py`, and
for the router behind Ray Serve, `ray_front.py`.
"""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from ssd_ascend.serve.errors import ApiError


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body of a request. Raises ApiError: 415 for one that is packed, 413 above the limit, 408 when it takes
    too long, 400 when the client leaves."""
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415,
            f"the body has Content-Encoding {coding[:32]!r}, and is read here as it is (send it without)",
            headers={"Accept-Encoding": "identity"},  # RFC 9110, 12.5.3
        )
    parts: list[bytes] = []
    size = 0
    if int(request.headers.get("content-length", 0)) > max_bytes:  # before the client is told to send it
        raise ApiError(413, f"the body is over the limit of {max_bytes} bytes")
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise ApiError(413, f"the body is over the limit of {max_bytes} bytes")
                parts.append(part)
    except ClientDisconnect as error:
        raise ApiError(400, "the client left before it had sent its request") from error
    except TimeoutError as error:
        raise ApiError(408, "the request took too long to arrive") from error
    return b"".join(parts)
