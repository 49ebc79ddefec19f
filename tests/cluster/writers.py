"""A StatefulSet whose pods write lines, and the lines that each is known to have written."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from cluster import objects
from cluster.site import Failed, Site

# The script of a writer. It goes on where the log ends. A line is written after the line before it
# is on the disk. The second word is the time, in seconds since the epoch.
_SCRIPT = f"""\
cd {objects.PLACE}
n=0
[ ! -f log ] || while read -r number time; do n=$number; done < log
while n=$((n + 1)); do
    echo "$n $(date +%s)" >> log && sync log || exit 1
    sleep 1
done
"""


def start_writers(site: Site, count: int, **how: Any) -> list[str]:
    """Start a StatefulSet of so many writers; the pods' names, once all pods are ready.

    `how` is as for objects.stateful_set.
    """
    name = site.called("db")
    spec = site.spec(objects.of_claim(""), script=_SCRIPT)
    size = f"{site.size_mib}Mi"
    site.apply(
        objects.stateful_set(site.run, site.check, name, spec, count=count, size=size, **how)
    )
    pods = [f"{name}-{number}" for number in range(count)]
    for pod in pods:
        site.until(
            f"the StatefulSet makes {pod}",
            lambda: site.kubectl.find("pods", pod, site.namespace),  # noqa: B023
        )
        site.ready(pod)
    return pods


def claim_of(pod: str) -> str:
    """Return the name of the claim that the StatefulSet makes for a writer."""
    return f"{objects.TEMPLATE}-{pod}"


class Writers:
    """Pods that write, and the lines that each is known to have written."""

    def __init__(self, site: Site, names: Sequence[str]) -> None:
        self._site = site
        self._lines: dict[str, list[str]] = {name: [] for name in names}

    @property
    def names(self) -> list[str]:
        return list(self._lines)

    def read(self, pod: str) -> int:
        """Read the lines of a writer; their number.

        Raises Failed where a line that was read before is not there, Refused where the pod cannot
        be asked.
        """
        found = self._site.sh(pod, f"cat {objects.PLACE}/log 2> /dev/null || :")
        # The last line may be half written.
        lines = found[: found.rfind("\n") + 1].splitlines()
        known = self._lines[pod]
        if lines[: len(known)] != known:
            # A writer gives the number of a line that was lost to another one.
            lost = [line for line in known if line not in lines]
            raise Failed(f"{pod} had written {len(known)} lines; lost: {', '.join(lost[:3])}")
        self._lines[pod] = lines
        return len(lines)

    def lines(self, pod: str) -> Sequence[str]:
        """The lines of a writer that were read last."""
        return tuple(self._lines[pod])

    def go_on(self, least: int = 0) -> None:
        """Wait until each has written more, and at least so many lines."""
        for pod, lines in self._lines.items():
            wanted = max(least, len(lines) + 1)
            self._site.until(
                f"{pod} has written {wanted} lines",
                lambda: True if self.read(pod) >= wanted else None,  # noqa: B023
            )

    def longest_pause(self) -> int:
        """The longest time between two lines in seconds; raises Failed where a line is missing."""
        longest = 0
        for pod, lines in self._lines.items():
            words = [line.split() for line in lines]
            if [int(number) for number, _ in words] != list(range(1, len(lines) + 1)):
                raise Failed(f"the {len(lines)} lines of {pod} are not all there, or not in order")
            times = [int(time) for _, time in words]
            longest = max(longest, *(late - early for early, late in pairwise(times)))
        return longest
