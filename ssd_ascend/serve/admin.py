"""What the operator of a server may see and change while it runs, on an address and with a key of its own.

`serve/server.py` runs it beside the API when `--admin-port` is given. Nothing here is reachable with an API key.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ssd_ascend.config.speculation import FanOutSpec
from ssd_ascend.errors import RequestError
from ssd_ascend.log import fields, get_logger
from ssd_ascend.serve.app import health_of, key_check
from ssd_ascend.serve.encoding import json_response
from ssd_ascend.serve.errors import install_error_handlers
from ssd_ascend.serve.origins import OwnPagesOnly
from ssd_ascend.serve.state import ServerState
from ssd_ascend.serve.strict import Strict

log = get_logger(__name__)


class SpeculationChange(Strict):
    """`enabled: false` decodes plainly; `lookahead` bounds the drafts of a row; `fan_out` is the guesses `ssd` prepares
    for every accepted length, one number or a list of them. None may go beyond what the server started with."""

    enabled: bool | None = None
    lookahead: int | None = None
    fan_out: int | list[int] | None = None


def create_admin_app(state: ServerState) -> Starlette:
    """GET /admin/state, GET and POST /admin/speculation."""
    assert state.config.admin_key is not None, "an admin endpoint has a key"
    check = key_check([state.config.admin_key])

    async def show_state(request: Request) -> Response:
        check(request)
        engine = state.engine
        return json_response(
            {
                "health": health_of(state)[1],
                "engine": None if engine.info is None else asdict(engine.info),
                "limits": None if engine.limits is None else asdict(engine.limits),
                "stats": asdict(engine.stats),
                "open_sequences": engine.num_sequences,
            }
        )

    async def speculation(request: Request) -> Response:
        check(request)
        state.engine.require_ready()
        if request.method == "POST":
            _change(state, await state.read(SpeculationChange, request))
        return json_response(_speculation(state)._asdict())

    routes = [Route("/admin/state", show_state), Route("/admin/speculation", speculation, methods=["GET", "POST"])]
    app = Starlette(routes=routes)
    app.add_middleware(OwnPagesOnly)
    install_error_handlers(app)
    return app


class _Speculation(NamedTuple):
    """How the server speculates now. `max_lookahead` is what it was started with, 0 where nothing is drafted."""

    speculator: str
    drafter: str
    enabled: bool
    lookahead: int
    max_lookahead: int
    fan_out: FanOutSpec | list[int]


def _speculation(state: ServerState) -> _Speculation:
    info = state.engine.info
    most = 0 if info is None else info.lookahead
    tuned = state.engine.tuned
    lookahead = most if tuned is None else tuned.lookahead
    configured = state.engine.config.speculation.fan_out
    return _Speculation(
        speculator="none" if info is None else info.speculator,
        drafter="none" if info is None else info.drafter,
        enabled=lookahead > 0,
        lookahead=lookahead,
        max_lookahead=most,
        fan_out=tuned.fan_out if tuned is not None and tuned.fan_out else configured,
    )


def _change(state: ServerState, change: SpeculationChange) -> None:
    """Raises RequestError for what this server cannot do."""
    now = _speculation(state)
    most = now.max_lookahead
    if most == 0:
        asked = next(iter(change.model_dump(exclude_none=True)), None)
        raise RequestError("this server was started without a speculator", param=asked, remedy="see --speculator")
    if change.lookahead is not None and not 1 <= change.lookahead <= most:
        raise RequestError(
            f"lookahead is {change.lookahead}: it must be from 1 to {most}", param="lookahead", remedy="see --lookahead"
        )
    wanted = change.lookahead or now.lookahead or most
    is_on = change.enabled if change.enabled is not None else bool(now.enabled or change.lookahead)
    fan_out = [] if change.fan_out is None else _fan_out(state, change.fan_out, most)
    state.engine.tune(wanted if is_on else 0, fan_out)
    log.info("speculation was changed %s", fields(**_speculation(state)._asdict()))


def _fan_out(state: ServerState, wanted: int | list[int], lookahead: int) -> list[int]:
    """Guesses for every accepted length. Raises RequestError for more than there is memory for."""
    config = state.engine.config.speculation
    if config.speculator != "ssd":
        raise RequestError("only the speculator 'ssd' prepares guesses", param="fan_out", remedy="see --speculator")
    each = [wanted] * (lookahead + 1) if isinstance(wanted, int) else wanted
    if len(each) != lookahead + 1 or min(each) < 0 or sum(each) == 0:
        raise RequestError(
            f"fan_out is {wanted}: it must be one number above 0, or {lookahead + 1} of them from 0 on", param="fan_out"
        )
    built = config.fan_out
    most = sum(built) if isinstance(built, tuple) else (3 if built == "auto" else built) * (lookahead + 1)
    if sum(each) > most:
        raise RequestError(
            f"fan_out is {wanted}, which makes {sum(each)} guesses; this server has memory for {most}",
            param="fan_out",
            remedy="start it with a larger --fan-out",
        )
    return each
