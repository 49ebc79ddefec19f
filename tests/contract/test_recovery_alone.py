"""Recovery: what one volume, pool or snapshot refuses keeps no other, and no start, waiting."""

import errno
import os
from dataclasses import replace

import configured
import pytest
import serving
from csi_client import Client
from real.any import AnyHost

from agent.csi.client import block
from agent.daemon import server
from agent.daemon.server import Service
from agent.daemon.startup import Recovery, startup
from agent.settings.settings import Config

MIB = 1 << 20
POOLS = ("thin", "other")
pytestmark = pytest.mark.settings(
    classes=(configured.PLAIN, *(replace(configured.THIN, name=one) for one in POOLS))
)


def test_a_pool_that_turned_read_only_keeps_neither_a_start_nor_another_pool(
    client: Client,
    host: AnyHost,
    group: str,
    config: Config,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Readings of changed blocks were killed; dm-thin.c then refuses messages (EOPNOTSUPP)."""
    for one in POOLS:
        client.create(one, 8 * MIB, block(), parameters={"class": one})
        tag = "carver.metadataSnapshot=reserved"
        host.lvm("lvchange", "--addtag", tag, "--", f"{group}/pool-{one}")
        host.devices.reserve_metadata(group, f"pool-{one}")
    service.stop()
    release, released = host.devices.release_metadata, list[str]()
    is_refused = True

    def releasing(group: str, pool: str) -> None:
        if is_refused and pool == "pool-thin":
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        released.append(pool)
        release(group, pool)

    monkeypatch.setattr(host.devices, "release_metadata", releasing)
    again = Service(config, serving.machine(host), host.lvm)
    again.context.admission.close()
    again.start(config.endpoint)
    recovery = Recovery(again.volume_groups, lambda name: server.resume(again, name))
    startup(recovery.begin, again.context.admission, (), lambda: None).run_once()
    try:
        with Client(config.endpoint) as caller:
            caller.create("plain", 8 * MIB, block())
        assert released == ["pool-other"]
        [problem] = again.unrecovered.values()
        assert os.strerror(errno.EOPNOTSUPP) in problem
        is_refused = False
        assert server.resume(again, group)
        assert released == ["pool-other", "pool-thin"]
    finally:
        again.stop()
