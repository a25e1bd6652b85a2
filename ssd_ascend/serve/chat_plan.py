"""What answering one chat request takes: the prompt, the sampling with its constraint, and how its text is taken apart.

`serve/chat.py` makes one per request. Tools, thoughts and response formats meet here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ssd_ascend.core.grammar import Grammar
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import RequestError
from ssd_ascend.serve.parts import Pipeline, Stage
from ssd_ascend.serve.protocol import ChatRequest
from ssd_ascend.serve.reasoning import ReasoningStage, Thinking, after_thoughts, thinking_after
from ssd_ascend.serve.state import ServerState
from ssd_ascend.serve.tools.formats import ToolFormat
from ssd_ascend.serve.tools.offer import ToolOffer
from ssd_ascend.serve.tools.prompting import with_tools
from ssd_ascend.text.chat_template import ChatTemplate

_LOOKED_AT = 16
"""Tokens at the end of a prompt that tell whether it opens the model's thoughts."""


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """`new_pipeline` makes what takes one answer apart; None when all of it is prose. `names` are those that the chat
    request has for fields which the engine calls otherwise."""

    prompt: list[int]
    sampling: SamplingParams
    new_pipeline: Callable[[], Pipeline] | None
    names: dict[str, str]


async def plan_chat(state: ServerState, asked: ChatRequest) -> ChatPlan:
    """Everything up to the engine. Raises RequestError naming the field that cannot be served."""
    sampling, offer = asked.to_sampling(), asked.offer()
    chat = state.tokenizer.chat
    turns = [state.turn(message) for message in asked.messages]
    tools = offer.for_template() if offer else None
    if tools and not chat.mentions("tools"):
        turns, tools = with_tools(turns, tools), None
    prompt = await state.render_chat(
        turns,
        add_generation_prompt=asked.add_generation_prompt is not False,
        tools=tools,
        variables=_variables(asked, chat),
    )
    end = state.tokenizer.decode(prompt[-_LOOKED_AT:], skip_special_tokens=False)
    thinking = thinking_after(end, model_thinks=chat.mentions("</think>"))
    constraint = _constraint(asked, offer, state.tool_format)
    if constraint is not None:
        grammar, param = constraint
        constraint = (after_thoughts(grammar, thinking) if offer is None else grammar, param)
        await state.check_grammar(constraint)
    sampling = replace(sampling, grammar=constraint[0] if constraint else None)
    names = {"prompt": "messages", "max_tokens": asked.max_tokens_name}
    if constraint is not None:
        names["grammar"] = constraint[1]
    return ChatPlan(prompt, sampling, _pipelines(thinking, offer, state.tool_format), names)


def _constraint(asked: ChatRequest, offer: ToolOffer | None, format_: ToolFormat) -> tuple[Grammar, str] | None:
    """The one thing that holds the answer: the client's own, or that of its tools."""
    own = asked.constraint()
    calls = None if offer is None else format_.grammar(offer)
    if offer is not None and own is not None:
        raise RequestError(
            f"{own[1]} and tools cannot be combined: a call is no answer of that form",
            param=own[1],
            remedy="leave one of them out, or send tool_choice: none",
        )
    return own if calls is None else (calls, "tools")


def _variables(asked: ChatRequest, chat: ChatTemplate) -> dict[str, Any] | None:
    """What the template gets beside the messages; `reasoning_effort` in the words this model's template knows."""
    variables = dict(asked.chat_template_kwargs or {})
    effort = asked.reasoning_effort
    if effort is not None:
        if chat.mentions("reasoning_effort"):
            variables.setdefault("reasoning_effort", effort)
        elif chat.mentions("enable_thinking"):
            variables.setdefault("enable_thinking", effort not in ("none", "minimal"))
        else:
            raise RequestError(
                "this model has no thoughts to take more or less effort over",
                param="reasoning_effort",
                code="unsupported_parameter",
                remedy="leave it out",
            )
    return variables or None


def _pipelines(thinking: Thinking, offer: ToolOffer | None, format_: ToolFormat) -> Callable[[], Pipeline] | None:
    if thinking is Thinking.NO and offer is None:
        return None

    def new_pipeline() -> Pipeline:
        stages: list[Stage] = []
        if thinking is not Thinking.NO:
            stages.append(ReasoningStage(is_open=thinking is Thinking.IS_OPEN))
        if offer is not None:
            stages.append(format_.parser(offer))
        return Pipeline(stages)

    return new_pipeline
