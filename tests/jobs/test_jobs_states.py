# SPDX-License-Identifier: Apache-2.0
"""The state machine under random sequences: gateways that are killed at any step, services that die.

The platform is `FakeDriver`, which outlives its gateways; the database is real. After every sequence a fresh gateway
reconciles, and then records and platform must say the same.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from jobs_tools import FakeDriver, GatewayKilled, model_file, silent

from headrace.core.clock import ManualClock
from headrace.core.errors import HeadraceError, NotFound
from headrace.jobs.records import SERVICE, TRANSITIONS, Job
from headrace.jobs.service import JobService
from headrace.jobs.settings import JobSettings
from headrace.platforms.contract import LaunchSpec

PLACES = st.sampled_from(["", "", "start", "started", "stop", "stopped"])
ANY = st.integers(0, 7)


class Gateways(RuleBasedStateMachine):
    """Two gateways on one database and one platform."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-states-"))
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.driver = FakeDriver()
        self.gateways = [self.open(), self.open()]
        model = str(model_file(self.folder))
        _, self.parent = self.do(self.gateways[0].register("org", "u", model, "arch"))
        self.ids: list[str] = []

    def open(self) -> JobService:
        settings = JobSettings(self.folder / "data", lease_seconds=0.05)
        service: JobService = self.do(JobService.open(settings, self.driver, clock=self.clock, fetch_status=silent))
        leases = service.store.leases
        release = leases.release

        async def unless_dead(job_id: str, owner: str) -> None:
            if not self.driver.gateway_is_dead:
                await release(job_id, owner)

        leases.release = unless_dead  # type: ignore[method-assign]
        return service

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def act(self, which: int, dies_at: str, work: Any) -> Any:
        """Let a gateway do something, in the course of which it may be killed and another one take its place."""
        self.driver.killed_at = dies_at
        try:
            return self.do(work)
        except GatewayKilled:
            self.do(self.gateways[which].store.close())
            self.driver.gateway_is_dead = False
            # A dead gateway's leases run out. (A dead process's would be seen at once.)
            self.clock.advance(1.0)
            self.gateways[which] = self.open()
        except HeadraceError:
            pass
        finally:
            self.driver.killed_at = ""
            self.driver.gateway_is_dead = False
        return None

    def records(self) -> list[Job]:
        result = self.do(self.gateways[0].list_jobs("org", action=SERVICE)).jobs
        self.ids = [job.id for job in result]
        return list(result)

    def some(self, number: int) -> str:
        return self.ids[number % len(self.ids)]

    @rule(which=st.integers(0, 1), dies_at=PLACES)
    def start(self, which: int, dies_at: str) -> None:
        gateway = self.gateways[which]
        job = self.act(which, dies_at, gateway.start("org", "u", self.parent.experiment_id, self.parent.id, {}))
        self.records()
        assert job is None or job.status == "Running"

    @precondition(lambda self: self.ids)
    @rule(which=st.integers(0, 1), dies_at=PLACES, number=ANY)
    def stop(self, which: int, dies_at: str, number: int) -> None:
        job_id = self.some(number)
        done = self.act(which, dies_at, self.gateways[which].stop("org", "u", None, job_id))
        if done is not None:
            assert done.is_final and job_id not in self.driver.running and job_id not in self.driver.ended

    @precondition(lambda self: self.ids)
    @rule(number=ANY)
    def crash(self, number: int) -> None:
        self.driver.crash(self.some(number))

    @precondition(lambda self: self.ids)
    @rule(number=ANY)
    def vanish(self, number: int) -> None:
        self.driver.running.pop(self.some(number), None)

    @rule()
    def stray(self) -> None:
        job_id = f"00000000-0000-4000-8000-{len(self.driver.running):012d}"
        self.driver.running[job_id] = LaunchSpec(job_id, "", ())

    @precondition(lambda self: self.ids)
    @rule(which=st.integers(0, 1), number=ANY)
    def ask(self, which: int, number: int) -> None:
        job_id = self.some(number)
        try:
            answer = self.do(self.gateways[which].status("org", None, job_id))
        except NotFound:
            assert self.do(self.gateways[which].get_job("org", job_id)).stopped_on is not None
        else:
            assert (answer.body["pod_status"] == "Running") <= (job_id in self.driver.running)

    @rule(which=st.integers(0, 1), dies_at=PLACES)
    def reconcile(self, which: int, dies_at: str) -> None:
        self.act(which, dies_at, self.gateways[which].reconcile())

    @invariant()
    def records_tell_their_story(self) -> None:
        for job in self.records():
            events = self.do(self.gateways[0].job_events("org", job.id))
            assert events[-1].status == job.status and events[0].status == "Pending"
            for before, after in zip(events, events[1:], strict=False):
                assert after.status == before.status or after.status in TRANSITIONS[before.status]
                assert after.time >= before.time and after.reason
            # What is Done has ended: nobody may be told of a stop that did not happen.
            assert job.status != "Done" or job.id not in self.driver.running

    def teardown(self) -> None:
        self.clock.advance(1.0)
        for _ in range(2):
            self.do(self.gateways[1].reconcile())
        records = {job.id: job for job in self.records()}
        assert set(self.driver.running) == {job.id for job in records.values() if job.status == "Running"}
        assert not self.driver.ended
        assert {job.status for job in records.values()} <= {"Running", "Done", "Error"}
        for gateway in self.gateways:
            self.do(gateway.close())
        self.loop.close()
        shutil.rmtree(self.folder)


TestGateways = Gateways.TestCase
TestGateways.settings = settings(
    max_examples=10, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestGateways.pytestmark = [pytest.mark.timeout(300)]


def test_a_fake_with_false_states_is_caught(tmp_path: Path) -> None:
    """The check after each sequence can fail: a driver that does not stop what it says leaves a record that is not true."""
    machine = Gateways()
    job = machine.do(machine.gateways[0].start("org", "u", machine.parent.experiment_id, machine.parent.id, {}))
    spec = machine.driver.running[job.id]
    machine.do(machine.gateways[0].stop("org", "u", None, job.id))
    machine.driver.running[job.id] = spec
    with pytest.raises(AssertionError):
        machine.records_tell_their_story()
    machine.teardown()  # and reconcile ends it
