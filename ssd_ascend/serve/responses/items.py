"""The output of a response: items put together from an answer's parts, and the events that tell of each step of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

from ssd_ascend.serve.parts import CallArguments, CallStart, Part, Reasoning, Text

Json = dict[str, object]


def item_id(prefix: str) -> str:
    """An id for an item."""
    return f"{prefix}_{uuid.uuid4().hex}"


class OutputItems:
    """At most one item is open: thoughts, a message, or a call. `take` and `close` give events (without numbers)."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._kind = ""
        self._text = ""

    def take(self, part: Part) -> Iterator[Json]:
        """One more part of the answer."""
        match part:
            case Reasoning(text):
                yield from self._open_unless("reasoning", self._new_reasoning)
                yield from self._grow("response.reasoning_text.delta", text)
            case Text(text):
                yield from self._open_unless("message", self._new_message)
                yield from self._grow("response.output_text.delta", text)
            case CallStart(_, name):
                yield from self.close("completed")
                call: Json = {"type": "function_call", "id": item_id("fc"), "call_id": item_id("call"), "name": name}
                yield from self._open("function_call", {**call, "arguments": "", "status": "in_progress"})
            case CallArguments(_, text):
                yield from self._grow("response.function_call_arguments.delta", text)

    def _new_reasoning(self) -> Json:
        return {"type": "reasoning", "id": item_id("rs"), "summary": [], "content": [], "status": "in_progress"}

    def _new_message(self) -> Json:
        return {"type": "message", "id": item_id("msg"), "role": "assistant", "content": [], "status": "in_progress"}

    def _open_unless(self, kind: str, new: Callable[[], Json]) -> Iterator[Json]:
        if self._kind != kind:
            yield from self.close("completed")
            yield from self._open(kind, new())

    def _open(self, kind: str, item: Json) -> Iterator[Json]:
        self._kind, self._text = kind, ""
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": self._index, "item": dict(item)}
        if kind != "function_call":
            yield {"type": "response.content_part.added", **self._place(), "part": self._part()}

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _place(self) -> Json:
        """Where the open item's text stands."""
        place: Json = {"item_id": self.items[-1]["id"], "output_index": self._index}
        return place if self._kind == "function_call" else {**place, "content_index": 0}

    def _part(self) -> Json:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _grow(self, event: str, text: str) -> Iterator[Json]:
        self._text += text
        more: Json = {"logprobs": []} if self._kind == "message" else {}
        yield {"type": event, **self._place(), "delta": text, **more}

    def close(self, status: str) -> Iterator[Json]:
        """End the open item, if there is one."""
        if not self._kind:
            return
        item, kind = self.items[-1], self._kind
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = self._text
            done: Json = {
                "type": "response.function_call_arguments.done",
                "arguments": self._text,
                "name": item["name"],
            }
            yield {**done, **self._place()}
        else:
            item["content"] = [self._part()]
            name = "response.reasoning_text.done" if kind == "reasoning" else "response.output_text.done"
            more: Json = {"logprobs": []} if kind == "message" else {}
            yield {"type": name, **self._place(), "text": self._text, **more}
            yield {"type": "response.content_part.done", **self._place(), "part": self._part()}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": dict(item)}
        self._kind = ""
