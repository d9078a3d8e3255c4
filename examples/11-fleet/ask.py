# SPDX-License-Identifier: Apache-2.0
"""Chats with services by OpenAI's own client, and counts what came of it when it is ended: `python ask.py MODEL=URL...`.

Every second answer is streamed. All are greedy, so a service has to say the same each time, whoever of its servers does.
"""

import signal
import sys
import threading

from openai import OpenAI, OpenAIError

enough = threading.Event()
question = [{"role": "user", "content": "Where does the water go?"}]
lines = []


def chat(name: str, url: str) -> None:
    """Ask one service until it is enough."""
    create = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120).chat.completions.create
    said, answered, failed = set(), 0, []
    while not enough.wait(0.02):
        wish = {"model": name, "messages": question, "max_tokens": 8, "temperature": 0}
        try:
            if answered % 2:
                said.add("".join(piece.choices[0].delta.content or "" for piece in create(**wish, stream=True)))
            else:
                said.add(create(**wish).choices[0].message.content)
            answered += 1
        except OpenAIError as error:
            failed.append(str(error)[:100])
    lines.append(f"{name}: {answered} answered, {len(failed)} failed, {len(said)} answer(s) {failed[:3] or ''}")


signal.signal(signal.SIGTERM, lambda *_: enough.set())
threads = [threading.Thread(target=chat, args=service.split("=", 1)) for service in sys.argv[1:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(sorted(lines)))
