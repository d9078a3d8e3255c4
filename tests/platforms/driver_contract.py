# SPDX-License-Identifier: Apache-2.0
"""What every driver must do, whatever its platform: subclass `DriverContract` in a `test_<platform>_contract.py`.

    from driver_contract import DriverContract, command

    class TestDocker(DriverContract):
        @pytest.fixture(autouse=True)
        def platform(self, ...): self.engine = ...
        async def driver(self): return DockerDriver(...)
        def spec(self, job_id, program="serve", words=(), environment=..., secret_environment=...): return LaunchSpec(...)
        async def kill_behind_its_back(self, handle): ...
        async def existing_resources(self): return {...}

`command(program, words)` is the line for `Container.command`: the stand-in service, in Python's own library alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from contract_helpers import HERE, NOTHING, PROGRAM, Watch, command, hostile

from headrace.core.errors import AlreadyExists, HeadraceError, InvalidArgument
from headrace.platforms.contract import Driver, Handle, LaunchSpec, Mount, PlatformStatus
from support.ports import free_port
from support.waiting import eventually_async

__all__ = ["HERE", "NOTHING", "PROGRAM", "DriverContract", "Watch", "command", "free_port", "hostile"]


_LONGEST_PAUSE_SECONDS = 0.3
"""Between two looks: each is a program or more on most platforms, and takes time from what it looks at."""


class DriverContract:
    """The suite. Each test makes its driver inside of its own event loop."""

    patience = 120.0
    """Seconds until a platform must have done what was asked."""
    grace = 5.0
    cancel_after: Sequence[float] = (0.0, 0.01, 0.05, 0.2, 0.6)
    """When starts are cut short."""
    quick_tests: Collection[str] | None = None
    """The tests that are not slow on this platform; None for all."""

    # What a subclass gives

    async def driver(self) -> Driver:
        """A driver of the same platform: what one started, the next finds."""
        raise NotImplementedError

    def spec(
        self,
        job_id: str,
        program: str = "serve",
        words: Sequence[str] = (),
        environment: Mapping[str, str] = NOTHING,
        secret_environment: Mapping[str, str] = NOTHING,
    ) -> LaunchSpec:
        """What to start; `program` as in `contract_program.main`."""
        raise NotImplementedError

    async def kill_behind_its_back(self, handle: Handle) -> None:
        """End the service as a stranger would: kill -9, `docker kill`, `scancel`."""
        raise NotImplementedError

    async def existing_resources(self) -> set[str]:
        """All that the platform has, named: equal before and after."""
        raise NotImplementedError

    async def visible_text(self, handle: Handle) -> str:
        """All that the platform shows of a service to whoever may look: `docker inspect`, manifests, `scontrol show`."""
        return ""

    # The suite

    def test_a_service_is_started_reached_and_stopped_without_a_trace(self) -> None:
        async def main(driver: Driver) -> None:
            assert all(check.passed for check in await driver.preflight()), await driver.preflight()
            job_id = str(uuid.uuid4())
            wanted = self.spec(job_id, words=("one", "two words"), environment={"MODE": "x y"})
            handle = await driver.start(wanted)
            assert (handle.job_id, handle.driver) == (job_id, driver.name)
            json.dumps(dict(handle.data))
            answer = await self.answer(driver, handle)
            assert answer["words"] == ["one", "two words"] and answer["environ"]["MODE"] == "x y"
            observed = await driver.status(handle)
            assert (observed.phase, observed.pod_phase) == ("running", "Running") and observed.name
            assert await driver.status(Handle(job_id, driver.name)) == observed
            assert (await driver.list_services())[job_id].phase == "running"
            await self.logged(driver, handle, "serving", 50)
            assert len((await driver.logs(handle, 1)).splitlines()) <= 1
            with pytest.raises(AlreadyExists):
                await driver.start(wanted)
            assert (await self.answer(driver, handle))["pid"] == answer["pid"]
            await driver.stop(handle, self.grace)
            await self.is_gone(driver, handle)
            await driver.stop(handle, self.grace)
            await self.is_gone(driver, handle)

        self.run(main)

    def test_three_concurrent_services(self) -> None:
        async def main(driver: Driver) -> None:
            ids = [str(uuid.uuid4()) for _ in range(3)]
            handles = await asyncio.gather(*(driver.start(self.spec(job_id, words=(job_id,))) for job_id in ids))
            received = await asyncio.gather(*(self.answer(driver, handle) for handle in handles))
            assert [item["words"] for item in received] == [[job_id] for job_id in ids]
            urls = await asyncio.gather(*(driver.endpoint(handle) for handle in handles))
            assert len(set(urls)) == 3
            result = await driver.list_services()
            assert {result[job_id].phase for job_id in ids} == {"running"}
            await driver.stop(handles[1], self.grace)
            await self.is_gone(driver, handles[1])
            assert (await self.answer(driver, handles[0]))["words"] == [ids[0]]
            assert (await self.answer(driver, handles[2]))["words"] == [ids[2]]
            await asyncio.gather(*(driver.stop(handle, self.grace) for handle in handles))

        self.run(main)

    def test_two_starts_of_one_job_give_one_service(self) -> None:
        async def main(driver: Driver) -> None:
            job_id = str(uuid.uuid4())
            other = await self.driver()
            both = await asyncio.gather(
                driver.start(self.spec(job_id)), other.start(self.spec(job_id)), return_exceptions=True
            )
            handles = [item for item in both if isinstance(item, Handle)]
            assert len(handles) == 1 and any(isinstance(item, AlreadyExists) for item in both), both
            await self.answer(driver, handles[0])
            await asyncio.gather(driver.stop(handles[0], self.grace), other.stop(handles[0], self.grace))
            await self.is_gone(driver, handles[0])
            await other.close()

        self.run(main)

    def test_an_exited_service_is_reported_with_its_code_and_its_log(self) -> None:
        async def main(driver: Driver) -> None:
            failed, finished = await asyncio.gather(
                driver.start(self.spec(str(uuid.uuid4()), "fail")),
                driver.start(self.spec(str(uuid.uuid4()), "finish")),
            )
            observed = await self.phase(driver, failed, "ended")
            assert (observed.pod_phase, observed.exit_code) == ("Failed", 3) and observed.reason, observed
            await self.logged(driver, failed, "the reason why", 100)
            assert await driver.endpoint(failed) is None
            observed = await self.phase(driver, finished, "ended")
            assert (observed.pod_phase, observed.exit_code) == ("Succeeded", 0), observed
            result = await driver.list_services()
            assert (result[failed.job_id].pod_phase, result[finished.job_id].pod_phase) == ("Failed", "Succeeded")
            for handle in (failed, finished):
                await driver.stop(handle, self.grace)
                await self.is_gone(driver, handle)

        self.run(main)

    def test_an_externally_killed_service_is_reported(self) -> None:
        async def main(driver: Driver) -> None:
            killed, kept = await asyncio.gather(*(driver.start(self.spec(str(uuid.uuid4()))) for _ in range(2)))
            await self.answer(driver, killed)
            await self.answer(driver, kept)
            await self.kill_behind_its_back(killed)
            observed = await self.phase(driver, killed, "ended", "gone")
            assert observed.phase == "gone" or (observed.pod_phase == "Failed" and observed.reason), observed
            assert await driver.endpoint(killed) is None
            assert (await driver.status(kept)).phase == "running"
            await self.answer(driver, kept)
            await asyncio.gather(*(driver.stop(handle, self.grace) for handle in (killed, kept)))

        self.run(main)

    def test_the_stubborn_are_ended_when_the_grace_is_over(self) -> None:
        async def main(driver: Driver) -> None:
            handle = await driver.start(self.spec(str(uuid.uuid4()), "stubborn"))
            await self.answer(driver, handle)
            began = time.monotonic()
            await driver.stop(handle, 1.0)
            assert time.monotonic() - began < self.patience
            await self.is_gone(driver, handle)

        self.run(main)

    def test_a_start_cut_short_leaves_nothing_or_is_found(self) -> None:
        async def main(driver: Driver) -> None:
            before = await self.existing_resources()
            for seconds in self.cancel_after:
                job_id = str(uuid.uuid4())
                task = asyncio.create_task(driver.start(self.spec(job_id)))
                await asyncio.sleep(seconds)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

                async def known(job_id: str = job_id) -> bool:
                    return job_id in await driver.list_services() or await self.existing_resources() == before

                await self.until(known, f"cancelled after {seconds} s: neither found nor gone")
                handle = Handle(job_id, driver.name)
                # A program that has not come to listen to SIGTERM yet would be waited for.
                await driver.stop(handle, 0.5)
                await self.is_gone(driver, handle)

        self.run(main)

    def test_a_service_outlives_its_driver_and_the_next_finds_it_by_id_alone(self) -> None:
        async def main(driver: Driver) -> None:
            first = await self.driver()
            handle = Handle((await first.start(self.spec(str(uuid.uuid4())))).job_id, driver.name)
            pid = (await self.answer(first, handle))["pid"]
            await first.close()
            await first.close()
            assert driver.place == first.place
            assert (await driver.list_services())[handle.job_id].phase == "running"
            assert (await driver.status(handle)).phase == "running"
            assert (await self.answer(driver, handle))["pid"] == pid
            await self.logged(driver, handle, "serving", 10)
            with pytest.raises(AlreadyExists):
                await driver.start(self.spec(handle.job_id))
            await driver.stop(handle, self.grace)
            await self.is_gone(driver, handle)

        self.run(main)

    def test_secrets_arrive_and_are_visible_nowhere(self) -> None:
        async def main(driver: Driver) -> None:
            secret = "hf_" + uuid.uuid4().hex
            wanted = self.spec(
                str(uuid.uuid4()),
                environment={"MODE": "x"},
                secret_environment={"HF_TOKEN": secret, "TAO_API_KEY": secret},
            )
            assert secret not in repr(wanted)
            with Watch(secret) as watch:
                handle = await driver.start(wanted)
                answer = await self.answer(driver, handle)
                observed = await driver.status(handle)
                log = await driver.logs(handle, 1000)
                shown = await self.visible_text(handle)
                url = await driver.endpoint(handle)
                await driver.stop(handle, self.grace)
            assert (answer["environ"]["HF_TOKEN"], answer["environ"]["TAO_API_KEY"]) == (secret, secret)
            assert not watch.seen, "on a command line"
            for item in (repr(handle), json.dumps(dict(handle.data)), repr(observed), log, str(url)):
                assert secret not in item
            assert secret not in shown, "the platform shows it"

        self.run(main)

    def test_hostile_texts_arrive_as_they_are_or_are_refused(self, tmp_path: Path) -> None:
        canary = tmp_path / "canary"
        texts = hostile(canary)

        async def arrive(driver: Driver, texts: list[str]) -> None:
            plain = {f"PLAIN_{number}": text for number, text in enumerate(texts)}
            private = {f"PRIVATE_{number}": text for number, text in enumerate(texts)}
            job_id = str(uuid.uuid4())
            handle = await driver.start(self.spec(job_id, "serve", texts, plain, private))
            answer = await self.answer(driver, handle)
            assert answer["words"] == texts
            got = answer["environ"]
            assert {name: got.get(name) for name in plain} == plain
            assert {name: got.get(name) for name in private} == private
            await driver.stop(handle, self.grace)

        async def main(driver: Driver) -> None:
            try:
                await arrive(driver, texts)
            except InvalidArgument:
                for text in texts:
                    with contextlib.suppress(InvalidArgument):
                        await arrive(driver, [text])
            assert not canary.exists()

        self.run(main)

    def test_what_cannot_arrive_is_refused_before_anything_runs(self, tmp_path: Path) -> None:
        canary = tmp_path / "canary"

        async def main(driver: Driver) -> None:
            before = await self.existing_resources()
            fine = self.spec(str(uuid.uuid4()))
            bad = [dataclasses.replace(fine, environment={"ZERO": "a\0b"})]
            bad += [dataclasses.replace(fine, secret_environment={"ZERO": "a\0b"})]
            for name in ("", "A B", "A=B", "1A", "A\nB", f"$(touch {canary})", f"A;touch {canary};", "--env", "Ä"):
                bad.append(dataclasses.replace(fine, environment={name: "x"}))
                bad.append(dataclasses.replace(fine, secret_environment={name: "x"}))
            for spec in bad:
                with pytest.raises(InvalidArgument):
                    await driver.start(spec)
                    raise AssertionError(f"not refused: {dict(spec.environment)!r} {dict(spec.secret_environment)!r}")
            assert await self.existing_resources() == before
            assert not canary.exists()

        self.run(main)

    def test_hostile_images_labels_and_mounts_do_no_harm(self, tmp_path: Path) -> None:
        canary = tmp_path / "canary"

        async def main(driver: Driver) -> None:
            fine = self.spec(str(uuid.uuid4()))
            if fine.container is None:
                return
            box = fine.container

            async def tried(spec: LaunchSpec) -> None:
                job_id = str(uuid.uuid4())
                # Told as an error of ours, or started: an image may be looked for only when it is run.
                with contextlib.suppress(HeadraceError):
                    await driver.start(dataclasses.replace(spec, job_id=job_id))
                await driver.stop(Handle(job_id, driver.name), 0.5)

            for text in (f"x; touch {canary}", f"--privileged $(touch {canary})", f"-v/:/x\ntouch {canary}"):
                specs = (
                    dataclasses.replace(fine, container=dataclasses.replace(box, image=text)),
                    dataclasses.replace(fine, container=dataclasses.replace(box, mounts=(Mount("/tmp", "/" + text),))),
                    dataclasses.replace(fine, container=dataclasses.replace(box, mounts=(Mount("/" + text, "/in"),))),
                    dataclasses.replace(fine, labels={"org": text, text: "x"}),
                )
                await asyncio.gather(*map(tried, specs))
            assert not canary.exists()

        self.run(main)

    def test_a_service_never_started_is_gone(self) -> None:
        async def main(driver: Driver) -> None:
            handle = Handle(str(uuid.uuid4()), driver.name)
            await self.is_gone(driver, handle)
            await driver.stop(handle, self.grace)
            await self.is_gone(driver, handle)

        self.run(main)

    def test_an_id_that_is_not_a_uuid_reaches_nothing(self) -> None:
        async def main(driver: Driver) -> None:
            for bad in ("", "..", "../../etc", "a/b", "x\0y", "-h", "$(id)", "a b", "all", "A" * 36):
                handle = Handle(bad, driver.name)
                for call in (
                    driver.status(handle),
                    driver.logs(handle, 10),
                    driver.endpoint(handle),
                    driver.stop(handle, self.grace),
                    driver.start(self.spec(bad)),
                ):
                    with pytest.raises(InvalidArgument):
                        await call
                        raise AssertionError(f"not refused: {bad!r}")

        self.run(main)

    # Means

    def run(self, main: Callable[[Driver], Awaitable[None]]) -> None:
        """Run a test with a driver; what the platform holds afterwards is what it held before."""

        async def whole() -> None:
            before = await self.existing_resources()
            driver = await self.driver()
            try:
                await main(driver)
            finally:
                await driver.close()

            async def same() -> bool:
                return await self.existing_resources() == before

            await self.until(same, "left behind or missing")

        asyncio.run(whole())

    async def answer(self, driver: Driver, handle: Handle) -> Any:
        """What the service says over HTTP, as soon as it does."""
        url = None

        async def answered() -> Any:
            # Its address does not change while it starts, and looking for it costs the machine more than asking there.
            nonlocal url
            url = url or await driver.endpoint(handle)
            if url is None:
                return None
            try:
                return await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(url, timeout=5)))
            except (OSError, ValueError):
                return None

        try:
            return await eventually_async(answered, within=self.patience, longest_pause=_LONGEST_PAUSE_SECONDS)
        except AssertionError as error:
            error.add_note(f"{await driver.status(handle)}; log: {await driver.logs(handle, 100)}")
            raise

    async def phase(self, driver: Driver, handle: Handle, *wanted: str) -> PlatformStatus:
        """How it is, as soon as its phase is one of those."""

        async def there() -> bool:
            return (await driver.status(handle)).phase in wanted

        await self.until(there, f"never {wanted}")
        return await driver.status(handle)

    async def logged(self, driver: Driver, handle: Handle, text: str, tail: int) -> None:
        """Its log has a text, as soon as the platform shows it: a service's answer may be quicker than what it said."""

        async def there() -> bool:
            return text in await driver.logs(handle, tail)

        await self.until(there, f"never {text!r} in the log")

    async def is_gone(self, driver: Driver, handle: Handle) -> None:
        """Nothing of it is known any more."""
        assert (await driver.status(handle)).phase == "gone"
        assert await driver.endpoint(handle) is None
        assert await driver.logs(handle, 10) == ""
        assert handle.job_id not in await driver.list_services()

    async def until(self, look: Callable[[], Awaitable[bool]], told: str) -> None:
        """Look until it is so, for as long as the platform may take."""
        await eventually_async(look, within=self.patience, message=told, longest_pause=_LONGEST_PAUSE_SECONDS)
