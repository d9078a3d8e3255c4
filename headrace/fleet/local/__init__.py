# SPDX-License-Identifier: Apache-2.0
"""The local fleet: runs InferenceServices on one machine, with processes or containers where a cluster has pods.

`headrace up` runs its daemon (`programs.fleet_daemon`); the command line reaches it through `api_client`. It plans the same
documents as a cluster, plays the parts that a cluster has for the planned objects, and reports Kubernetes documents.

    settings, system         the settings; time, processes, sockets and resource usage
    object_store, events     documents, planned objects and events, on disk
    api_server, api_client   the API on a UNIX socket, and its client
    controller               plans services, reconciles their parts, updates their status
    workloads, workload_controller   replicas of Deployments and LeaderWorkerSets, and their pods
    kubelet, pod, container  all pods, one pod, one container
    pod_status, probes       the status of a pod; startup, readiness and liveness probes
    scheduler, volumes, container_command   what a container gets: cores, GPUs, ports; folders; its command line
    container_runtime        the contract of a runtime: process_runtime (with cgroups) and docker_runtime
    service_proxy, endpoints routers in front of Services, and the pods behind them
    autoscaler, scaling_targets, scaling_metrics   replicas by load
    replica_watches          long-poll requests of routers that scale from zero
    jobs, benchmark_controller   processes that run once; BenchmarkJobs
    models                   models on this machine

Everything that runs is recorded in a file before it runs: if a daemon is killed, the next one adopts it.
"""
