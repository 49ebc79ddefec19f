"""What the chart lets the controller's account do, as the API server decides it."""

from pathlib import Path

import manifest

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


class Rights:
    """The rules of the committed manifest for its controller."""

    def __init__(self) -> None:
        path = KUBERNETES / "container-lvm2.yaml"
        [deployment] = manifest.of_kind(path, "Deployment")
        account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
        self._rules = [
            (kind, rule)
            for kind in ("ClusterRole", "Role")
            for binding in manifest.of_kind(path, f"{kind}Binding")
            if account in {one["name"] for one in binding["subjects"]}
            for role in manifest.of_kind(path, kind)
            if role["metadata"]["name"] == binding["roleRef"]["name"]
            for rule in role["rules"]
        ]

    def allow(self, method: str, path: str) -> bool:
        """Whether a request is allowed; one in a namespace is in the controller's."""
        _, api, *parts = path.split("/")
        group = "" if api == "api" else parts.pop(0)
        place = parts[1:]
        is_namespaced = place[0] == "namespaces"
        resource, *name = place[2:] if is_namespaced else place
        verb = _VERBS.get(method) or ("get" if name else "list")
        return any(
            group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and (kind == "ClusterRole" or is_namespaced)
            and ("resourceNames" not in rule or bool(set(name) & set(rule["resourceNames"])))
            for kind, rule in self._rules
        )
