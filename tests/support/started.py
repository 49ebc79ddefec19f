"""The process of the service in a thread of the test, with its pages."""

import http.client
import threading

import expect
import pytest
from fakes.host import FakeHost
from serving import machine

from agent.core.settings import Config
from agent.daemon import process
from agent.daemon.monitor import Monitor


class Started:
    """`serve` in a thread, until it is ended as SIGTERM ends it; what it reported to systemd."""

    def __init__(self, config: Config, fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = 0
        self.states: list[str] = []
        self.served, self.begun, self._ended = (threading.Event() for _ in range(3))
        start = Monitor.start

        def noting(one: Monitor) -> int:
            self.port = start(one)
            return self.port

        monkeypatch.setattr(Monitor, "start", noting)
        monkeypatch.setattr(process, "notify", self._notify)
        monkeypatch.setattr(process, "_until_signal", lambda: self._ended)
        self._thread = threading.Thread(target=process.serve, args=(config, machine(fake)))
        self._thread.start()
        assert self.served.wait(expect.PATIENCE_SECONDS)

    def _notify(self, state: str) -> None:
        self.states.append(state)
        if state == "STATUS=ready":
            self.begun.set()
        if state == "READY=1":
            self.served.set()

    def page(self, path: str) -> tuple[int, str]:
        return page(self.port, path)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def page(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text
