# SPDX-License-Identifier: Apache-2.0
"""A fake of vLLM: a program that speaks its HTTP interface as documented, and answers with the words it was given.

    python fake_engine.py --port PORT [--exit CODE] [--never-healthy] [--no-health] [--grandchild FILE] [--deaf] [--key KEY]

What is asked decides how it is answered: the first word of the prompt, or of the last message, may be one of BEHAVIOURS. GET
/stats tells what it has seen. It needs the standard library alone: it is run by its path, as an engine is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

BEHAVIOURS = (
    "refuse",
    "fail-midway",
    "drop",
    "hang",
    "die",
    "split",
    "no-done",
    "unfinished",
    "plain",
    "huge",
    "garbage",
)

stats: dict[str, Any] = {"connections": 0, "requests": 0, "open": 0, "most": 0, "hung_up": 0, "bodies": []}


class Engine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stats["connections"] += 1
        try:
            while await self.one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split("\r\n")[0].split(" ")
        fields = {
            line.split(":", 1)[0].lower(): line.split(":", 1)[1].strip() for line in head.split("\r\n")[1:] if line
        }
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if path == "/stats":
            return self.reply(writer, 200, stats)
        if path == "/health":
            if self.options.no_health:
                return self.reply(writer, 404, {"detail": "Not Found"})
            return self.reply(writer, 503 if self.options.never_healthy else 200, {})
        if self.options.key and fields.get("authorization") != f"Bearer {self.options.key}":
            return self.reply(writer, 401, {"error": "Unauthorized"})
        if path == "/v1/models":
            return self.reply(writer, 200, {"object": "list", "data": [{"id": "fake/engine", "object": "model"}]})
        if path.startswith("/v1/messages"):
            return self.reply(writer, 404, {"detail": "Not Found"})
        stats["requests"] += 1
        document = json.loads(body)
        stats["bodies"] = [*stats["bodies"], {"path": path, **document}][-8:]
        stats["open"] += 1
        stats["most"] = max(stats["most"], stats["open"])
        try:
            return await self.answer(reader, writer, path, document)
        finally:
            stats["open"] -= 1

    def reply(self, writer: asyncio.StreamWriter, status: int, document: Any, extra: str = "") -> bool:
        text = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n{extra}\r\n"
        writer.write(head.encode() + text)
        return True

    async def answer(self, reader: Any, writer: Any, path: str, asked: Any) -> bool:
        if asked.get("model") not in ("fake/engine", "adapter"):
            text = f"The model `{asked.get('model')}` does not exist."
            return self.reply(writer, 404, {"error": {"message": text, "type": "NotFoundError", "code": 404}})
        if path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.25, -1.0]}]
            return self.reply(writer, 200, {"object": "list", "model": "fake/engine", "data": data})
        chat = path.endswith("chat/completions")
        text = asked["messages"][-1]["content"] if chat else asked["prompt"]
        behaviour, _, rest = text.partition(" ")
        if behaviour not in BEHAVIOURS:
            behaviour, rest = "", text
        if behaviour == "refuse":
            status = int(rest)
            error = {"object": "error", "message": f"refused\nwith {status}", "type": "BadRequestError", "code": status}
            return self.reply(writer, status, error, "retry-after: 7\r\n")
        if behaviour == "garbage":
            return self.reply(writer, 200, "no object")
        words = rest.split(" ")[: asked.get("max_tokens") or 1000]
        usage = {"prompt_tokens": 3, "completion_tokens": len(words), "prompt_tokens_details": {"cached_tokens": 2}}
        if not asked.get("stream"):
            if behaviour == "hang":
                await self.hang(reader)
            output = " ".join(words)
            choices = [
                {"index": index, "finish_reason": "stop"}
                | ({"message": {"content": output}} if chat else {"text": output})
                for index in range(asked.get("n") or 1)
            ]
            return self.reply(writer, 200, {"id": "x", "model": "fake/engine", "choices": choices, "usage": usage})
        return await self.stream(reader, writer, chat, behaviour, words, usage, asked)

    async def stream(
        self, reader: Any, writer: Any, chat: bool, behaviour: str, words: Any, usage: Any, asked: Any
    ) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            + (b"connection: close\r\n\r\n" if behaviour == "plain" else b"transfer-encoding: chunked\r\n\r\n")
        )

        async def send(text: str) -> None:
            data = text.encode()
            pieces = [data[i : i + 1] for i in range(len(data))] if behaviour == "split" else [data]
            for piece in pieces:
                writer.write(piece if behaviour == "plain" else b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
                if behaviour == "split":
                    await asyncio.sleep(0)

        async def chunk(document: Any) -> None:
            await send(f"data: {json.dumps({'id': 'x', 'model': 'fake/engine', **document}, ensure_ascii=False)}\n\n")

        def choice(word: str, reason: str | None = None) -> Any:
            return {
                "choices": [
                    {"index": 0, "finish_reason": reason} | ({"delta": {"content": word}} if chat else {"text": word})
                ]
            }

        await send(": a comment\n\n")
        for number, word in enumerate(words):
            await chunk(choice(word if not number else f" {word}"))
            if not number and behaviour == "fail-midway":
                await send('data: {"error": {"message": "out of pages", "type": "x", "code": 503}}\n\n')
            elif not number and behaviour == "drop":
                writer.transport.abort()
                return False
            elif not number and behaviour == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif not number and behaviour == "hang":
                await self.hang(reader)
            elif not number and behaviour == "huge":
                await chunk(choice("x" * 3_000_000))
        if behaviour != "unfinished":
            await chunk(choice("", "length" if asked.get("max_tokens") else "stop"))
        if (asked.get("stream_options") or {}).get("include_usage"):
            await chunk({"choices": [], "usage": usage})
        if behaviour not in ("no-done", "unfinished"):
            await send("data: [DONE]\n\n")
        if behaviour == "plain":
            return False
        writer.write(b"0\r\n\r\n")
        return True

    async def hang(self, reader: asyncio.StreamReader) -> None:
        """Generate for ever, until the caller goes away."""
        await reader.read(1)
        stats["hung_up"] += 1
        raise ConnectionError


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=int(os.environ.get("FAKE_PORT", "0")))
    parser.add_argument("--exit", type=int)
    parser.add_argument("--never-healthy", action="store_true")
    parser.add_argument("--no-health", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--grandchild", default="")
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    print("fake engine: loading weights", flush=True)
    if options.exit is not None:
        print("CUDA out of memory: tried to allocate 80 GiB", file=sys.stderr, flush=True)
        sys.exit(options.exit)
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.grandchild:
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(options.grandchild, "a") as file:
            file.write(f"{worker.pid}\n")
    stats["pid"] = os.getpid()
    stats["folder"] = os.getcwd()
    stats["greeting"] = os.environ.get("GREETING", "")
    stats["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    server = await asyncio.start_server(Engine(options).serve, "127.0.0.1", options.port)
    if "PORT_FILE" in os.environ:
        with open(os.environ["PORT_FILE"], "w") as file:
            file.write(str(options.port))
    print(f"fake engine: listening on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
