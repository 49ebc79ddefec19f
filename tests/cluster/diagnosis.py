"""What a person needs who looks at a check that failed: its objects, their events, Carver's log."""

import json
from collections.abc import Iterator

from cluster.installation import container
from cluster.kubectl import SNAPSHOTS, Object, Refused, path
from cluster.site import Site

# Of each pod of Carver's, the last so many lines that name something of the check's.
_LINES = 40


def tell(site: Site, seconds: float) -> Iterator[str]:
    """Lines about what a check has made in so many seconds. Raises nothing of kubectl's."""
    kinds = ["persistentvolumeclaims", "pods"]
    kinds += [] if site.place.no_snapshots else [SNAPSHOTS]
    try:
        made = [one for it in kinds for one in site.kubectl.all(it, site.namespace, site.mine)]
    except Refused as error:
        yield f"the cluster does not tell of its objects: {error}"
        return
    for one in made:
        yield _line(one)
    yield from _events(site)
    known = {str(one["metadata"]["uid"]) for one in made}
    known |= {str(name) for one in made if (name := path(one, "spec", "volumeName"))}
    yield from _logs(site, known, seconds)


def _line(one: Object) -> str:
    """An object's state: where it is, and why its containers and conditions are as they are."""
    status = one.get("status", {})
    # A snapshot has no phase.
    phase = status.get("phase", f"ready to use: {status.get('readyToUse')}")
    words = [f"{one['kind']} {one['metadata']['name']}: {phase}"]
    words += [str(why)] if (why := path(status, "error", "message")) else []
    if (node := path(one, "spec", "nodeName") or path(one, "spec", "volumeName")) is not None:
        words.append(str(node))
    for it in status.get("containerStatuses", []):
        words += [f"{state} {json.dumps(why)}" for state, why in it.get("state", {}).items()]
    for it in status.get("conditions", []):
        if it["status"] == "False" or one["kind"] == "PersistentVolumeClaim":
            words.append(f"{it['type']}={it['status']} {it.get('message', '')}".strip())
    return ", ".join(words)


def _events(site: Site) -> Iterator[str]:
    """The events of the check's objects, by name, as every name has the check's in it."""
    try:
        found = site.kubectl.all("events", site.namespace)
    except Refused as error:
        yield f"the cluster does not tell of events: {error}"
        return
    for one in sorted(found, key=_time):
        of = one.get("involvedObject", {})
        if site.is_mine(str(of.get("name", ""))):
            times = path(one, "count") or path(one, "series", "count", default=1)
            words = (one.get("type"), one.get("reason"), of.get("kind"), of.get("name"))
            message = " ".join(str(one.get("message", "")).split())
            yield f"{' '.join(map(str, words))} ({times}x): {message}"


def _time(event: Object) -> str:
    times = ("lastTimestamp", "eventTime", "firstTimestamp")
    return next((str(event[key]) for key in times if event.get(key)), "")


def _logs(site: Site, known: set[str], seconds: float) -> Iterator[str]:
    """What Carver and its sidecars logged of the check's pods, claims, volumes and snapshots."""
    try:
        pods = site.place.pods(site.kubectl, controllers=True)
    except Refused as error:
        yield f"the cluster does not tell of Carver's pods: {error}"
        return
    for pod in pods:
        for one in _by_carver_first(pod):
            name, where = pod["metadata"]["name"], pod["metadata"]["namespace"]
            words = (f"--namespace={where}", f"--container={one}", f"--since={seconds:.0f}s")
            try:
                lines = site.kubectl("logs", name, *words).splitlines()
            except Refused as error:
                yield f"{name}/{one}: no log: {error.text}"
                continue
            of_check = [line for line in lines if any(key in line for key in known)]
            yield from (f"{name}/{one}: {line}" for line in of_check[-_LINES:])


def _by_carver_first(pod: Object) -> list[str]:
    own = str(container(pod["spec"])["name"])
    return [own, *(one["name"] for one in pod["spec"]["containers"] if one["name"] != own)]
