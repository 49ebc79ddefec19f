"""kubectl: the one program that the checks run. Its answers are objects, its failures errors."""

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

SNAPSHOTS = "volumesnapshots.snapshot.storage.k8s.io"
CONTENTS = "volumesnapshotcontents.snapshot.storage.k8s.io"
SNAPSHOT_CLASSES = "volumesnapshotclasses.snapshot.storage.k8s.io"
GROUP_SNAPSHOTS = "volumegroupsnapshots.groupsnapshot.storage.k8s.io"
GROUP_CLASSES = "volumegroupsnapshotclasses.groupsnapshot.storage.k8s.io"
ATTRIBUTES = "volumeattributesclasses.storage.k8s.io"

# How long one kubectl may take where the caller does not say otherwise, in seconds.
USUAL_SECONDS = 60
# The reasons (k8s.io/apimachinery, meta/v1 StatusReason) for which to ask again is of no use.
_FINAL = frozenset(
    {"NotFound", "Forbidden", "Unauthorized", "Invalid", "BadRequest"}
    | {"AlreadyExists", "MethodNotAllowed", "Gone"}
)
# What kubectl says where the answer may be another in a moment, and has no reason for it.
_PASSING = re.compile(
    r"Unable to connect|connection (to the server .* was )?refused|connection reset|timed? ?out"
    r"|TLS handshake|unexpected EOF|http2: |leader changed|currently unable|too many requests"
    r"|error dialing backend|no endpoints available",
    re.IGNORECASE,
)

# How a review is asked for. kubectl does not validate it: for that it lists the cluster's CRDs,
# which an account without rights may not do.
_REVIEW = ("create", "--validate=false", "--filename=-", "--output=json")


@dataclass(frozen=True)
class Answer:
    """How one kubectl ended; 124 as its code is a time limit, as timeout(1) has it."""

    code: int
    out: str
    err: str


Execute = Callable[[Sequence[str], str, float], Answer]


def execute(words: Sequence[str], stdin: str, seconds: float) -> Answer:
    """Run a program with a time limit; raises FileNotFoundError where there is none."""
    try:
        ended = subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            # What is on a raw block device is anything.
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"timed out after {seconds:.0f} s")
    return Answer(ended.returncode, ended.stdout, ended.stderr)


class Refused(Exception):
    """kubectl failed, or the cluster refused what it asked for."""

    def __init__(self, words: Sequence[str], answer: Answer) -> None:
        lines = [line.strip() for line in answer.err.splitlines() if line.strip()]
        # With exec, what the program in the container said stands before this.
        if len(lines) > 1 and lines[-1].startswith("command terminated"):
            del lines[-1]
        self.text = lines[-1] if lines else f"exit code {answer.code}"
        found = re.search(r"Error from server \((\w+)\)", answer.err)
        self.reason = found[1] if found else ""
        # A refusal without a reason is kubectl's own: a flag that it does not know, say.
        named = bool(self.reason) and self.reason not in _FINAL
        self.passing = self.reason not in _FINAL and (named or bool(_PASSING.search(answer.err)))
        super().__init__(f"kubectl {' '.join(words[:3])}: {self.text}")


class Kubectl:
    """kubectl, with the configuration that KUBECONFIG names."""

    def __init__(self, run: Execute = execute) -> None:
        self._run = run

    def __call__(self, *words: str, stdin: str = "", seconds: float = USUAL_SECONDS) -> str:
        """What kubectl prints; raises Refused."""
        answer = self._run(("kubectl", *words), stdin, seconds)
        if answer.code:
            raise Refused(words, answer)
        return answer.out

    def find(self, kind: str, name: str, namespace: str = "") -> Object | None:
        """An object, or None where there is no such one."""
        words = [*_scope(namespace), "--output=json", "--ignore-not-found"]
        out = self("get", kind, name, *words)
        return dict(json.loads(out)) if out.strip() else None

    def all(self, kind: str, namespace: str = "", selector: str = "") -> list[Object]:
        """The objects of a kind: of a namespace, or of the cluster."""
        words = _scope(namespace) if namespace else ["--all-namespaces"]
        chosen = [f"--selector={selector}"] if selector else []
        return list(json.loads(self("get", kind, *words, *chosen, "--output=json"))["items"])

    def apply(self, *objects: Object) -> None:
        """Make objects, or make them as they are given."""
        given = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self("apply", "--filename=-", stdin=json.dumps(given))

    def may(self, verb: str, resource: str, namespace: str, account: str) -> bool:
        """Whether a service account may do something to a resource of the cluster's."""
        user = f"system:serviceaccount:{namespace}:{account}"
        everyone = "system:serviceaccounts"
        groups = [everyone, f"{everyone}:{namespace}", "system:authenticated"]
        attributes = {"verb": verb, "resource": resource}
        asked = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
        }
        review = self(*_REVIEW, stdin=json.dumps(asked))
        return path(json.loads(review), "status", "allowed") is True

    def rules(self, namespace: str, account: str, where: str) -> set[str]:
        """What a service account may do in a namespace and in the cluster: each rule as JSON."""
        asked = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": where},
        }
        account_words = f"--as=system:serviceaccount:{namespace}:{account}"
        review = self(*_REVIEW, account_words, stdin=json.dumps(asked))
        status = json.loads(review)["status"]
        kinds = ("resourceRules", "nonResourceRules")
        return {json.dumps(one, sort_keys=True) for it in kinds for one in status.get(it) or []}

    def patch(self, kind: str, name: str, change: Object, namespace: str = "") -> None:
        words = ("--type=merge", f"--patch={json.dumps(change)}")
        self("patch", kind, name, *_scope(namespace), *words)

    def delete(self, kind: str, *names: str, namespace: str = "", selector: str = "") -> None:
        """Ask for the end of objects, and do not wait for it. What is not there is no mistake."""
        chosen = [f"--selector={selector}"] if selector else names
        self("delete", kind, *chosen, *_scope(namespace), "--wait=false", "--ignore-not-found")

    def inside(self, namespace: str, pod: str, container: str, *words: str) -> str:
        """What a command prints within a container."""
        where = (f"--namespace={namespace}", pod, f"--container={container}")
        return self("exec", *where, "--", *words)


def _scope(namespace: str) -> list[str]:
    return [f"--namespace={namespace}"] if namespace else []


def path(one: Object | None, *keys: str | int, default: Any = None) -> Any:
    """What is at the end of a path into an object, or the default where the path breaks off."""
    found: Any = one
    for key in keys:
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            return default
    return found
