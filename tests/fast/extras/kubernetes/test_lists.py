"""A list is complete or refused, whatever the API server does."""

import json
import threading
import time
from collections.abc import Callable, Iterator

import api_server
import pytest
from api_server import (
    CLAIMS,
    PODS,
    VOLUMES,
    ApiServer,
    Lie,
    body,
    changed,
    cut_off,
    hang_up,
    silence,
    status,
)

from agent.core import errors
from agent.extras.kubernetes import access, objects
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.objects import Lists, Objects, claims_of
from mount import command


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with api_server.running(ApiServer(), page_items=3) as made:
        for number in range(7):
            made.add(VOLUMES, f"pv-{number}")
        yield made


def read(api: ApiServer) -> list[str]:
    server = Server("tests", "127.0.0.1", api.port)
    found = Lists(server).whole(VOLUMES, "PersistentVolumeList")
    return [one["metadata"]["name"] for one in found.items]


ALL = [f"pv-{number}" for number in range(7)]


def test_all_pages_are_read_and_nothing_is_written(api: ApiServer) -> None:
    assert read(api) == ALL
    assert [query.get("continue") for _, query in api.asked] == [None, ["107.3"], ["107.6"]]
    assert {query["limit"][0] for _, query in api.asked} == {"3"}
    assert api.methods == {"GET"}


LARGE = "x" * (1 << 16)


def large(api: ApiServer, path: str) -> None:
    """What users may add to their pods and claims, and more of it."""
    about = {
        "namespace": "shop",
        "annotations": {"my/notes": LARGE, "volume.kubernetes.io/selected-node": LARGE},
        "labels": {f"label-{number}": "x" for number in range(1000)},
        "managedFields": [{"fieldsV1": {LARGE: {}}}],
    }
    containers = [{"name": "c", "env": [{"name": "E", "value": LARGE}]}]
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "data", "more": LARGE}},
        {"name": "own", "ephemeral": {"volumeClaimTemplate": {"metadata": {"labels": LARGE}}}},
        {"name": LARGE, "configMap": {"name": LARGE}},
    ]
    spec = {"containers": containers, "volumes": volumes, "dataSource": {"name": LARGE}}
    status = {"phase": "Pending", "conditions": [{"message": LARGE}], "volumeHealth": [LARGE]}
    for number in range(45):
        api.add(path, f"its-{number}", metadata=about, spec=spec, status=status)


@pytest.mark.parametrize(
    ("path", "kind", "most"),
    [(PODS, "PodList", "20"), (CLAIMS, "PersistentVolumeClaimList", "500")],
)
def test_of_what_users_make_as_large_as_they_like_little_is_read_at_once_and_kept(
    path: str, kind: str, most: str
) -> None:
    with api_server.running(ApiServer(), page_items=500) as api:
        large(api, path)
        found = Lists(Server("tests", "127.0.0.1", api.port)).whole(path, kind).items
        assert len(found) == 45
        assert {query["limit"][0] for _, query in api.asked} == {most}
    assert all(len(json.dumps(one)) < 500 for one in found)
    if kind == "PodList":
        assert list(claims_of(found[7])) == ["data", "its-7-own"]


def test_a_page_that_is_too_long_is_read_in_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one who makes large objects would keep a list from being read at all."""
    monkeypatch.setattr(access, "_LARGEST_ANSWER_BYTES", 10 << 16)
    with api_server.running(ApiServer(), page_items=100) as api:
        for number in range(12):
            api.add(VOLUMES, f"pv-{number}", spec={"more": LARGE})
        found = Lists(Server("tests", "127.0.0.1", api.port)).whole(VOLUMES, "PersistentVolumeList")
        assert len(found.items) == 12
        assert {query["limit"][0] for _, query in api.asked} == {"100", "6"}


def test_an_honest_list_may_be_empty(api: ApiServer) -> None:
    api.objects[VOLUMES].clear()
    assert read(api) == []


LIES = {
    "partial": changed(lambda one: one["metadata"].pop("continue")),
    "two moments": changed(lambda one: one["metadata"].update(resourceVersion="99")),
    "an object twice": changed(lambda one: one["items"].append(one["items"][0])),
    "empty page that goes on": changed(lambda one: one["items"].clear()),
    "no version": changed(lambda one: one["metadata"].pop("resourceVersion")),
    "version of an empty cache": changed(lambda one: one["metadata"].update(resourceVersion="0")),
    "no metadata": changed(lambda one: one.pop("metadata")),
    "no items": changed(lambda one: one.pop("items")),
    "items are null": changed(lambda one: one.update(items=None)),
    "items without a name": changed(lambda one: one.update(items=[{"metadata": {"uid": "1"}}])),
    "another kind": changed(lambda one: one.update(kind="PodList")),
    "empty answer": body(""),
    "empty object": body("{}"),
    "no object": body("[]"),
    "no JSON": body("<html>"),
    "half of it": cut_off,
    "no answer": hang_up,
    "too many requests": status(429),
    "server error": status(500),
    "being started": status(503),
    "expired": status(410),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("page", [0, 1])
def test_a_wrong_answer_is_retried(api: ApiServer, lie: Lie, page: int) -> None:
    api.lie(VOLUMES, *[honest] * page, lie)
    assert read(api) == ALL
    assert len(api.asked) >= 4


def honest(handler: api_server.Handler, document: api_server.Object) -> None:
    changed(lambda _: None)(handler, document)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_server_that_always_answers_wrong_gives_no_list(api: ApiServer, lie: Lie) -> None:
    for _ in range(3):
        api.lie(VOLUMES, honest, lie)
    with pytest.raises(errors.ClusterSilent, match="nothing counts as an orphan"):
        read(api)


@pytest.mark.parametrize(
    ("code", "word"), [(401, "allow this"), (403, "allow this"), (404, "404"), (302, "302")]
)
def test_a_refused_or_redirected_list_is_not_retried(api: ApiServer, code: int, word: str) -> None:
    api.lie(VOLUMES, status(code))
    with pytest.raises(errors.ClusterSilent, match=word) as raised:
        read(api)
    assert len(api.asked) == 1
    # With 401 it says nothing of what it has, nor of rights: it does not know who asks.
    assert raised.value.is_refusal is (code != 401)


def test_pages_that_expire_are_read_from_the_start(api: ApiServer) -> None:
    def expire(handler: api_server.Handler, document: api_server.Object) -> None:
        honest(handler, document)
        api.expire()
        api.add(VOLUMES, "pv-7")

    api.lie(VOLUMES, expire)
    assert read(api) == [*ALL, "pv-7"]


def test_pages_without_an_end_end(api: ApiServer) -> None:
    again = changed(lambda one: one["metadata"].update({"continue": "107.3"}))
    api.lie(VOLUMES, *[again] * 10)
    with pytest.raises(errors.ClusterSilent):
        read(api)
    assert len(api.asked) < 10


def test_a_silent_server_is_given_up(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_SILENCE_SECONDS", 0.05)
    api.lie(VOLUMES, *[silence(0.5)] * 3)
    with pytest.raises(errors.ClusterSilent, match="in time"):
        read(api)


def test_a_slow_list_is_given_up(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_LIST_SECONDS", 0.0)
    with pytest.raises(errors.ClusterSilent, match="in time"):
        read(api)


def test_no_metadata_is_an_answer_as_api_servers_write_it(api: ApiServer) -> None:
    api.objects[VOLUMES] = []
    server = Server("tests", "127.0.0.1", api.port)
    assert [*Lists(server).metadata(VOLUMES).items] == []
    # A list of whole objects that are none is an empty list, and nothing else proves it.
    api.lie(VOLUMES, *[changed(lambda document: document.update(items=None))] * 3)
    with pytest.raises(errors.ClusterSilent, match="no items"):
        read(api)


def list_whole(server: Server) -> object:
    return Lists(server).whole(VOLUMES, "PersistentVolumeList")


def list_metadata(server: Server) -> object:
    return Lists(server).metadata(VOLUMES)


def find_one(server: Server) -> object:
    return Objects(server).find(VOLUMES, "PersistentVolumeList")


@pytest.mark.parametrize("question", [list_whole, list_metadata, find_one])
@pytest.mark.parametrize("how", ["silent", "not there", "always wrong"])
def test_a_server_is_given_up_by_the_time_limit_of_the_thread(
    api: ApiServer,
    question: Callable[[Server], object],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "sleep", time.sleep)
    monkeypatch.setattr(objects, "_PAUSE_SECONDS", 5.0)
    monkeypatch.setattr(objects, "_OBJECT_PAUSE_SECONDS", 5.0)
    server, goes_on = Server("tests", "127.0.0.1", api.port), threading.Event()

    def is_silent(_handler: api_server.Handler, _document: api_server.Object) -> None:
        goes_on.wait(8)

    if how == "silent":
        api.lie(VOLUMES, *[is_silent] * 3)
    elif how == "not there":
        api.stop()
    else:
        api.lie(VOLUMES, *[status(503)] * 3)
    begun = time.monotonic()
    with command.time_limit(0.3), pytest.raises((errors.ClusterSilent, errors.ClusterRefused)):
        question(server)
    assert time.monotonic() - begun < 4
    goes_on.set()


def test_a_restarted_server_is_asked_again(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def restart(handler: api_server.Handler, document: api_server.Object) -> None:
        handler.close_connection = True
        down.set()

    down = threading.Event()
    api.lie(VOLUMES, honest, restart)
    attempts: list[float] = []

    def pause(seconds: float) -> None:
        # The first attempt after the loss meets no server, the next one the new process.
        attempts.append(seconds)
        if len(attempts) == 1:
            assert down.wait(5)
            api.stop()
        else:
            api.start()

    monkeypatch.setattr(objects, "sleep", pause)
    assert read(api) == ALL
    assert len(attempts) == 2


def test_a_server_that_is_not_there_gives_no_list(api: ApiServer) -> None:
    api.stop()
    with pytest.raises(errors.ClusterSilent, match="refused"):
        read(api)
