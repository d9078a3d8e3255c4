# SPDX-License-Identifier: Apache-2.0
"""Chats with a service by OpenAI's own client until it is ended, then says what came of it: `python ask.py MODEL URL`.

Every second answer is streamed. All are greedy, so the service has to say the same each time, whoever of its servers does.
"""

import signal
import sys
import threading

enough = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: enough.set())  # before anything that takes its time, such as the next line

from openai import OpenAI, OpenAIError  # noqa: E402

name, url = sys.argv[1:]
create = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120).chat.completions.create
wish = {"model": name, "messages": [{"role": "user", "content": "Where does the water go?"}], "max_tokens": 8}
said, answered, failed = set(), 0, []
while not enough.wait(0.02):
    try:
        if answered % 2:
            pieces = create(**wish, temperature=0, stream=True)
            said.add("".join(piece.choices[0].delta.content or "" for piece in pieces))
        else:
            said.add(create(**wish, temperature=0).choices[0].message.content)
    except OpenAIError as error:
        failed.append(str(error)[:100])
        continue
    if not answered:
        print(f"{name} answers", flush=True)
    answered += 1
print(f"{name}: {answered} answered, {len(failed)} failed, {len(said)} different", *failed[:3], flush=True)
