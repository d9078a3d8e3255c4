# SPDX-License-Identifier: Apache-2.0
"""A conversation with OpenAI's own client, token by token: `python chat.py URL MODEL QUESTION...`."""

import sys

from openai import OpenAI

url, model, *questions = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none")
messages = []
for question in questions:
    messages.append({"role": "user", "content": question})
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0, stream=True)
    answer = ""
    for chunk in stream:
        piece = chunk.choices[0].delta.content or ""
        print(repr(piece), end=" ", flush=True)
        answer += piece
    print(f"\n{len(messages)} message(s) in, finish_reason {chunk.choices[0].finish_reason}")
    messages.append({"role": "assistant", "content": answer})
