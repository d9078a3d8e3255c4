# SPDX-License-Identifier: Apache-2.0
"""The driver `brev`: a service is a container, named like its job, on an instance of NVIDIA Brev.

The instance is one that is there and is shared, or the service's own, which is named after its job and deleted with it.
Nothing is looked at on an instance that does not run: `brev exec` would start it, and somebody would pay for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace.core.errors import AlreadyExists, FailedPrecondition, HeadraceError, InvalidArgument, Unavailable
from headrace.platforms.brev import remote, states
from headrace.platforms.brev.cli import INSTALL, BrevCli, to_its_end
from headrace.platforms.brev.settings import TOKEN, BrevSettings
from headrace.platforms.brev.tunnels import Tunnels
from headrace.platforms.checking import check_job_id, check_spec
from headrace.platforms.commands import Completed, run_command
from headrace.platforms.contract import Check, Handle, LaunchSpec, Observed

log = logging.getLogger("headrace.launch")

T = TypeVar("T")
_RUNNING = "RUNNING"


class BrevDriver:
    """See `contract.Driver`."""

    name = "brev"

    def __init__(self, settings: BrevSettings) -> None:
        self._settings = settings
        self._cli = BrevCli(settings)
        self._tunnels = Tunnels(settings.state_dir, settings.program, settings.command_seconds)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="headrace-brev")
        self.place = f"brev:{settings.instance_id or '*'}"

    # The contract

    async def preflight(self) -> list[Check]:
        """See `contract.Driver.preflight`."""
        settings = self._settings
        there = shutil.which(settings.program) is not None
        checks = [Check("brev", there, "is installed" if there else f"is not installed: {INSTALL}")]
        checks.append(Check(TOKEN, True, "SET" if settings.token else "UNSET: not needed once brev is logged in"))
        if not there:
            return checks
        try:
            instances = await self._cli.instances()
        except HeadraceError as error:
            return [*checks, Check("login", False, error.message)]
        checks.append(Check("login", True, f"brev is logged in and lists {len(instances)} instances"))
        return [*checks, *await self._instance_checks(instances)]

    async def start(self, spec: LaunchSpec) -> Handle:
        """See `contract.Driver.start`."""
        check_spec(spec)
        nonce = secrets.token_hex(8)
        remote.line_of(remote.START, remote.create_words(spec, self._settings, nonce), nonce)
        if (await self.status(Handle(spec.job_id, self.name))).phase != "gone":
            raise _before(spec.job_id)
        instance = await self._instance_for(spec.job_id)
        shell = await self._pull(instance, spec, nonce)
        words = remote.create_words(spec, self._settings, nonce, shell)
        await to_its_end(self._create(instance, spec, words, nonce))
        data: dict[str, object] = {"instance_id": instance, "docker_url": f"http://{spec.job_id}:{_port_of(spec)}"}
        if spec.host_port is not None:
            data["host_port"] = spec.host_port
        return Handle(spec.job_id, self.name, data)

    async def status(self, handle: Handle) -> Observed:
        """See `contract.Driver.status`."""
        job_id = check_job_id(handle.job_id)
        instances = await self._cli.instances()
        instance = self._place_of(job_id, instances)
        if instance is None:
            return Observed("gone")
        own = instance == states.own_instance(job_id)
        if instances[instance] != _RUNNING:
            if own:
                return states.instance(instance, instances[instance])
            raise self._asleep(instance, instances[instance])
        look = await self._look(instance, job_id)
        if job_id in look.containers:
            return look.containers[job_id].observed
        if job_id in look.cut_short:
            return states.never_started()
        return states.instance(instance, _RUNNING) if own else Observed("gone")

    async def logs(self, handle: Handle, tail: int) -> str:
        """See `contract.Driver.logs`."""
        instance = await self._running(check_job_id(handle.job_id))
        if instance is None or tail <= 0:
            return ""
        done = await self._cli.execute(instance, remote.LOGS, [handle.job_id, str(tail)])
        return "\n".join(done.out.splitlines()[-tail:])

    async def endpoint(self, handle: Handle) -> str | None:
        """See `contract.Driver.endpoint`."""
        job_id = check_job_id(handle.job_id)
        instance = await self._running(job_id)
        if instance is None:
            return None
        seen = (await self._look(instance, job_id)).containers.get(job_id)
        if seen is None or seen.observed.phase != "running" or seen.port is None:
            return None
        if self._settings.reach == "public":
            return f"http://{await self._public_host(instance)}:{seen.port}"
        port = seen.port
        return f"http://localhost:{await self._in_thread(lambda: self._tunnels.open(job_id, instance, port))}"

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """See `contract.Driver.stop`."""
        job_id = check_job_id(handle.job_id)
        instances = await self._cli.instances()
        own = states.own_instance(job_id)
        if own in instances:
            await self._delete(own)
        elif self._settings.instance_id in instances:
            instance = self._settings.instance_id
            if instances[instance] != _RUNNING:
                raise self._asleep(instance, instances[instance])
            words = [job_id, str(max(0, math.ceil(grace_seconds)))]
            seconds = self._settings.command_seconds + grace_seconds
            _check(await to_its_end(self._cli.execute(instance, remote.STOP, words, seconds=seconds)), instance)
        await self._in_thread(lambda: self._tunnels.close(job_id))

    async def found(self) -> dict[str, Observed]:
        """See `contract.Driver.found`. One look for each instance that runs."""
        instances = await self._cli.instances()
        seen: dict[str, Observed] = {}
        for name, status in instances.items():
            job_id = states.job_of_instance(name)
            if job_id is not None:
                seen[job_id] = states.instance(name, status)
            if status == _RUNNING and (job_id is not None or name == self._settings.instance_id):
                look = await self._look(name, job_id or "")
                seen |= {each: states.never_started() for each in look.cut_short}
                seen |= {each: one.observed for each, one in look.containers.items()}
        return seen

    async def close(self) -> None:
        """See `contract.Driver.close`."""
        self._threads.shutdown(wait=False)
        self._tunnels.let_go()

    # Its steps

    async def _instance_checks(self, instances: dict[str, str]) -> list[Check]:
        settings = self._settings
        name = settings.instance_id
        can_create = bool(settings.instance_type or settings.gpu_name)
        if not name or name not in instances:
            told = f"{name or 'one for each service'} will be created" if can_create else _no_instance(name)
            return [Check("instance", can_create, told)]
        if instances[name] != _RUNNING:
            return [Check("instance", False, self._asleep(name, instances[name]).message)]
        checks = [Check("instance", True, f"{name} is running")]
        try:
            _check(await self._cli.execute(name, "docker info >/dev/null"), name)
            checks.append(Check("docker", True, f"answers on {name}"))
        except HeadraceError as error:
            checks.append(Check("docker", False, error.message))
        return checks

    async def _instance_for(self, job_id: str) -> str:
        """An instance that runs commands: the one that was chosen, or a new one."""
        instances = await self._cli.instances()
        name = self._settings.instance_id or states.own_instance(job_id)
        if instances.get(name) == _RUNNING:
            return name
        if name not in instances:
            if not (self._settings.instance_type or self._settings.gpu_name):
                raise FailedPrecondition(_no_instance(self._settings.instance_id))
            log.info("creating the Brev instance %s", name)
            await self._cli.create(name)
        elif self._settings.instance_id:
            raise self._asleep(name, instances[name])
        limit = time.monotonic() + self._settings.ready_seconds
        while True:
            status = (await self._cli.instances()).get(name, "gone")
            if status in ("FAILURE", "FAILED", "DELETING", "STOPPED"):
                raise Unavailable(f"the instance {name} is {status}; look at it with `brev ls`")
            try:
                if status == _RUNNING and (await self._cli.execute(name, "echo ok")).out.strip() == "ok":
                    return name
            except Unavailable:
                log.info("the Brev instance %s does not run commands yet", name)
            if time.monotonic() > limit:
                raise Unavailable(
                    f"the instance {name} runs no commands after {self._settings.ready_seconds:g} s: {status}"
                )
            await asyncio.sleep(self._settings.poll_seconds)

    async def _pull(self, instance: str, spec: LaunchSpec, nonce: str) -> str:
        """The shell that the image names for itself; "" of most."""
        settings = self._settings
        image = spec.container.image if spec.container else ""
        key = ""
        if settings.registry_key and image.startswith(f"{settings.registry}/"):
            key = remote.upload_name(spec.job_id, nonce, "key")
            await to_its_end(self._cli.upload(instance, settings.registry_key.encode(), key))
        words = [image, settings.registry, settings.registry_user, key]
        done = await self._cli.execute(instance, remote.PULL, words, seconds=settings.pull_seconds)
        if done.code:
            hint = f"; private images of {settings.registry} need NGC_KEY" if not key else "; is NGC_KEY the right key?"
            raise FailedPrecondition(f"the image {image} cannot be had on {instance}: {done.told}{hint}")
        return remote.shell_of(done.out)

    async def _create(self, instance: str, spec: LaunchSpec, words: list[str], nonce: str) -> None:
        packed = ""
        if spec.secret_environment:
            packed = remote.upload_name(spec.job_id, nonce, "tar")
            await self._cli.upload(instance, remote.packed(spec.secret_environment), packed)
        done = await self._cli.execute(instance, remote.START, [spec.job_id, nonce, packed, *words])
        if done.code == 0:
            return
        if "already in use" in done.err and f"/{spec.job_id}" in done.err:
            raise _before(spec.job_id)
        if "port is already allocated" in done.err or "address already in use" in done.err:
            raise FailedPrecondition(f"port {spec.host_port} of {instance} is taken: choose another host port")
        if "could not select device driver" in done.err:
            raise FailedPrecondition(f"docker on {instance} has no GPUs to give: use an instance with a GPU")
        raise FailedPrecondition(f"docker on {instance} cannot start the service: {done.told}")

    async def _delete(self, instance: str) -> None:
        await self._cli.delete(instance)
        limit = time.monotonic() + self._settings.stop_seconds
        while instance in await self._cli.instances():
            if time.monotonic() > limit:
                raise Unavailable(f"the instance {instance} is still there; look at it with `brev ls`")
            await asyncio.sleep(self._settings.poll_seconds)

    async def _look(self, instance: str, job_id: str) -> states.Look:
        return states.look_of(
            _check(await self._cli.execute(instance, remote.LOOK, [job_id, remote.FORMAT]), instance).out
        )

    async def _running(self, job_id: str) -> str | None:
        instances = await self._cli.instances()
        instance = self._place_of(job_id, instances)
        return instance if instance is not None and instances[instance] == _RUNNING else None

    def _place_of(self, job_id: str, instances: dict[str, str]) -> str | None:
        for name in (states.own_instance(job_id), self._settings.instance_id):
            if name in instances:
                return name
        return None

    async def _public_host(self, instance: str) -> str:
        if self._settings.public_host:
            return self._settings.public_host
        done = await run_command(["ssh", "-G", instance], seconds=self._settings.command_seconds)
        told = dict(line.split(" ", 1) for line in done.out.splitlines() if " " in line)
        host = told.get("hostname", instance)
        if host == instance:
            raise FailedPrecondition(
                f"ssh's configuration has no address of {instance}: run `brev refresh`, or set public_host"
            )
        return f"[{host}]" if ":" in host else host

    def _asleep(self, instance: str, status: str) -> Unavailable:
        return Unavailable(f"the instance {instance} is {status}: start it with `brev start {instance}`")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _port_of(spec: LaunchSpec) -> int:
    if spec.container is None:
        raise InvalidArgument("Brev's instances run containers: give an image and a command")
    return spec.container.port


def _before(job_id: str) -> AlreadyExists:
    return AlreadyExists(f"a service of job {job_id} was started here before")


def _no_instance(name: str) -> str:
    told = f"there is no instance {name}" if name else "no instance is chosen"
    return f"{told}: set instance_id (`brev ls` lists them), or gpu_name or instance_type to have one created"


def _check(done: Completed, instance: str) -> Completed:
    if done.code:
        raise Unavailable(f"docker on {instance} does not do what it should: {done.told}")
    return done
