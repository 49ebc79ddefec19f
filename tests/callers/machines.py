"""Carver on a machine that tests start anew, switch off, and take a volume group from."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import configured
import in_background
from callers.cluster import Cluster, Node
from callers.directories import Directories
from callers.objects import StorageClass
from callers.plugin import Plugin
from fakes.disks import FakeDisks
from fakes.host import FakeHost
from model.stopping import Switch
from real.any import AnyHost

from agent.csi.client import Client
from agent.daemon.host import Host
from agent.daemon.server import Service
from agent.extras.controller.controller_service import Listener
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from lvm import report
from mount import loop, table

CLASSES = {
    "fast": StorageClass("fast", {"carver/class": "fast"}),
    "slow": StorageClass("slow", {"carver/class": "slow"}),
}


class Machine:
    """One node's machine, with its driver and its callers."""

    def __init__(self, host: AnyHost, config: Config, cluster: Cluster) -> None:
        self.host = host
        self.name = config.node_id
        self._config = config
        # Seconds until it is switched on again; as long as it is off.
        self._off_seconds = 0
        self._serial = itertools.count()
        self._serve(Switch())
        self.plugin = Plugin(self._client, cluster.answers.append)
        self.directories = Directories(host.directory, host.kernel)
        self.node: Node = cluster.add_node(config.node_id, self.plugin, self.directories)

        cluster.supervisors.append(self.ensure_alive)

    @property
    def port(self) -> int:
        """Where it serves the cluster's controller; 0 while it is off."""
        return 0 if self.node.is_off else self._listener.port

    def stop(self) -> None:
        if self.node.is_off:
            return
        self._client.__exit__(None, None, None)
        if self._switch.dead.is_set():
            self._service.inline_volumes.scans.stop()
        else:
            self._service.stop()

    def restart(self) -> None:
        self.stop()
        self._start(Switch())

    def kill(self, after_steps: int, *, before: bool = True) -> None:
        """Have the driver die at a step of one of the calls that come: it is started anew then."""
        self.stop()
        self._start(Switch(after_steps, before=before))

    @property
    def steps(self) -> int:
        """The number of steps that the driver's process took."""
        return len(self._switch.taken)

    @property
    def is_dead(self) -> bool:
        """Whether the driver's process has died, and not been started anew."""
        return self._switch.dead.is_set()

    def ensure_alive(self) -> None:
        """What systemd does, or kubelet: start what died; and people, with what is off."""
        if self.node.is_off:
            self._off_seconds -= 1
            if self._off_seconds <= 0:
                self.switch_on()
        elif self._switch.dead.is_set():
            self.restart()

    def switch_off(self, seconds: int) -> None:
        """Have it off for some seconds."""
        self.stop()
        self.node.is_off, self._off_seconds = True, seconds

    def switch_on(self) -> None:
        """Start it, if it is off: what it had mounted and activated is not."""
        if self.node.is_off:
            self.node.is_off = False
            self._begin_anew()

    def reboot(self) -> None:
        """Switch the node off and on: no mount, loop device or active volume stays."""
        self.stop()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.directories.forget()
        kernel = self.host.kernel
        for mount in reversed(table.read(kernel).under(str(self.host.directory))):
            kernel.unmount(mount.path)
        for group in self._groups():
            for name, logical in group.volumes.items():
                device = self.host.devices.find(group.name, name)
                if device is None or logical.is_copy_on_write:
                    continue  # that one goes with its origin
                for one in loop.loop_devices_over(kernel, device.number):
                    loop.detach(kernel, one)
                self.host.deactivate(group.name, name)
        self._start(Switch())
        self.node.kubelet.restart()

    def lose(self, group: str) -> None:
        """Have a group's disks gone: lvm2 does not see it, the devices of its volumes stay."""
        self._fake_disks.lost.add(group)

    def find_again(self) -> None:
        if isinstance(self.host, FakeHost):
            self._fake_disks.lost.clear()

    @property
    def _listener(self) -> Listener:
        return cast(Listener, self._service.extras["controller"])

    @property
    def _fake_disks(self) -> FakeDisks:
        assert isinstance(self.host.disks, FakeDisks)
        return self.host.disks

    def left(self) -> list[str]:
        """Logical volumes and mounts, where there should be none."""
        mounts = table.read(self.host.kernel).under(str(self.host.directory))
        volumes = [name for group in self._groups() for name in group.volumes]
        return [*volumes, *(str(one) for one in mounts)]

    def _groups(self) -> list[report.Group]:
        known = report.read(self.host.lvm)
        return [known.group(name) for name in self._config.groups]

    def _start(self, switch: Switch) -> None:
        self._serve(switch)
        self.plugin.client = self._client
        self.node.driver_restarted()

    def _serve(self, switch: Switch) -> None:
        """A process whose way to the machine leads through the switch."""
        self._switch, host = switch, self.host
        run = switch.run(host.run)
        seams = Host(
            run,
            switch.kernel(host.kernel),
            switch.devices(host.devices),
            host.disks,
            cgroups=host.cgroups,
        )
        self._service = Service(self._config, seams, replace(host.lvm, run=run))
        # A deletion has ended when it is answered, however slow the disk: what is left is found. In
        # memory none is slow, and for so long the threads of a service that was killed keep Python
        # from ending: pytest-xdist waits ten seconds for that, then kills, coverage and all.
        if isinstance(host, FakeHost):
            self._service.eraser.grace_seconds = self._service.copier.grace_seconds = 5
        else:
            self._service.eraser.grace_seconds = 60
        in_background.resume(self._service)
        # A socket of its own: the one of a process that died may go at any moment.
        endpoint = self._config.endpoint.with_name(f"{next(self._serial)}.sock")
        self._service.start(endpoint)
        self._client = Client(endpoint)
        dying = [self._service._server]
        if self._config.controller_address is not None:
            self._listener.find_other_groups()
            self._listener.serve()
            assert self._listener._server is not None
            dying.append(self._listener._server)
        switch.on_death = lambda: [one.stop(None) for one in dying]
        switch.counting = True


def pair(
    directory: Path, classes: Mapping[str, StorageClass] = CLASSES
) -> tuple[Cluster, dict[str, Machine]]:
    """Two nodes, `a` and `b`, each with a group for the device class `fast` and one for `slow`."""
    cluster = Cluster(classes)
    made = {
        name: machine(cluster, directory, name, number, controller_expand=False)
        for number, name in enumerate("ab")
    }
    return cluster, made


def machine(cluster: Cluster, directory: Path, name: str, number: int, **changes: Any) -> Machine:
    """A node with a group for each device class; its groups have UUIDs by its number."""
    own = directory / f"{name}{number}"
    kubelet = own / "kubelet"
    kubelet.mkdir(parents=True)
    host = FakeHost(kubelet, number)
    groups = {one: host.new_group(400) for one in ("fast", "slow")}
    classes = tuple(DeviceClass(name=one, group=groups[one]) for one in groups)
    config = configured.carver(own, node_id=name, classes=classes, **changes)
    return Machine(host, config, cluster)
