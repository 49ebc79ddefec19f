"""What a service has in memory, and what the programs have that it keeps open."""

from dataclasses import dataclass
from typing import Self

import psutil


@dataclass(frozen=True)
class Resident:
    """In bytes; the sessions are the shells of lvm2, and whatever else it started and has still."""

    service_bytes: int
    sessions_bytes: int

    @classmethod
    def of(cls, service: psutil.Process) -> Self:
        sessions = 0
        for one in service.children(recursive=True):
            try:
                sessions += one.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return cls(service.memory_info().rss, sessions)

    @property
    def all_bytes(self) -> int:
        return self.service_bytes + self.sessions_bytes
