"""Background work that a test waits for, or has tried again at once."""

import time
from concurrent.futures import wait
from typing import Any

from agent.daemon import server
from agent.daemon.server import Service
from agent.work.group_worker import Jobs


def ended(*every: Jobs[Any], seconds: float = 60) -> None:
    """Wait until all jobs have ended, or failed."""
    for jobs in every:
        wait([one.future for one in jobs.unfinished()], seconds)


def again(jobs: Jobs[Any]) -> None:
    """Have the jobs that failed begun anew, as a minute later."""
    failed = [one for one in jobs.unfinished() if one.future.done()]
    for one in failed:
        one.due_seconds = time.monotonic()
    for one in failed:
        worker = jobs._worker(one.key)
        if worker.jobs.get((jobs.kind, one.key)) is one:
            jobs._retry_failed(worker, one)


def resume(service: Service) -> bool:
    """Resume the work that is left in all groups; whether it could be in each."""
    every = [server.resume(service, one) for one in service.volume_groups.names]
    return all(every)


def look(service: Service, jobs: Jobs[Any]) -> int:
    """Begin all jobs of a kind that are left in all groups; how many there are."""
    return sum(map(jobs.start_due, service.volume_groups.names))
