# SPDX-License-Identifier: Apache-2.0
"""Two revisions without Knative: who gets which share, promotion, rollback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_cases import facts, live, names, one, service

from headrace.fleet.planning import Plan, plan

GATEWAY = {"disable_ingress_creation": False, "enable_gateway_api": True, "ingress_gateway": "infra/public"}


def engine(image: str, percent: int | None = None, **more: Any) -> dict[str, Any]:
    made = {"minReplicas": 4, "maxReplicas": 8, "runner": {"name": "ome-container", "image": image}, **more}
    return made if percent is None else {**made, "canaryTrafficPercent": percent}


def asked(image: str, percent: int | None = None, runtime: str = "plain", **more: Any) -> dict[str, Any]:
    return service({"engine": engine(image, percent), **more}, runtime=runtime)


def image_of(made: Plan, name: str) -> str:
    spec = one(made, "Deployment", name)["spec"]
    found: str = spec["template"]["spec"]["containers"][0]["image"]
    return found


def shares(made: Plan) -> list[str]:
    config = json.loads(one(made, "ConfigMap", "chat-front")["data"]["router.yaml"])
    found = [each.partition("//")[2].partition(",revision=")[0] for each in config["backends"]]
    return [each.replace(".default.svc.cluster.local:9000", "") for each in found]


def test_the_first_revision_is_alone() -> None:
    made = plan(asked("engine:1", 10), facts())
    assert made.rollouts["engine"].state == "single"
    assert "Deployment/chat-engine-canary" not in names(made)


def test_a_second_revision_by_our_router() -> None:
    first = plan(asked("engine:1"), facts())
    made = plan(asked("engine:2", 25), facts(), live(first))
    assert made.rollouts["engine"].state == "canary"
    assert image_of(made, "chat-engine") == "engine:1"
    assert image_of(made, "chat-engine-canary") == "engine:2"
    canary = one(made, "Deployment", "chat-engine-canary")
    assert canary["spec"]["selector"] == {"matchLabels": {"app": "chat-engine-canary"}}
    assert one(made, "Service", "chat-engine-canary")["spec"]["selector"] == {"app": "chat-engine-canary"}
    scaler = one(made, "HorizontalPodAutoscaler", "chat-engine-canary")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (1, 2)
    # Nobody is sent to pods that do not answer yet, nor to a front that does not.
    assert shares(made) == ["chat-engine,weight=100"]
    assert one(made, "Service", "chat")["spec"]["selector"] == {"app": "chat-engine"}

    ready = plan(asked("engine:2", 25), facts(), live(made))
    assert shares(ready) == ["chat-engine,weight=75", "chat-engine-canary,weight=25"]
    entry = one(ready, "Service", "chat")["spec"]
    assert entry["selector"] == {"app": "chat-front"}
    assert entry["ports"][0]["port"] == 9000
    assert entry["ports"][0]["targetPort"] == 8080
    again = plan(asked("engine:2", 25), facts(), live(ready))
    assert again.objects == ready.objects


def test_the_kept_pods_are_those_that_run() -> None:
    first = plan(asked("engine:1"), facts())
    made = plan(asked("engine:2", 25), facts(), live(first))
    before, after = (one(each, "Deployment", "chat-engine") for each in (first, made))
    assert before["spec"]["template"] == after["spec"]["template"]
    assert before["metadata"]["labels"]["ome.io/revision"] == after["metadata"]["labels"]["ome.io/revision"]


def test_a_second_revision_by_a_gateway() -> None:
    cluster = facts(**GATEWAY)
    first = plan(asked("engine:1"), cluster)
    [backend] = one(first, "HTTPRoute", "chat")["spec"]["rules"][0]["backendRefs"]
    assert (backend["name"], backend["port"], backend["weight"]) == ("chat-engine", 9000, 100)
    made = plan(asked("engine:2", 30), cluster, live(plan(asked("engine:2", 30), cluster, live(first))))
    assert "Deployment/chat-front" not in names(made)
    for name in ("chat", "chat-engine"):
        route = one(made, "HTTPRoute", name)["spec"]
        assert [(each["name"], each["weight"]) for each in route["rules"][0]["backendRefs"]] == [
            ("chat-engine", 70),
            ("chat-engine-canary", 30),
        ]
        assert route["parentRefs"][0]["namespace"] == "infra"
    assert one(made, "Service", "chat")["spec"]["selector"] == {"app": "chat-engine"}


@pytest.mark.parametrize("percent", [None, 100])
def test_promotion_keeps_the_canary_until_the_pods_are_all_new(percent: int | None) -> None:
    first = plan(asked("engine:1"), facts())
    begun = live(plan(asked("engine:2", 40), facts(), live(first)))
    running = live(plan(asked("engine:2", 40), facts(), begun))
    promoted = plan(asked("engine:2", percent), facts(), running)
    assert promoted.rollouts["engine"].state == "promoting"
    assert image_of(promoted, "chat-engine") == image_of(promoted, "chat-engine-canary") == "engine:2"
    assert shares(promoted) == ["chat-engine,weight=60", "chat-engine-canary,weight=40"]

    rolling = plan(asked("engine:2", percent), facts(), live(promoted, ready="chat-engine-canary chat-front"))
    assert rolling.rollouts["engine"].state == "promoting"
    assert shares(rolling) == ["chat-engine-canary,weight=100"]
    # Nobody goes before the front has heard that there is nothing more for them.
    draining = plan(asked("engine:2", percent), facts(), live(promoted))
    assert shares(draining) == ["chat-engine,weight=100"]
    assert one(draining, "Deployment", "chat-engine-canary")["spec"]["replicas"] == 2
    late = plan(asked("engine:2", percent), facts(), live(draining, ready="chat-engine chat-engine-canary"))
    assert names(late) == names(draining)
    done = plan(asked("engine:2", percent), facts(), live(draining))
    assert names(done) == names(first)
    assert image_of(done, "chat-engine") == "engine:2"
    assert done.rollouts["engine"].state == "single"


OLD_AND_NEW = (
    # The old pods are still as many as wanted, and the surge pod of the new template loads its model.
    {"replicas": 5, "updatedReplicas": 1, "availableReplicas": 4},
    {"replicas": 5, "updatedReplicas": 4, "availableReplicas": 4},
    {"replicas": 4, "updatedReplicas": 4, "availableReplicas": 3},
    {"replicas": 4, "updatedReplicas": 4, "availableReplicas": 4, "observedGeneration": 1},
)


@pytest.mark.parametrize("status", OLD_AND_NEW)
def test_promotion_does_not_end_while_old_pods_serve(status: dict[str, int]) -> None:
    first = plan(asked("engine:1"), facts())
    begun = live(plan(asked("engine:2", 40), facts(), live(first)))
    running = live(plan(asked("engine:2", 40), facts(), begun))
    promoted = plan(asked("engine:2"), facts(), running)
    seen = live(promoted, replicas=4, generation=2)
    seen["Deployment/chat-engine"]["status"] = {"observedGeneration": 2, **status}
    rolling = plan(asked("engine:2"), facts(), seen)
    assert rolling.rollouts["engine"].state == "promoting"
    assert shares(rolling) == ["chat-engine,weight=60", "chat-engine-canary,weight=40"]
    assert one(rolling, "Service", "chat")["spec"]["selector"] == {"app": "chat-front"}
    assert "Deployment/chat-engine-canary" in names(rolling)


def test_promotion_with_one_replica_and_a_surge_pod_does_not_end() -> None:
    """As many pods are updated, and as many available, as are wanted: but they are not the same pods."""

    def single(image: str, percent: int | None = None) -> dict[str, Any]:
        return service({"engine": engine(image, percent, minReplicas=1, maxReplicas=1)})

    running = live(plan(single("engine:1"), facts()), replicas=1)
    for _ in range(2):
        running = live(plan(single("engine:2", 50), facts(), running), replicas=1)
    seen = live(plan(single("engine:2"), facts(), running), replicas=1)
    seen["Deployment/chat-engine"]["status"] |= {"replicas": 2, "updatedReplicas": 1, "availableReplicas": 1}
    rolling = plan(single("engine:2"), facts(), seen)
    assert shares(rolling) == ["chat-engine,weight=50", "chat-engine-canary,weight=50"]
    seen["Deployment/chat-engine"]["status"] |= {"replicas": 1}
    assert shares(plan(single("engine:2"), facts(), seen)) == ["chat-engine,weight=100"]


def test_the_share_stays_while_the_last_old_pods_come_and_go() -> None:
    first = plan(asked("engine:1"), facts())
    begun = live(plan(asked("engine:2", 40), facts(), live(first)))
    running = live(plan(asked("engine:2", 40), facts(), begun))
    promoted = plan(asked("engine:2"), facts(), running)
    alone = plan(asked("engine:2"), facts(), live(promoted, ready="chat-engine-canary chat-front"))
    assert shares(alone) == ["chat-engine-canary,weight=100"]
    seen = live(alone, replicas=4)
    seen["Deployment/chat-engine"]["status"] |= {"replicas": 4, "updatedReplicas": 4, "availableReplicas": 1}
    assert shares(plan(asked("engine:2"), facts(), seen)) == ["chat-engine-canary,weight=100"]


def test_rollback_by_writing_what_was_there() -> None:
    first = plan(asked("engine:1"), facts())
    running = live(plan(asked("engine:2", 40), facts(), live(first)))
    back = plan(asked("engine:1", 40), facts(), running)
    assert back.objects == first.objects


def test_rollback_by_zero_percent() -> None:
    first = plan(asked("engine:1"), facts())
    running = live(plan(asked("engine:2", 40), facts(), live(first)))
    back = plan(asked("engine:2", 0), facts(), running)
    assert image_of(back, "chat-engine") == "engine:1"
    assert shares(back) == ["chat-engine,weight=100"]
    assert one(back, "Deployment", "chat-engine-canary")["spec"]["replicas"] == 0


def test_zero_percent_with_tags_keeps_a_pod_to_try() -> None:
    first = plan(asked("engine:1"), facts())
    second = asked("engine:2", 0)
    second["metadata"]["annotations"] = {"ome.io/enable-tag-routing": "true"}
    made = plan(second, facts(), live(first))
    assert one(made, "Deployment", "chat-engine-canary")["spec"]["replicas"] == 1


def test_labels_and_replicas_make_no_revision() -> None:
    first = plan(asked("engine:1", 10), facts())
    more = service({"engine": {**engine("engine:1", 10), "minReplicas": 1, "labels": {"team": "b"}}})
    assert plan(more, facts(), live(first)).rollouts["engine"].state == "single"


def test_without_a_percentage_pods_are_replaced_in_place() -> None:
    first = plan(asked("engine:1"), facts())
    made = plan(asked("engine:2"), facts(), live(first))
    assert names(made) == names(first)
    assert image_of(made, "chat-engine") == "engine:2"


def test_behind_a_router_the_share_is_that_of_the_pods() -> None:
    first = plan(asked("engine:1", router={}, runtime="routed"), facts())
    made = plan(asked("engine:2", 20, router={}, runtime="routed"), facts(), live(first, replicas=8))
    assert one(made, "Deployment", "chat-engine-canary")["spec"]["replicas"] == 2
    assert "Deployment/chat-front" not in names(made)
    [note] = made.notes
    assert "chat-engine" in note


def test_our_router_is_configured_with_both_revisions() -> None:
    first = plan(asked("engine:1", router={}), facts())
    begun = live(plan(asked("engine:2", 20, router={}), facts(), live(first)))
    made = plan(asked("engine:2", 20, router={}), facts(), begun)
    args = one(made, "Deployment", "chat-router")["spec"]["template"]["spec"]["containers"][0]["args"]
    rollout = made.rollouts["engine"]
    assert f"http://chat-engine.default.svc.cluster.local:9000,weight=80,revision={rollout.stable}" in args
    assert f"http://chat-engine-canary.default.svc.cluster.local:9000,weight=20,revision={rollout.latest}" in args
    assert made.counted == {"engine"}


def test_groups_have_two_revisions_too() -> None:
    def group(size: int, percent: int | None) -> dict[str, Any]:
        spec: dict[str, Any] = {"minReplicas": 2, "maxReplicas": 4, "worker": {"size": size}}
        if percent is not None:
            spec["canaryTrafficPercent"] = percent
        return service({"engine": spec}, runtime="groups")

    first = plan(group(2, None), facts())
    made = plan(group(3, 50), facts(), live(first))
    stable, canary = (one(made, "LeaderWorkerSet", f"lws-chat-engine{end}")["spec"] for end in ("", "-canary"))
    assert stable["leaderWorkerTemplate"]["size"] == 3
    assert canary["leaderWorkerTemplate"]["size"] == 4
    assert canary["replicas"] == 2
    selector = one(made, "Service", "chat-engine-canary")["spec"]["selector"]
    assert selector == {"app": "chat-engine-canary", "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    ready = plan(group(3, 50), facts(), live(made))
    assert shares(ready) == ["chat-engine,weight=50", "chat-engine-canary,weight=50"]


def test_what_never_answered_is_not_kept() -> None:
    first = plan(asked("engine:broken"), facts())
    fixed = asked("engine:2", 10)
    fixed["status"] = {"components": {"engine": {"latestCreatedRevision": "chat-engine-00001"}}}
    made = plan(fixed, facts(), live(first, ready="nobody"))
    assert made.rollouts["engine"].state == "single"
    assert image_of(made, "chat-engine") == "engine:2"
    fixed["status"]["components"]["engine"]["latestRolledoutRevision"] = "chat-engine-00001"
    assert plan(fixed, facts(), live(first, ready="nobody")).rollouts["engine"].state == "canary"


def test_our_router_reads_the_file(tmp_path: Path) -> None:
    from headrace.cli.router_settings import router_settings

    first = plan(asked("engine:1"), facts())
    second = service({"engine": engine("engine:2", 25, timeoutSeconds=90)})
    made = plan(second, facts(), live(plan(second, facts(), live(first))))
    (tmp_path / "router.yaml").write_text(one(made, "ConfigMap", "chat-front")["data"]["router.yaml"])
    settings = router_settings({}, str(tmp_path / "router.yaml"))
    assert [(each.host.partition(".")[0], each.weight) for each in settings.router.backends] == [
        ("chat-engine", 75),
        ("chat-engine-canary", 25),
    ]
    assert settings.router.timeouts.response_seconds == 90
    assert settings.router.policy == "weighted"
