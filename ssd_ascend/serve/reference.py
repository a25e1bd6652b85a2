"""The fields of every request as a table: `python -m ssd_ascend.serve.reference` writes it into docs/api.md.

The names and values come from `protocol.py`, so that a field that is added shows here, and has to be explained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ssd_ascend.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ssd_ascend.serve.responses.request import ResponsesRequest
from ssd_ascend.serve.strict import Strict

BODIES: Mapping[str, type[Strict]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
NOTES: Mapping[str, str] = {
    "add_generation_prompt": "extension: false continues no turn of the assistant",
    "add_special_tokens": "BOS, where the model expects one",
    "chat_template_kwargs": "extension: variables for the chat template",
    "echo": "the prompt goes before its answers; not together with `logprobs`",
    "frequency_penalty": "-2 to 2",
    "grammar": "extension: a grammar in llguidance's dialect of Lark that the whole answer must follow",
    "ignore_eos": "extension: goes on past the end of sequence",
    "include_stop_str_in_output": "extension",
    "input": "a text, or messages, function calls, their outputs, and reasoning, as they came",
    "instructions": "goes before the input, as a system message",
    "logit_bias": "token id -> -100 to 100",
    "logprobs": "of the tokens said (chat), or that many alternatives too (completions)",
    "max_completion_tokens": "the newer name of `max_tokens`",
    "max_output_tokens": "without it, all that fits",
    "max_tokens": "without it, all that fits",
    "messages": "text, as a string or as parts; `tool_calls`, `tool_call_id` and `reasoning_content` as they came",
    "metadata": "taken, no effect",
    "min_p": "extension: 0 to 1",
    "min_tokens": "extension: nothing ends the answer before",
    "model": "the name served, or left out",
    "n": "1 to 128",
    "parallel_tool_calls": "false: one call at most",
    "presence_penalty": "-2 to 2",
    "prompt": "a text, texts, token ids, or lists of token ids",
    "prompt_cache_key": "taken, no effect: every prompt may find its beginning cached",
    "reasoning": "`effort`, as `reasoning_effort` of chat",
    "reasoning_effort": "where the model's chat template knows it, or `enable_thinking` (off for none and minimal)",
    "regex": "extension: a regular expression that the whole answer matches (no look-around)",
    "repetition_penalty": "extension: over prompt and answer; 1 is none",
    "response_format": "text, json_object, or json_schema; with `strict`, a keyword that cannot be enforced is refused",
    "return_token_sources": "extension: `tokens` and `speculation` in each choice, see below",
    "safety_identifier": "taken, no effect",
    "seed": "64 bits; equal requests get equal answers, whoever drafts",
    "skip_special_tokens": "leave out the tokens that are no text",
    "speculation": "extension: false decodes this request plainly",
    "stop": "a string, or up to 16, each of at most 1024 characters",
    "stop_token_ids": "extension",
    "stream": "server-sent events",
    "stream_options": "`include_usage`",
    "temperature": "0 (greedy) to 100",
    "text": "`format`: text, json_object, or json_schema",
    "tokens": "ids",
    "tool_choice": "none, auto, required, or a function by name; the last two are enforced",
    "tools": "functions, at most 128; `strict` ones are enforced wherever the model's format marks calls",
    "top_k": "extension: 0 or -1 is all",
    "top_logprobs": "0 to 20, with `logprobs`",
    "top_p": "above 0, to 1",
    "user": "taken, no effect",
}


def field_table(body: type[Strict]) -> str:
    """Markdown: every field of one request, those that do nothing at the end."""
    rows = [f"| `{name}` | {NOTES[name]} |" for name in sorted(body.model_fields)]
    no_ops: Mapping[str, tuple[object, ...]] = getattr(body, "NO_OP_ONLY", {})
    rows += [f"| `{name}` | {_only(no_ops[name])} |" for name in sorted(no_ops)]
    return "\n".join(["| field | |", "|---|---|", *rows])


def _only(values: tuple[object, ...]) -> str:
    given = [f"`{json.dumps(value)}`" for value in values if value is not None]
    return f"only {' or '.join(given)}, at which it does nothing; else 400" if given else "400: not supported"


def reference() -> str:
    """The whole section of the document."""
    return "\n\n".join(f"`POST {path}`\n\n{field_table(body)}" for path, body in BODIES.items())


BEGIN, END = "<!-- fields: made by python -m ssd_ascend.serve.reference -->", "<!-- end of fields -->"


def sections(document: str) -> Iterator[str]:
    """What stands before the table in a document, the table, and what stands behind it."""
    before, _, rest = document.partition(BEGIN)
    table, _, after = rest.partition(END)
    yield from (before, table.strip(), after)


def updated(document: str) -> str:
    """A document with its table brought up to date."""
    before, _, after = sections(document)
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"


def write(file: Path) -> None:
    """Bring a document up to date."""
    file.write_text(updated(file.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2] / "docs" / "api.md")
