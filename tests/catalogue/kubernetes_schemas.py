"""JSON Schemas for the Kubernetes objects in docs/deploy/k8s: the fields that we use, closed, so that a slip shows.

Written after the API types of Kubernetes (core/v1, apps/v1), of Volcano (volcano-sh/apis, batch/v1alpha1 and the events
and actions of bus/v1alpha1) and of LeaderWorkerSet (kubernetes-sigs/lws, api/leaderworkerset/v1).
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXTS: Schema = {"type": "array", "items": TEXT}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?$"}


def closed(required: str = "", **fields: Schema) -> Schema:
    """An object with these fields and no others."""
    schema: Schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return schema | ({"required": required.split()} if required else {})


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


METADATA = closed("name", name=NAME, namespace=NAME, labels=LABELS, annotations=LABELS)
AMOUNTS: Schema = {"type": "object", "additionalProperties": QUANTITY}
KEY = closed("name key", name=NAME, key=TEXT)
VARIABLE = closed("name", name=TEXT, value=TEXT, valueFrom=closed(secretKeyRef=KEY))
PROBE = closed(
    httpGet=closed("port", path=TEXT, port=PORT),
    tcpSocket=closed("port", port=PORT),
    periodSeconds=PORT,
    initialDelaySeconds=COUNT,
    failureThreshold=PORT,
)
CONTAINER = closed(
    "name image",
    name=NAME,
    image=TEXT,
    imagePullPolicy=one_of("Always", "IfNotPresent", "Never"),
    command=TEXTS,
    args=TEXTS,
    env=many(VARIABLE),
    ports=many(closed("containerPort", containerPort=PORT, name=NAME, protocol=one_of("TCP", "UDP", "SCTP"))),
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    resources=closed(requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts=many(closed("name mountPath", name=NAME, mountPath=TEXT, readOnly={"type": "boolean"})),
)
VOLUME = closed(
    "name",
    name=NAME,
    emptyDir=closed(medium=one_of("", "Memory"), sizeLimit=QUANTITY),
    hostPath=closed("path", path=TEXT, type=TEXT),
    persistentVolumeClaim=closed("claimName", claimName=NAME, readOnly={"type": "boolean"}),
    secret=closed("secretName", secretName=NAME),
) | {"minProperties": 2, "maxProperties": 2}
POD = closed(
    "containers",
    restartPolicy=one_of("Always", "OnFailure", "Never"),
    schedulerName=TEXT,
    nodeSelector=LABELS,
    containers=many(CONTAINER),
    volumes=many(VOLUME),
    hostNetwork={"type": "boolean"},
)
TEMPLATE = closed("metadata spec", metadata=closed(labels=LABELS, annotations=LABELS), spec=POD)
SELECTOR = closed("matchLabels", matchLabels=LABELS)

ACTIONS = one_of(
    *("AbortJob", "RestartJob", "RestartTask", "RestartPod", "RestartPartition", "TerminateJob", "CompleteJob"),
    *("ResumeJob", "SyncJob", "EnqueueJob"),
)
EVENTS = one_of(
    *("*", "PodFailed", "PodEvicted", "PodPending", "PodRunning", "Unknown", "TaskCompleted", "TaskFailed"),
    *("OutOfSync", "CommandIssued", "JobUpdated", "JobUnknown"),
)
POLICY = closed("action", action=ACTIONS, event=EVENTS, events=many(EVENTS), exitCode={"type": "integer"}, timeout=TEXT)
TASK = closed(
    "name replicas template",
    name=NAME,
    replicas=COUNT,
    minAvailable=COUNT,
    template=TEMPLATE,
    policies=many(POLICY),
    topologyPolicy=one_of("none", "best-effort", "restricted", "single-numa-node"),
    maxRetry=COUNT,
)
GROUP = closed(
    "workerTemplate",
    leaderTemplate=TEMPLATE,
    workerTemplate=TEMPLATE,
    size=PORT,
    restartPolicy=one_of("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
)
SERVICE_PORT = closed("port", port=PORT, targetPort=PORT, name=NAME, protocol=one_of("TCP", "UDP", "SCTP"))

SPECS: dict[tuple[str, str], Schema] = {
    ("v1", "Service"): closed(
        "ports",
        selector=LABELS,
        ports=many(SERVICE_PORT),
        clusterIP=TEXT,
        type=one_of("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
    ),
    ("apps/v1", "Deployment"): closed("selector template", replicas=COUNT, selector=SELECTOR, template=TEMPLATE),
    ("apps/v1", "StatefulSet"): closed(
        "selector template serviceName", replicas=COUNT, selector=SELECTOR, template=TEMPLATE, serviceName=NAME
    ),
    ("batch.volcano.sh/v1alpha1", "Job"): closed(
        "tasks",
        minAvailable=COUNT,
        schedulerName=TEXT,
        queue=TEXT,
        tasks=many(TASK),
        policies=many(POLICY),
        plugins={"type": "object", "additionalProperties": TEXTS},
        maxRetry=COUNT,
        ttlSecondsAfterFinished=COUNT,
        priorityClassName=TEXT,
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): closed(
        "leaderWorkerTemplate",
        replicas=COUNT,
        leaderWorkerTemplate=GROUP,
        startupPolicy=one_of("LeaderCreated", "LeaderReady"),
    ),
}


def schema_of(api_version: str, kind: str) -> Schema:
    """The schema of a document; KeyError for a kind that we do not use."""
    same: dict[str, Schema] = {"apiVersion": {"const": api_version}, "kind": {"const": kind}, "metadata": METADATA}
    if (api_version, kind) == ("v1", "Secret"):
        return closed("apiVersion kind metadata", **same, type=TEXT, stringData=LABELS)
    return closed("apiVersion kind metadata spec", **same, spec=SPECS[api_version, kind])
