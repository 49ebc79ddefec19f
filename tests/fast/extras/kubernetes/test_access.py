"""How the API server is reached, and what is refused on the way there."""

import base64
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import api_server
import pytest
from api_server import NODES, TLS, ApiServer, kubeconfig

from agent.core import errors
from agent.extras.kubernetes import access
from agent.extras.kubernetes.objects import Lists


def data(name: str) -> str:
    return base64.b64encode((TLS / name).read_bytes()).decode()


@pytest.fixture
def secure() -> Iterator[ApiServer]:
    with api_server.running(ApiServer(), tls=True, client_certificates=True) as made:
        made.add(NODES, "here")
        yield made


def nodes(server: access.Server) -> list[str]:
    found = Lists(server).whole(NODES, "NodeList")
    return [one["metadata"]["name"] for one in found.items]


BY_DATA: dict[str, Any] = {
    "client-certificate-data": data("client.pem"),
    "client-key-data": data("client.key"),
}


def test_certificates_may_be_in_the_kubeconfig(secure: ApiServer, tmp_path: Path) -> None:
    cluster = {"certificate-authority-data": data("ca.pem")}
    file = kubeconfig(tmp_path / "config", secure.url, cluster, BY_DATA)
    assert nodes(access.of_file(file)) == ["here"]


def test_certificates_may_be_beside_the_kubeconfig(secure: ApiServer, tmp_path: Path) -> None:
    for name in ("ca.pem", "client.pem", "client.key"):
        (tmp_path / name).write_bytes((TLS / name).read_bytes())
    user = {"client-certificate": "client.pem", "client-key": "client.key"}
    cluster = {"certificate-authority": str(tmp_path / "ca.pem")}
    file = kubeconfig(tmp_path / "config", secure.url, cluster, user)
    assert nodes(access.of_file(file)) == ["here"]


def test_a_server_of_an_unknown_authority_is_refused(secure: ApiServer, tmp_path: Path) -> None:
    file = kubeconfig(tmp_path / "config", secure.url, user=BY_DATA)
    with pytest.raises(errors.ClusterSilent, match="certificate"):
        nodes(access.of_file(file))


def test_a_server_of_another_name_is_refused(secure: ApiServer, tmp_path: Path) -> None:
    cluster = {"certificate-authority-data": data("ca.pem")}
    url = secure.url.replace("127.0.0.1", "localhost")
    file = kubeconfig(tmp_path / "config", url, cluster, BY_DATA)
    with pytest.raises(errors.ClusterSilent, match="localhost"):
        nodes(access.of_file(file))


@pytest.mark.parametrize("key", ["token", "tokenFile"])
def test_a_token_is_sent_to_the_server(key: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    with api_server.running(ApiServer()) as api:
        api.add(NODES, "here")
        api.token = "s3cret"  # noqa: S105
        given = "s3cret" if key == "token" else "token"
        server = access.of_file(kubeconfig(tmp_path / "config", api.url, user={key: given}))
        assert nodes(server) == ["here"]
        api.token = "another"  # noqa: S105
        with pytest.raises(errors.ClusterSilent, match="401"):
            nodes(server)


def test_a_token_on_a_file_is_read_for_each_request(tmp_path: Path) -> None:
    with api_server.running(ApiServer()) as api:
        api.add(NODES, "here")
        (tmp_path / "token").write_text("old")
        file = kubeconfig(tmp_path / "config", api.url, user={"tokenFile": "token"})
        server = access.of_file(file)
        api.token = "new"  # noqa: S105
        (tmp_path / "token").write_text("new")
        assert nodes(server) == ["here"]


def test_a_pod_has_a_service_account(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    (tmp_path / "ca.crt").write_bytes((TLS / "ca.pem").read_bytes())
    with api_server.running(ApiServer(), tls=True) as api:
        api.add(NODES, "here")
        api.token = "s3cret"  # noqa: S105
        port = api.url.rpartition(":")[2]
        environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
        assert nodes(access.find(None, environment, tmp_path)) == ["here"]


def test_a_kubeconfig_goes_before_the_service_account(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path / "config", "http://127.0.0.1:1/prefix/")
    found = access.find(file, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
    assert (found.host, found.port, found.path) == ("127.0.0.1", 1, "/prefix")


def test_without_either_the_error_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(errors.BadConfig, match="kubeconfig: is not set"):
        access.find(None, {}, tmp_path)


@pytest.mark.parametrize(
    ("cluster", "user", "key"),
    [
        ({}, {"exec": {"command": "aws"}}, "exec"),
        ({}, {"auth-provider": {"name": "gcp"}}, "auth-provider"),
        ({}, {"username": "me", "password": "s3cret"}, "username"),
        ({}, {"as": "someone"}, "as"),
        ({"insecure-skip-tls-verify": True}, {}, "insecure-skip-tls-verify"),
        ({"proxy-url": "http://proxy"}, {}, "proxy-url"),
        ({"tls-server-name": "other"}, {}, "tls-server-name"),
        ({"server": "http://10.0.0.1:8080"}, {}, "server"),
        ({"server": "ftp://10.0.0.1"}, {}, "server"),
        ({"server": "https://user@10.0.0.1"}, {}, "server"),
        ({"server": "https://10.0.0.1:port"}, {}, "server"),
        ({"server": None}, {}, "server"),
        ({"certificate-authority-data": "%"}, {}, "certificate-authority-data"),
        ({"certificate-authority-data": "c2VjcmV0"}, {}, "certificate-authority"),
        ({"certificate-authority": "not-there"}, {}, "certificate-authority"),
        ({}, {"client-key-data": "c2VjcmV0"}, "client-certificate"),
        ({}, {"client-certificate-data": "c2VjcmV0"}, "client-key"),
        ({}, {"client-certificate-data": "c2VjcmV0", "client-key-data": "c2VjcmV0"}, "client-key"),
        ({}, {"tokenFile": "not-there"}, "token"),
        ({}, {"token": "s3cret\r\nHost: other"}, "token"),
    ],
)
def test_an_unknown_key_is_refused_without_its_value(
    cluster: dict[str, Any], user: dict[str, Any], key: str, tmp_path: Path
) -> None:
    file = kubeconfig(tmp_path / "config", "https://127.0.0.1:6443", cluster, user)
    with pytest.raises(errors.BadConfig) as refused:
        access.of_file(file)
    assert refused.value.key.rpartition(".")[2] == key
    assert "s3cret" not in str(refused.value)
    assert "c2VjcmV0" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "a: [",
        "{}",
        json.dumps({"current-context": "lost", "contexts": []}),
        json.dumps({"current-context": "a", "contexts": [{"name": "a", "context": {}}]}),
    ],
)
def test_a_malformed_kubeconfig_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(errors.BadConfig, match=str(file)):
        access.of_file(file)
    with pytest.raises(errors.BadConfig, match="No such file"):
        access.of_file(tmp_path / "other")


def test_empty_keys_are_ignored(tmp_path: Path) -> None:
    cluster = {"insecure-skip-tls-verify": False, "proxy-url": "", "extensions": [{"name": "x"}]}
    file = kubeconfig(tmp_path / "config", "https://127.0.0.1", cluster)
    found = access.of_file(file)
    assert found.port == 443
    assert found.tls is not None
    assert found.tls.verify_mode is ssl.CERT_REQUIRED
    assert found.tls.check_hostname
