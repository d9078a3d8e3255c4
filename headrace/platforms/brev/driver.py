# SPDX-License-Identifier: Apache-2.0
"""The driver `brev`: a service is a container, named by its job id, on an instance of NVIDIA Brev.

The instance is a shared one, or the service's own, which is named after its job and deleted with it. A stopped instance is
never queried: `brev exec` would start it, at a cost.
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
from headrace.platforms.brev import remote_docker
from headrace.platforms.brev.cli import INSTALL, BrevCli
from headrace.platforms.brev.settings import TOKEN, BrevSettings
from headrace.platforms.brev.tunnels import Tunnels
from headrace.platforms.commands import Completed, run_command, run_to_end
from headrace.platforms.contract import Check, Handle, LaunchSpec, PlatformStatus, check_job_id, check_spec

log = logging.getLogger("headrace.launch")

T = TypeVar("T")
_RUNNING = "RUNNING"


class BrevDriver:
    """Implements `contract.Driver`."""

    name = "brev"

    def __init__(self, settings: BrevSettings) -> None:
        self._settings = settings
        self._cli = BrevCli(settings)
        self._tunnels = Tunnels(settings.state_dir, settings.program, settings.command_seconds)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="headrace-brev")
        self.place = f"brev:{settings.instance_id or '*'}"

    # The contract

    async def preflight(self) -> list[Check]:
        """Check brev, its login, the instance and its docker."""
        settings = self._settings
        installed = shutil.which(settings.program) is not None
        checks = [Check("brev", installed, "is installed" if installed else f"is not installed: {INSTALL}")]
        checks.append(Check(TOKEN, True, "SET" if settings.token else "UNSET: not needed once brev is logged in"))
        if not installed:
            return checks
        try:
            instances = await self._cli.instances()
        except HeadraceError as error:
            return [*checks, Check("login", False, error.message)]
        checks.append(Check("login", True, f"brev is logged in and lists {len(instances)} instances"))
        return [*checks, *await self._instance_checks(instances)]

    async def start(self, spec: LaunchSpec) -> Handle:
        """Pull the image and start the container on an instance; creates the instance if needed."""
        check_spec(spec)
        nonce = secrets.token_hex(8)
        remote_docker.exec_command(remote_docker.START, remote_docker.create_args(spec, self._settings, nonce), nonce)
        if (await self.status(Handle(spec.job_id, self.name))).phase != "gone":
            raise _already_started(spec.job_id)
        instance = await self._instance_for(spec.job_id)
        shell = await self._pull_image(instance, spec, nonce)
        args = remote_docker.create_args(spec, self._settings, nonce, shell)
        await run_to_end(self._start_container(instance, spec, args, nonce))
        data: dict[str, object] = {"instance_id": instance, "docker_url": f"http://{spec.job_id}:{_port_of(spec)}"}
        if spec.host_port is not None:
            data["host_port"] = spec.host_port
        return Handle(spec.job_id, self.name, data)

    async def status(self, handle: Handle) -> PlatformStatus:
        """Return the status of the container, or of an instance without one."""
        job_id = check_job_id(handle.job_id)
        instances = await self._cli.instances()
        instance = self._instance_of(job_id, instances)
        if instance is None:
            return PlatformStatus("gone")
        is_own_instance = instance == remote_docker.own_instance(job_id)
        if instances[instance] != _RUNNING:
            if is_own_instance:
                return remote_docker.instance_status(instance, instances[instance])
            raise self._not_running(instance, instances[instance])
        listing = await self._list_containers(instance, job_id)
        if job_id in listing.containers:
            return listing.containers[job_id].observed
        if job_id in listing.cut_short:
            return remote_docker.never_started()
        return remote_docker.instance_status(instance, _RUNNING) if is_own_instance else PlatformStatus("gone")

    async def logs(self, handle: Handle, tail: int) -> str:
        """Return the last lines of the container's log."""
        instance = await self._running_instance(check_job_id(handle.job_id))
        if instance is None or tail <= 0:
            return ""
        done = await self._cli.execute(instance, remote_docker.LOGS, [handle.job_id, str(tail)])
        return "\n".join(done.out.splitlines()[-tail:])

    async def endpoint(self, handle: Handle) -> str | None:
        """Return the URL of the container; opens a forwarding unless it is public."""
        job_id = check_job_id(handle.job_id)
        instance = await self._running_instance(job_id)
        if instance is None:
            return None
        container = (await self._list_containers(instance, job_id)).containers.get(job_id)
        if container is None or container.observed.phase != "running" or container.port is None:
            return None
        if self._settings.reach == "public":
            return f"http://{await self._public_host(instance)}:{container.port}"
        port = container.port
        return f"http://localhost:{await self._in_thread(lambda: self._tunnels.open(job_id, instance, port))}"

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """Remove the container, or delete the service's own instance."""
        job_id = check_job_id(handle.job_id)
        instances = await self._cli.instances()
        own_instance = remote_docker.own_instance(job_id)
        if own_instance in instances:
            await self._delete_instance(own_instance)
        elif self._settings.instance_id in instances:
            instance = self._settings.instance_id
            if instances[instance] != _RUNNING:
                raise self._not_running(instance, instances[instance])
            args = [job_id, str(max(0, math.ceil(grace_seconds)))]
            seconds = self._settings.command_seconds + grace_seconds
            _check(await run_to_end(self._cli.execute(instance, remote_docker.STOP, args, seconds=seconds)), instance)
        await self._in_thread(lambda: self._tunnels.close(job_id))

    async def list_services(self) -> dict[str, PlatformStatus]:
        """Return the status of all services, with one query per running instance."""
        instances = await self._cli.instances()
        statuses: dict[str, PlatformStatus] = {}
        for name, status in instances.items():
            job_id = remote_docker.job_of_instance(name)
            if job_id is not None:
                statuses[job_id] = remote_docker.instance_status(name, status)
            if status == _RUNNING and (job_id is not None or name == self._settings.instance_id):
                listing = await self._list_containers(name, job_id or "")
                statuses |= {job: remote_docker.never_started() for job in listing.cut_short}
                statuses |= {job: container.observed for job, container in listing.containers.items()}
        return statuses

    async def close(self) -> None:
        """Stop the threads; forwardings stay open."""
        self._threads.shutdown(wait=False)
        self._tunnels.detach()

    # Steps

    async def _instance_checks(self, instances: dict[str, str]) -> list[Check]:
        settings = self._settings
        name = settings.instance_id
        can_create = bool(settings.instance_type or settings.gpu_name)
        if not name or name not in instances:
            message = f"{name or 'one for each service'} will be created" if can_create else _no_instance(name)
            return [Check("instance", can_create, message)]
        if instances[name] != _RUNNING:
            return [Check("instance", False, self._not_running(name, instances[name]).message)]
        checks = [Check("instance", True, f"{name} is running")]
        try:
            _check(await self._cli.execute(name, "docker info >/dev/null"), name)
            checks.append(Check("docker", True, f"answers on {name}"))
        except HeadraceError as error:
            checks.append(Check("docker", False, error.message))
        return checks

    async def _instance_for(self, job_id: str) -> str:
        """Return an instance that runs commands: the configured one, or a new one."""
        instances = await self._cli.instances()
        name = self._settings.instance_id or remote_docker.own_instance(job_id)
        if instances.get(name) == _RUNNING:
            return name
        if name not in instances:
            if not (self._settings.instance_type or self._settings.gpu_name):
                raise FailedPrecondition(_no_instance(self._settings.instance_id))
            log.info("Creating Brev instance %s", name)
            await self._cli.create(name)
        elif self._settings.instance_id:
            raise self._not_running(name, instances[name])
        limit = time.monotonic() + self._settings.ready_seconds
        while True:
            status = (await self._cli.instances()).get(name, "gone")
            if status in ("FAILURE", "FAILED", "DELETING", "STOPPED"):
                raise Unavailable(f"the instance {name} is {status}; check it with `brev ls`")
            try:
                if status == _RUNNING and (await self._cli.execute(name, "echo ok")).out.strip() == "ok":
                    return name
            except Unavailable:
                log.info("Brev instance %s does not run commands yet", name)
            if time.monotonic() > limit:
                raise Unavailable(
                    f"the instance {name} runs no commands after {self._settings.ready_seconds:g} s: {status}"
                )
            await asyncio.sleep(self._settings.poll_seconds)

    async def _pull_image(self, instance: str, spec: LaunchSpec, nonce: str) -> str:
        """Pull the image; return the shell in its label, "" if it has none."""
        settings = self._settings
        image = spec.container.image if spec.container else ""
        key = ""
        if settings.registry_key and image.startswith(f"{settings.registry}/"):
            key = remote_docker.upload_name(spec.job_id, nonce, "key")
            await run_to_end(self._cli.upload(instance, settings.registry_key.encode(), key))
        args = [image, settings.registry, settings.registry_user, key]
        done = await self._cli.execute(instance, remote_docker.PULL, args, seconds=settings.pull_seconds)
        if done.code:
            hint = f"; private images of {settings.registry} need NGC_KEY" if not key else "; is NGC_KEY the right key?"
            raise FailedPrecondition(f"the image {image} cannot be pulled on {instance}: {done.error_line}{hint}")
        return remote_docker.parse_shell_label(done.out)

    async def _start_container(self, instance: str, spec: LaunchSpec, args: list[str], nonce: str) -> None:
        archive = ""
        if spec.secret_environment:
            archive = remote_docker.upload_name(spec.job_id, nonce, "tar")
            await self._cli.upload(instance, remote_docker.secrets_tar(spec.secret_environment), archive)
        done = await self._cli.execute(instance, remote_docker.START, [spec.job_id, nonce, archive, *args])
        if done.code == 0:
            return
        if "already in use" in done.err and f"/{spec.job_id}" in done.err:
            raise _already_started(spec.job_id)
        if "port is already allocated" in done.err or "address already in use" in done.err:
            raise FailedPrecondition(f"port {spec.host_port} of {instance} is taken: choose another host port")
        if "could not select device driver" in done.err:
            raise FailedPrecondition(f"docker on {instance} has no GPUs: use an instance with a GPU")
        raise FailedPrecondition(f"docker on {instance} cannot start the service: {done.error_line}")

    async def _delete_instance(self, instance: str) -> None:
        await self._cli.delete(instance)
        limit = time.monotonic() + self._settings.stop_seconds
        while instance in await self._cli.instances():
            if time.monotonic() > limit:
                raise Unavailable(f"the instance {instance} is still there; check it with `brev ls`")
            await asyncio.sleep(self._settings.poll_seconds)

    async def _list_containers(self, instance: str, job_id: str) -> remote_docker.InstanceListing:
        return remote_docker.parse_listing(
            _check(await self._cli.execute(instance, remote_docker.LIST, [job_id, remote_docker.FORMAT]), instance).out
        )

    async def _running_instance(self, job_id: str) -> str | None:
        instances = await self._cli.instances()
        instance = self._instance_of(job_id, instances)
        return instance if instance is not None and instances[instance] == _RUNNING else None

    def _instance_of(self, job_id: str, instances: dict[str, str]) -> str | None:
        for name in (remote_docker.own_instance(job_id), self._settings.instance_id):
            if name in instances:
                return name
        return None

    async def _public_host(self, instance: str) -> str:
        if self._settings.public_host:
            return self._settings.public_host
        done = await run_command(["ssh", "-G", instance], seconds=self._settings.command_seconds)
        options = dict(line.split(" ", 1) for line in done.out.splitlines() if " " in line)
        host = options.get("hostname", instance)
        if host == instance:
            raise FailedPrecondition(
                f"ssh's configuration has no address of {instance}: run `brev refresh`, or set public_host"
            )
        return f"[{host}]" if ":" in host else host

    def _not_running(self, instance: str, status: str) -> Unavailable:
        return Unavailable(f"the instance {instance} is {status}: start it with `brev start {instance}`")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _port_of(spec: LaunchSpec) -> int:
    if spec.container is None:
        raise InvalidArgument("Brev's instances run containers: give an image and a command")
    return spec.container.port


def _already_started(job_id: str) -> AlreadyExists:
    return AlreadyExists(f"a service of job {job_id} was started here before")


def _no_instance(name: str) -> str:
    problem = f"there is no instance {name}" if name else "no instance is configured"
    return f"{problem}: set instance_id (`brev ls` lists them), or gpu_name or instance_type to have one created"


def _check(done: Completed, instance: str) -> Completed:
    if done.code:
        raise Unavailable(f"docker on {instance} failed: {done.error_line}")
    return done
