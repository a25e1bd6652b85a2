"""POST /tokenize and /detokenize: the model's own tokenizer, as the engine uses it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ssd_ascend.errors import RequestError
from ssd_ascend.serve.encoding import json_response
from ssd_ascend.serve.protocol import DetokenizeRequest, TokenizeRequest
from ssd_ascend.serve.state import ServerState


async def tokenize(state: ServerState, request: Request) -> Response:
    """The token ids of a text or of a conversation."""
    asked = await state.read(TokenizeRequest, request)
    state.check_model(asked.model)
    limits = state.engine.require_ready()
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if asked.messages is not None:
        tokens = await state.render_chat(
            [state.turn(message) for message in asked.messages],
            add_generation_prompt=asked.add_generation_prompt,
            variables=asked.chat_template_kwargs,
        )
    else:
        [tokens] = await state.encode([asked.prompt or ""], add_special_tokens=asked.add_special_tokens)
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": limits.max_model_len})


async def detokenize(state: ServerState, request: Request) -> Response:
    """The text of token ids."""
    asked = await state.read(DetokenizeRequest, request)
    state.check_model(asked.model)
    limits = state.engine.require_ready()
    outside = next((token for token in asked.tokens if token >= limits.vocab_size), None)
    if outside is not None:
        raise RequestError(f"token {outside} is outside the vocabulary of {limits.vocab_size}", param="tokens")
    text = await state.off_loop(
        len(asked.tokens),
        lambda: state.tokenizer.decode(asked.tokens, skip_special_tokens=asked.skip_special_tokens),
    )
    return json_response({"prompt": text})
