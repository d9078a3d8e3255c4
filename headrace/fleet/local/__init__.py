# SPDX-License-Identifier: Apache-2.0
"""The fleet of one machine: the same documents, the same plan, and processes or containers where a cluster has pods.

`headrace up` runs `program`, a small daemon; the verbs reach it through `client`. It plays the parts that a cluster has for
the objects of a plan, and shows what it sees as Kubernetes documents, so that `fleet.status` tells the same of it.

    settings      where it is and how patient
    system        the time, processes and sockets of the operating system
    store         documents on disk, one file each
    commands      pure: a container as a command line and variables of this machine
    volumes       the folders and files that a container finds
    limits        pure: what a container may use
    starting      these together: what to run for a container of a pod
    machine       what a pod needs of this machine: cores, memory, GPUs, ports
    models        models on this machine, brought once
    jobs          one Job: a process that runs once; `once` waits for its end
    benchmarking  BenchmarkJobs: their Jobs, and how they are
    driving       the contract of what runs containers
    process_driver  one of two: processes, held to their limits by `cgroups`, or by `watching` them
    priority      who gets the CPU: those that answer, before one that starts to take their place
    processes     a process that outlives the daemon and is found again; `child` are its first lines
    docker_driver   the other: a Docker engine; `docker_words` are what it is told
    probes        whether a container has started, is ready, lives
    contract      what a pod is, and what it needs of the rest
    container     one container: start, probes, restarts, end
    replica       one pod: room, its containers in their order
    kubelet       all pods
    workloads     pure: which pods of a Deployment or a LeaderWorkerSet to make and which to end, and its status
    units         makes and ends them
    sight         pure: a pod's status as Kubernetes tells it
    routing       the routers in front of Services, and the file that says who is ready
    routes        which Services need one, and who stands behind each
    asking        a page of a process of this machine
    scaling       replicas by load: another number of them, and why
    stepping      what routers counted, for services whose rollouts go by steps
    objects       the live objects of a service
    controller    plan, bring about, tell
    questions     routers that wait for another number of replicas
    events        what happened, the last of it
    control       the UNIX socket of the daemon
    client        the other side of it: `client.contract.Fleet`
    program       puts these together

Everything that runs is known by a file before it runs: whatever is killed in between, the next daemon finds it. May not live
here: what a service should be (`planning`), what its status says (`status`), and the verbs (`cli`).
"""
