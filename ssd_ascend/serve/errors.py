"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}: whatever goes wrong is told in one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ssd_ascend.engine.async_engine import EngineUnavailableError
from ssd_ascend.errors import RequestError
from ssd_ascend.log import fields, get_logger
from ssd_ascend.serve.http_answers import error_body, error_headers

log = get_logger(__name__)


class ApiError(Exception):
    """An error with a status of its own; RequestError is the usual way to say 400."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {"WWW-Authenticate": "Bearer"} if status == 401 else dict(headers or {})


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error with the field's name in an endpoint that calls it otherwise."""
    if error.param is None or error.param not in names:
        return error
    param = names[error.param]
    told = [None if text is None else _with_name(text, error.param, param) for text in (error.message, error.remedy)]
    return RequestError(told[0] or "", param=param, code=error.code, remedy=told[1])


def _with_name(text: str, name: str, new: str) -> str:
    """A sentence with another name for a field. Names of one word are words, too, and stay."""
    return re.sub(rf"\b{name}\b", new, text) if "_" in name else text


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """An error as a response."""
    body = error_body(status, message, param=param, code=code)
    headers = error_headers(status) | (headers or {})
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def install_error_handlers(app: Starlette) -> None:
    """Make every error of `app`, ours and the framework's, one of this shape."""

    async def bad_request(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(400, str(error), param=error.param, code=error.code)

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error.status, str(error), param=error.param, code=error.code, headers=error.headers)

    async def unavailable(_: Request, error: Exception) -> Response:
        return error_response(503, str(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        if headers.get("Allow") == "GET":  # as the framework has it; see `head.py`
            headers["Allow"] = "GET, HEAD"
        return error_response(error.status_code, message, headers=headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("a request failed %s", fields(method=request.method, path=request.scope["path"]), exc_info=error)
        return error_response(500, f"the server failed: {type(error).__name__}")

    app.add_exception_handler(RequestError, bad_request)
    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(EngineUnavailableError, unavailable)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
