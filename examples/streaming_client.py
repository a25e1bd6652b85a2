"""Talk to a running server with the official client, and see what speculation did.

Start one with `make serve`, then: `python examples/streaming_client.py [BASE_URL] [QUESTION]`.
"""

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1", question: str = "What is the capital of France?") -> None:
    """Print the answer as it comes, then its counts."""
    client = OpenAI(base_url=base_url, api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage is not None:
            details = chunk.usage.completion_tokens_details
            drafted = f", {details.accepted_prediction_tokens} of them drafted" if details else ""
            print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} new{drafted}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
