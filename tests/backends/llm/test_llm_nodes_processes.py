# SPDX-License-Identifier: Apache-2.0
"""A model on several nodes that are processes of `headrace serve`, as in production: answers, kill -9, health.

Beside test_llm_nodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from llm_instances import Served, served

from headrace.backends.llm.tensor_parallel import node_pool
from headrace.backends.llm.tensor_parallel.node_pool import NodePool
from headrace.core.errors import Unavailable
from headrace.core.generation import Generation, Sampling
from headrace.core.nodes import NodeSettings
from support import llm_models
from support.ports import free_port
from support.programs import HEADRACE, Program
from support.waiting import eventually

pytestmark = pytest.mark.slow
KEY = "a key of many bytes"
PROMPTS = [("the quick brown fox jumps over Grüße " * 4)[number : 3 + 9 * number] for number in range(1, 9)]
GREEDY = Sampling(temperature=0.0, max_tokens=10)
LONG = Sampling(temperature=0.0, max_tokens=1500, ignore_eos=True)
SMALL = {"max_running": "3", "max_step_tokens": "12", "page_size": "4"}


def node(number: int, count: int, port: int, models: Path, log: Path, *options: str) -> Program:
    return Program(
        *("serve", models, "--nnodes", str(count), "--node-rank", str(number), "--master-addr", f"127.0.0.1:{port}"),
        *("--http-port", "0", "--grpc-port", "0", *options),
        log=log,
        env={"HEADRACE_HANDING_KEY": KEY},
        ready="listening on",
    )


def is_ready(server: Program) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/v2/health/ready", timeout=30) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        if error.code not in (400, 503):
            raise
        return False


@asynccontextmanager
async def over_nodes(
    folder: Path, count: int, degree: int, place: Path, **parameters: str
) -> AsyncIterator[tuple[Served, list[Program]]]:
    """Node 0 in this process, the others in their own."""
    port = free_port()
    async with AsyncExitStack() as stack:
        pool = NodePool(NodeSettings(count, 0, "127.0.0.1", port, KEY.encode()))
        stack.callback(pool.close)
        workers = [
            node(number, count, port, folder.parents[1], place / f"node{number}.log") for number in range(1, count)
        ]
        for worker in workers:
            stack.enter_context(worker)
        yield (
            await stack.enter_async_context(served(folder, nodes=pool, tensor_parallel=str(degree), **parameters)),
            workers,
        )


async def answers(tiny: Served) -> list[str]:
    """Streamed, to all prompts at once: in chunks of 12 tokens."""
    callers = [tiny.ask(Generation(prompt=prompt, sampling=GREEDY, stream=True)) for prompt in PROMPTS]
    return [caller.text for caller in await asyncio.gather(*callers)]


@pytest.mark.parametrize(("count", "degree"), [(2, 2), (2, 4), (4, 4)])
def test_nodes_answer_as_one_process(count: int, degree: int, tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "models" / "tiny" / "1")

    async def compare() -> None:
        async with served(folder, **SMALL) as one:
            expected = await answers(one)
        async with over_nodes(folder, count, degree, tmp_path, **SMALL) as (several, workers):
            assert await answers(several) == expected
            assert await answers(several) == expected  # with hits in the prefix cache
            assert several.engine.scheduler.prefix_hits
            for worker in workers:
                await asyncio.to_thread(eventually, lambda worker=worker: is_ready(worker))

    asyncio.run(compare())


def test_a_killed_rank_of_another_node_is_replaced_again_and_again(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "models" / "tiny" / "1")

    async def kill() -> list[int]:
        used = []
        async with over_nodes(folder, 2, 2, tmp_path) as (tiny, _):
            expected = (await tiny.ask(Generation(prompt="the", sampling=GREEDY))).text
            for _ in range(4):
                running = tiny.begin(Generation(prompt="the", sampling=LONG, stream=True))
                await asyncio.wait_for(running.came.wait(), 60)
                used.append(tiny.engine.runner._group._ranks[0]._pid)  # type: ignore[attr-defined]
                os.kill(used[-1], signal.SIGKILL)
                await asyncio.wait_for(running.ended.wait(), 60)
                assert isinstance(running.error, Unavailable)
                assert f"rank 1 (process {used[-1]} on node 1 (" in str(running.error)
                assert "has ended (signal 9: killed)" in str(running.error)
                assert (await tiny.ask(Generation(prompt="the", sampling=GREEDY))).text == expected
        return used

    for pid in asyncio.run(kill()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_killed_node_leaves_no_process_and_joins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llm_models.tiny_llama(tmp_path / "models" / "tiny" / "1")
    monkeypatch.setattr(node_pool, "REJOIN_SECONDS", 1.0)

    async def kill() -> None:
        async with over_nodes(folder, 2, 2, tmp_path) as (tiny, (worker,)):
            expected = (await tiny.ask(Generation(prompt="the", sampling=GREEDY))).text
            running = tiny.begin(Generation(prompt="the", sampling=LONG, stream=True))
            await asyncio.wait_for(running.came.wait(), 60)
            children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
            threads = Path(f"/proc/{worker.pid}/task").iterdir()
            children += [pid for thread in threads for pid in (thread / "children").read_text().split()]
            assert children
            worker.send(signal.SIGKILL)
            worker.wait()
            await asyncio.wait_for(running.ended.wait(), 60)
            assert "has ended (node 1 (" in str(running.error)
            with pytest.raises(Unavailable, match="node 1 of 2 has not joined within 1 seconds"):
                await tiny.ask(Generation(prompt="the", sampling=GREEDY))
            for pid in children:
                await asyncio.to_thread(eventually, lambda pid=pid: not Path(f"/proc/{pid}").exists())
            worker.start()
            while True:
                try:
                    text = (await tiny.ask(Generation(prompt="the", sampling=GREEDY))).text
                except Unavailable:
                    await asyncio.sleep(0.1)
                    continue
                break
            assert text == expected

    asyncio.run(asyncio.wait_for(kill(), 240))


def test_servers_on_two_nodes_and_a_node_0_that_is_killed(tmp_path: Path) -> None:
    """Both by the command line; node 1 has the model elsewhere, waits for a new node 0, and ends when none comes."""
    port, logs = free_port(), tmp_path
    models = [tmp_path / name for name in ("here", "there")]
    for place in models:
        llm_models.tiny_llama(place / "tiny" / "1")
        (place / "tiny" / "config.pbtxt").write_text(
            'backend: "llm"\nparameters { key: "tensor_parallel" value { string_value: "2" } }\n'
        )
    with ExitStack() as stack:
        worker = node(1, 2, port, models[1], logs / "worker", "--node-join-seconds", "20")
        worker.start()
        stack.callback(worker.stop)
        head = stack.enter_context(node(0, 2, port, models[0], logs / "head"))
        eventually(lambda: is_ready(head) and is_ready(worker), within=240)
        text = completion(head)
        head.send(signal.SIGKILL)
        head.wait()
        eventually(lambda: not is_ready(worker))
        head.start()
        eventually(lambda: is_ready(head) and is_ready(worker), within=240)
        assert completion(head) == text
        head.send(signal.SIGKILL)
        head.wait()
        assert worker.wait(100) == 2
        assert "tried for 20 seconds: start the server with --node-rank 0 there" in worker.log


def completion(server: Program) -> str:
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 9, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def can_make_networks() -> bool:
    """Whether this user may make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"headrace-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


@contextmanager
def two_networks() -> Iterator[list[str]]:
    """Two network namespaces with a link between them: 10.77.0.1 and 10.77.0.2 at link0 and link1."""
    names = [f"headrace-{os.getpid()}-{number}" for number in range(2)]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "link0", "type", "veth", "peer", "name", "link1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", f"link{number}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"link{number}", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


ASK = """
import sys, urllib.error, urllib.request
try:
    request = urllib.request.Request(sys.argv[1], sys.argv[2].encode() or None)
    print(urllib.request.urlopen(request, timeout=100).read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except urllib.error.URLError as error:
    print("none", error.reason)
"""


@pytest.mark.skipif(not can_make_networks(), reason="needs root and ip, to make network namespaces")
def test_a_node_whose_network_goes_silent_is_noticed_and_joins_again(tmp_path: Path) -> None:
    """No connection is closed: the kernel has to notice, also for those of gloo, which waits for 120 seconds."""
    models = tmp_path / "models"
    llm_models.tiny_llama(models / "tiny" / "1", max_position_embeddings=1 << 16)
    parameters = {"tensor_parallel": "2", "threads": "1"}
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    (models / "tiny" / "config.pbtxt").write_text("\n".join(['backend: "llm"', *lines]))
    with ExitStack() as stack:
        names = stack.enter_context(two_networks())
        servers = [
            Program(
                *("netns", "exec", names[number], HEADRACE, "serve", models, "--http-port", "0", "--grpc-port", "0"),
                *("--nnodes", "2", "--node-rank", str(number), "--master-addr", "10.77.0.1"),
                log=tmp_path / f"log{number}",
                command=("ip",),
                env={"HEADRACE_HANDING_KEY": KEY},
                ready="listening on",
            )
            for number in range(2)
        ]
        head = stack.enter_context(servers[0])
        worker = servers[1].start()
        stack.callback(worker.wait)
        stack.callback(worker.send, signal.SIGKILL)

        def begun(path: str, body: str = "") -> subprocess.Popen[str]:
            command = ["ip", "netns", "exec", names[0], sys.executable, "-c", ASK, f"{head.url}{path}", body]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        def asked(path: str, body: str = "") -> str:
            return begun(path, body).communicate(timeout=120)[0]

        short = json.dumps({"model": "tiny", "prompt": "the quick", "max_tokens": 9, "temperature": 0})
        long = json.dumps({"model": "tiny", "prompt": "the", "max_tokens": 20_000, "ignore_eos": True})
        eventually(lambda: asked("/v2/health/ready").strip() == "", within=240)
        answer = json.loads(asked("/v1/completions", short))["choices"]
        running = begun("/v1/completions", long)
        eventually(lambda: re.search(r"^headrace_llm_sequences_running\{.*\} 1$", asked("/metrics"), re.MULTILINE))
        subprocess.run(["ip", "-n", names[1], "link", "set", "link1", "down"], check=True)
        told = running.communicate(timeout=120)[0]
        assert told.startswith("503")
        assert "has lost this request" in told
        assert "node 1 of 2 has not joined" in asked("/v1/completions", short)
        subprocess.run(["ip", "-n", names[1], "link", "set", "link1", "up"], check=True)
        eventually(lambda: asked("/v1/completions", short).startswith("{"), within=200)
        assert json.loads(asked("/v1/completions", short))["choices"] == answer
