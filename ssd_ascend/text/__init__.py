"""Tokens and text: tokenizer, chat template, incremental detokenizer, stop strings. Light to import, free of torch."""

from ssd_ascend.text.chat_template import ChatTemplate
from ssd_ascend.text.detokenizer import IncrementalDetokenizer
from ssd_ascend.text.gguf_metadata import read_gguf_metadata
from ssd_ascend.text.stop import StopChecker, StopMatcher
from ssd_ascend.text.stream import TextDelta, TextStream
from ssd_ascend.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopChecker",
    "StopMatcher",
    "TextDelta",
    "TextStream",
    "Tokenizer",
    "read_gguf_metadata",
]
