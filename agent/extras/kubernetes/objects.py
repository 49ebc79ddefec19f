"""A client of the Kubernetes API, for complete lists and for single objects.

Lists are only read, single objects are read and changed.

Each request has a time limit of its own. It ends earlier if the thread in which it runs has a
shorter one (`command.time_limit`).
"""

import http.client
import json
import logging
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import sleep
from typing import Any
from urllib.parse import urlencode

from agent.core import errors
from agent.extras.kubernetes.access import Connection, Server, TooLong, Unproved
from mount import command
from mount.text import counted

_log = logging.getLogger(__name__)

# Paths in the API of the lists of Nodes and of PersistentVolumes, which are in no namespace.
NODES, VOLUMES = "/api/v1/nodes", "/api/v1/persistentvolumes"
# Paths in the API of the lists of VolumeSnapshotContents and of VolumeGroupSnapshotContents, which
# are in no namespace.
CONTENTS = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents"
GROUP_CONTENTS = "/apis/groupsnapshot.storage.k8s.io/v1/volumegroupsnapshotcontents"
# Maximum number of objects in a page of a list, and of pods in a page; and the factor by which
# pages become smaller if one was too large. A page is parsed as a whole, and users may make an
# object as large as the API server accepts, 1.5 MB. Pods are listed for many calls at once, so
# their pages are smaller.
_PAGE_ITEMS, _PAGE_PODS, _FEWER = 500, 20, 16
# Kind of a list of objects without their spec and status (kubernetes.io/docs/reference/using-api:
# "Alternate representations of resources").
_METADATA = "PartialObjectMetadataList"
# Value of the header Accept that asks for a list of metadata alone.
_AS_METADATA = f"application/json;as={_METADATA};g=meta.k8s.io;v=v1"
# Time limit, in seconds, of one wait for a part of the API server's answer.
_SILENCE_SECONDS = 10.0
# Time limit, in seconds, of one list with all its pages and retries.
_LIST_SECONDS = 120.0
# Maximum number of attempts to read a list or an object; changes are not retried. A list is read
# again from its start, for instance if the API server restarted or an answer was cut off.
_ATTEMPTS = 3
# Seconds until the first retry of a list; each further retry waits longer by as much.
_PAUSE_SECONDS = 2.0
# Exceptions of a failed request. A read is retried after them.
_PROBLEMS = (OSError, http.client.HTTPException, Unproved)


@dataclass(frozen=True)
class Listing:
    """All objects of a list as they were at one moment.

    `version` names that moment (metadata.resourceVersion). It is empty if the API server does not
    know the list.
    """

    items: Sequence[Mapping[str, Any]]
    version: str


# Type of a function that gets an object of the API, and returns the part of it that is kept in
# memory.
Keep = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def _all(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return item


def _labels(item: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = item["metadata"]
    kept_metadata = {
        "name": metadata["name"],
        "uid": metadata["uid"],
        "labels": metadata.get("labels") or {},
    }
    return {"metadata": kept_metadata}


# Annotations of pods and claims that are kept in memory. Their values are names of nodes and
# drivers, and a UID.
_READ_ANNOTATIONS = (
    "volume.kubernetes.io/selected-node",
    "volume.kubernetes.io/storage-provisioner",
    "volume.beta.kubernetes.io/storage-provisioner",
    "kubernetes.io/config.hash",
)


def _selected_entries(source: Any, *keys: str) -> dict[str, Any]:
    """Return the entries of a JSON object with these keys; without long texts.

    A text is long if it has more characters than a name in the API may have.
    """
    table = source if isinstance(source, dict) else {}
    entries = {key: table[key] for key in keys if key in table}
    return {
        key: value
        for key, value in entries.items()
        if not isinstance(value, str) or len(value) <= _MOST_NAME
    }


def _about(item: Mapping[str, Any]) -> dict[str, Any]:
    kept_metadata = _selected_entries(
        item["metadata"], "name", "namespace", "uid", "deletionTimestamp"
    )
    return {
        **kept_metadata,
        "annotations": _selected_entries(item["metadata"].get("annotations"), *_READ_ANNOTATIONS),
    }


def _pod(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    spec, status = (_selected_entries(pod.get(key), *keys) for key, keys in _READ_OF_PODS.items())
    spec["volumes"] = [
        {
            **_selected_entries(volume, "name"),
            **({"ephemeral": {}} if "ephemeral" in volume else {}),
            "persistentVolumeClaim": _selected_entries(
                volume.get("persistentVolumeClaim"), "claimName"
            ),
        }
        for volume in spec.get("volumes") or ()
        if "ephemeral" in volume or volume.get("persistentVolumeClaim")
    ]
    if "volumeHealth" in status:
        status["volumeHealth"] = bool(status["volumeHealth"])
    return {"metadata": _about(pod), "spec": spec, "status": status}


def _claim(claim: Mapping[str, Any]) -> Mapping[str, Any]:
    spec, status = (
        _selected_entries(claim.get("spec"), "volumeName"),
        _selected_entries(claim.get("status"), "phase"),
    )
    return {"metadata": _about(claim), "spec": spec, "status": status}


# Fields of a pod's spec and status that are kept in memory.
_READ_OF_PODS = {"spec": ("nodeName", "volumes"), "status": ("phase", "volumeHealth")}
# Functions that return the part of an object that is kept in memory, by the kind of the list. They
# are for objects that users make, which may be large.
_OF_USERS: Mapping[str, Keep] = {"PodList": _pod, "PersistentVolumeClaimList": _claim}


@dataclass(frozen=True)
class _Question:
    """A request to the API server for a list of objects."""

    # The kind of the list, such as NodeList.
    kind: str
    # Query parameters in the URL of the request.
    query: Mapping[str, str]
    # Function that returns the part of an object that is kept in memory.
    keep: Keep
    headers: Mapping[str, str] = field(default_factory=dict)
    # Whether a list that the API server does not know (404) counts as empty.
    if_served: bool = False


class Lists:
    """Reads complete lists of objects from one API server, by GET only."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def whole(
        self,
        path: str,
        kind: str,
        *,
        keep: Keep | None = None,
        if_served: bool = False,
        **query: str,
    ) -> Listing:
        """Read a complete list, such as /api/v1/nodes of the kind NodeList.

        Of each object, only what `keep` returns is kept in memory. By default that is the whole
        object, but of pods and claims only what Carver reads, as users may make them large. With
        `if_served`, a list that the API server does not know is empty. `query` are parameters in
        the URL, such as fieldSelector.

        Raises ClusterSilent if the API server refuses, or if the list could not be read completely
        after several attempts.
        """
        reduce_object = keep or _OF_USERS.get(kind, _all)
        return self._whole(path, _Question(kind, query, reduce_object, if_served=if_served))

    def metadata(self, path: str, **query: str) -> Listing:
        """Read the names, UIDs and labels of all objects of a list, without their specs.

        Raises ClusterSilent as `whole` does.
        """
        return self._whole(path, _Question(_METADATA, query, _labels, {"Accept": _AS_METADATA}))

    def nodes(self) -> Listing:
        """Read the names, UIDs and labels of all Nodes.

        Raises ClusterSilent as `whole` does, and also if there is no Node. Carver's own pod is on a
        Node. So an API server without any Node has lost its data, or is another cluster's, and its
        answer must not make any Node count as deleted.
        """
        listing = self.metadata(NODES)
        if not listing.items:
            raise errors.ClusterSilent(self._where(NODES), "it has no Node, not even Carver's own")
        return listing

    def _whole(self, path: str, question: "_Question") -> Listing:
        deadline = time.monotonic() + command.patience_seconds(_LIST_SECONDS)
        problem = ""
        page_size = _PAGE_PODS if question.kind == "PodList" else _PAGE_ITEMS
        for attempt in range(_ATTEMPTS):
            if attempt:
                sleep(command.patience_seconds(_PAUSE_SECONDS * attempt))
            try:
                return self._read(path, question, deadline, min(page_size, _PAGE_ITEMS))
            except _PROBLEMS as error:
                problem = _problem_of(error)
                if isinstance(error, TooLong):
                    page_size = max(1, page_size // _FEWER)
                if isinstance(error, ssl.SSLCertVerificationError) or time.monotonic() >= deadline:
                    break
        raise errors.ClusterSilent(self._where(path), problem)

    def _read(self, path: str, question: "_Question", deadline: float, page_size: int) -> Listing:
        """Read all pages of a list over one connection, without a retry.

        Raises Unproved, OSError or HTTPException if a retry may succeed, ClusterSilent if not.
        """
        items: dict[str, Mapping[str, Any]] = {}
        version, token = "", ""
        with Connection(self._server, _SILENCE_SECONDS) as connection:
            while True:
                query = {**question.query, "limit": str(page_size)}
                if token:
                    query["continue"] = token
                url = f"{path}?{urlencode(query)}"
                status, body = connection.request("GET", url, deadline, content=question.headers)
                if status == http.client.NOT_FOUND and question.if_served:
                    return Listing((), "")
                if status != http.client.OK:
                    self._refuse(path, status)
                page = _Page.of(body, question.kind)
                if version not in ("", page.version):
                    raise Unproved(f"its pages have two versions, {version} and {page.version}")
                version = page.version
                for item in page.items:
                    uid = item["metadata"]["uid"]
                    if uid in items:
                        raise Unproved(f"it has an object twice, {item['metadata']['name']}")
                    items[uid] = question.keep(item)
                if not page.token:
                    if page.remaining:
                        raise Unproved(f"it ended with {counted(page.remaining, 'object')} to come")
                    return Listing(tuple(items.values()), version)
                if not page.items or page.token == token:
                    raise Unproved("it goes on without an end")
                token = page.token

    def _refuse(self, path: str, status: int) -> None:
        """Raise the error for a list that the API server answered with another status than 200.

        Raises Unproved if a retry may succeed, ClusterSilent if not.
        """
        if status == http.client.GONE:
            raise Unproved("its pages expired while they were read (410)")
        if _is_transient(status):
            raise Unproved(f"it answers {status}")
        problem = f"it answers {status}"
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            problem += "; allow this account to list them (docs/operations.md)"
        raise errors.ClusterSilent(self._where(path), problem, is_refusal=_is_final(status))

    def _where(self, path: str) -> str:
        return f"{self._server.host}:{self._server.port}{self._server.path}{path}"


def _is_transient(status: int) -> bool:
    """Return whether an HTTP status means that the same request may succeed later."""
    return status == http.client.TOO_MANY_REQUESTS or status >= http.client.INTERNAL_SERVER_ERROR


def _is_final(status: int) -> bool:
    """Return whether an HTTP status means that the API server refuses a request for good.

    An object or a right is then missing. The status 401 is not final: the API server does not know
    who asks, for instance while it starts, or while this account's token is renewed. Its answer
    then proves nothing about objects or rights.
    """
    return not _is_transient(status) and status != http.client.UNAUTHORIZED


@dataclass(frozen=True)
class _Page:
    """One checked page of a list.

    `token` leads to the next page, and is empty on the last page. `remaining` is the number of
    objects on further pages, if the API server gives it, else 0.
    """

    items: Sequence[Mapping[str, Any]]
    version: str
    token: str
    remaining: int

    @classmethod
    def of(cls, body: bytes, kind: str) -> "_Page":
        try:
            page = json.loads(body)
        except ValueError:
            raise Unproved("its answer is not whole JSON") from None
        if not isinstance(page, dict) or page.get("kind") != kind:
            raise Unproved(f"its answer is no {kind}")
        metadata, items = page.get("metadata"), page.get("items")
        if kind == _METADATA and "items" in page and items is None:
            # Accept null for an empty list of metadata alone: an API server writes it so
            # (k8s.io/apiserver v0.36.3, pkg/endpoints/handlers/response.go,
            # asPartialObjectMetadataList).
            items = []
        if not isinstance(metadata, dict) or not isinstance(items, list):
            raise Unproved(f"its {kind} has no metadata, or no items")
        version, token = metadata.get("resourceVersion"), metadata.get("continue") or ""
        # Refuse the version 0, which is that of a cache in the API server that was never filled.
        if not isinstance(version, str) or version in ("", "0") or not isinstance(token, str):
            raise Unproved(f"its {kind} has no version")
        remaining = metadata.get("remainingItemCount") or 0
        if not isinstance(remaining, int) or not all(map(_is_object, items)):
            raise Unproved(f"its {kind} has malformed objects")
        return cls(items, version, token, remaining)


def _is_object(item: object) -> bool:
    metadata = item.get("metadata") if isinstance(item, dict) else None
    if not isinstance(metadata, dict):
        return False
    return all(isinstance(metadata.get(key), str) and metadata[key] for key in ("name", "uid"))


# Type of an object as the API server sent it. It is never changed in place.
Object = Mapping[str, Any]
# Time limit of one request about a single object, in seconds.
_SECONDS = 15.0
# Seconds until a read of a single object is retried.
_OBJECT_PAUSE_SECONDS = 1.0
_JSON = {"Content-Type": "application/json"}
# Header of a request that merges a change into an object. In such a change, null removes a field
# (RFC 7386).
_MERGE_PATCH = {"Content-Type": "application/merge-patch+json"}
# The API server's word for a refusal to create an object in a namespace that is being deleted (type
# NamespaceTerminatingCause of k8s.io/api/core/v1).
NAMESPACE_TERMINATING = "NamespaceTerminating"
# Maximum number of characters of the API server's message that an error shows.
_MOST_CHARACTERS = 1000
# Pattern of the names of cluster-wide objects, and their maximum number of characters
# (apimachinery, IsDNS1123Subdomain).
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN, _MOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*"), 253


class Objects:
    """Reads and changes single objects of one API server.

    All methods wait for the API server, and raise ClusterRefused if it refuses or does not answer.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def find(self, path: str, kind: str) -> Object | None:
        """Return the object at a path; None if the API server says that it does not exist.

        The request is retried if the API server does not answer, or may answer otherwise later.
        """
        problem, is_refusal = "", False
        for attempt in range(_ATTEMPTS):
            if attempt:
                sleep(command.patience_seconds(_OBJECT_PAUSE_SECONDS))
            try:
                status, answer = self._ask("GET", path)
            except _PROBLEMS as error:
                problem = _problem_of(error)
                continue
            if status == http.client.NOT_FOUND and answer.get("reason") == "NotFound":
                return None
            if status == http.client.OK and answer.get("kind") == kind:
                return answer
            problem, is_refusal = _refusal(status, answer), _is_final(status)
            if not _is_transient(status):
                break
        raise errors.ClusterRefused("GET", path, problem, is_refusal=is_refusal)

    def create(self, path: str, new_object: Object, *, is_trial: bool = False) -> None:
        """Create an object in the list at a path; a trial is only checked, and creates nothing.

        If an object of that name exists, ClusterRefused has the reason AlreadyExists. It has the
        reason NAMESPACE_TERMINATING if the object's namespace is being deleted, and NotFound if
        there is no such namespace.
        """
        self._write("POST", path + _trial(is_trial), new_object, _JSON)

    def review(self, path: str, review: Object) -> Object:
        """Send a review, such as a SubjectAccessReview, and return the API server's answer."""
        return self._write("POST", path, review, _JSON)

    def change(self, path: str, change: Object, version: str, *, is_trial: bool = False) -> None:
        """Merge a change into an object that still has this resourceVersion.

        A trial is only checked, and changes nothing. If the object has another version,
        ClusterRefused is raised.
        """
        metadata = {**change.get("metadata", {}), "resourceVersion": version}
        self.merge(path + _trial(is_trial), {**change, "metadata": metadata})

    def merge(self, path: str, change: Object) -> None:
        """Merge a change into an object, whatever its version."""
        self._write("PATCH", path, change, _MERGE_PATCH)

    def replace(self, path: str, new_object: Object) -> None:
        """Replace an object that still has the resourceVersion that the new one has.

        If the object has another version, ClusterRefused has the reason Conflict.
        """
        self._write("PUT", path, new_object, _JSON)

    def delete(self, path: str, uid: str, *, is_trial: bool = False) -> None:
        """Request the deletion of an object that has this UID; a trial is only checked.

        If the object has another UID, ClusterRefused is raised. An object with finalizers exists
        until they were removed.
        """
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        if is_trial:
            # The API server ignores the query if there is a body (apiserver, handlers/delete.go).
            body["dryRun"] = ["All"]
        self._write("DELETE", path, body, _JSON)

    def _write(self, method: str, path: str, body: Object, content: Mapping[str, str]) -> Object:
        try:
            status, answer = self._ask(method, path, json.dumps(body).encode(), content)
        except _PROBLEMS as error:
            problem = f"{_problem_of(error)}; it may have been done"
            raise errors.ClusterRefused(method, path, problem) from None
        if not http.client.OK <= status < http.client.MULTIPLE_CHOICES:
            reason = _reason(answer)
            problem, is_refusal = _refusal(status, answer), _is_final(status)
            raise errors.ClusterRefused(method, path, problem, reason, is_refusal=is_refusal)
        return answer

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        with Connection(self._server, _SECONDS) as connection:
            deadline = time.monotonic() + command.patience_seconds(_SECONDS)
            status, content_bytes = connection.request(method, path, deadline, body, content)
        try:
            answer = json.loads(content_bytes)
        except ValueError:
            raise Unproved(f"it answers {status}, without JSON") from None
        if not isinstance(answer, dict):
            raise Unproved(f"it answers {status}, without an object")
        return status, answer


def _trial(is_trial: bool) -> str:
    return "?dryRun=All" if is_trial else ""


def find_named(objects: Objects, collection: str, name: str, kind: str) -> Object | None:
    """Return the object of that name in a list; None if there is none, or for an invalid name.

    The name may come from a node, so it becomes a part of a path only if it is valid: the API
    server refuses other names, and a caller such as HealthEvents stops its round after a few
    refusals. Raises ClusterRefused as `Objects.find` does.
    """
    if len(name) > _MOST_NAME or not _SUBDOMAIN.fullmatch(name):
        return None
    return objects.find(f"{collection}/{name}", kind)


def claims_of(pod: Object) -> Iterator[str]:
    """Yield the names of the claims that a pod uses, also of those for its ephemeral volumes.

    Nothing is yielded for a pod that has ended (phase Succeeded or Failed).
    """
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return
    for volume in (pod.get("spec") or {}).get("volumes") or ():
        if "ephemeral" in volume:
            yield f"{pod['metadata']['name']}-{volume['name']}"
        elif reference := volume.get("persistentVolumeClaim"):
            yield str(reference.get("claimName"))


def _problem_of(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, Unproved):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _reason(answer: Object) -> str:
    """Return the API's word for a refusal; empty if it gave none.

    That a namespace is being deleted is only a cause of a refusal whose reason is Forbidden.
    """
    if any(cause.get("reason") == NAMESPACE_TERMINATING for cause in _causes(answer)):
        return NAMESPACE_TERMINATING
    return str(answer.get("reason") or "")


def _causes(answer: Object) -> Sequence[Object]:
    """Return the causes of a refusal (apimachinery, StatusDetails); none if it gives none."""
    details = answer.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    return [one for one in causes if isinstance(one, dict)] if isinstance(causes, list) else []


def _refusal(status: int, answer: Object) -> str:
    """Return what a refusal says, with its causes.

    The name of a disruption budget that refuses an eviction is in a cause alone.
    """
    texts = [answer.get("message"), *(cause.get("message") for cause in _causes(answer))]
    message = " ".join(dict.fromkeys(str(text) for text in texts if text))[:_MOST_CHARACTERS]
    return f"it answers {status}: {message}".rstrip(": ")
