"""The process of the service in a thread of the test, with its pages."""

import http.client
import signal
import threading
from queue import SimpleQueue
from typing import Any

import expect
import pytest
from fakes.host import FakeHost
from serving import machine

from agent.core import errors
from agent.daemon import service_process
from agent.daemon.monitor import Monitor
from agent.daemon.server import Service
from agent.settings.settings import Config

_begin = Service.__init__


class Started:
    """`serve` in a thread, until it is ended as SIGTERM ends it; what it reported to systemd.

    At SIGHUP it loads `config`, or raises `problem`.
    """

    def __init__(self, config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port, self.config, self.problem = 0, config, ""
        self.fake = fake
        self.states: list[str] = []
        self.served, self.begun = threading.Event(), threading.Event()
        self._signals = SimpleQueue[int]()
        start = Monitor.start

        def noting(one: Monitor) -> int:
            self.port = start(one)
            return self.port

        monkeypatch.setattr(Monitor, "start", noting)

        def keeping(one: Service, *how: Any) -> None:
            self.service = one
            _begin(one, *how)

        monkeypatch.setattr(Service, "__init__", keeping)
        monkeypatch.setattr(service_process, "notify", self._notify)
        monkeypatch.setattr(service_process, "_signals", lambda: self._signals)
        how = (config, machine(fake), self._load)
        self._thread = threading.Thread(target=service_process.serve, args=how)
        self._thread.start()
        assert self.served.wait(expect.PATIENCE_SECONDS)

    def _notify(self, state: str) -> None:
        self.states.append(state)
        if state == "STATUS=ready":
            self.begun.set()
        if state == "READY=1":
            self.served.set()

    def _load(self) -> Config:
        if self.problem:
            raise errors.BadConfig("config.toml", "wipe", self.problem)
        return self.config

    def reload(self, config: Config) -> None:
        self.config = config
        self._signals.put(signal.SIGHUP)

    def page(self, path: str) -> tuple[int, str]:
        return page(self.port, path)

    def end(self) -> None:
        self._signals.put(signal.SIGTERM)
        self._thread.join()


def page(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text
