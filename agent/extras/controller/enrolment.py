"""Enrolment at the controller: each node proves by its pod's token which node it is.

A node enrols at each controller periodically. The API server reviews the node's token (TokenReview)
and says to which service account, pod and node the token belongs. So a certificate has the name of
the node that the pod runs on, and no other name. Enrolments are kept in memory only: a new
controller learns of each node within seconds.
"""

import asyncio
import datetime
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from agent.core import errors
from agent.extras.controller.authority import Authority
from agent.extras.controller.claims import ClaimQuestions, Claims
from agent.extras.controller.membership import ClusterRecord, Serving
from agent.extras.kubernetes.objects import NODES, Lists, Objects
from agent.extras.tls import certificates
from agent.extras.tls.certificates import Certificates
from agent.settings import values
from agent.settings.settings import Config
from proto import carver_pb2 as carver

_log = logging.getLogger(__name__)

_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
# Keys in the result of a TokenReview: the name of the token's node, and the UID that its Node
# object had when the token was made. Both keys exist since Kubernetes 1.32, and no API server
# compares the UID with that of the present Node object. Source: kubernetes.io/docs, "Bound service
# account tokens".
_NODE_NAME = "authentication.kubernetes.io/node-name"
_NODE_UID = "authentication.kubernetes.io/node-uid"
# Keys in the result of a TokenReview: the name and the UID of the pod to which the token is bound.
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
# Time, in seconds, for which the result of a TokenReview is used again for the same token.
_REVIEW_SECONDS = 300.0
# Number of reviewed tokens at which all of them are forgotten; also number of nodes in the rate
# limit of certificates at which nodes that had no certificate lately are forgotten.
_MOST_REVIEWED = 20_000
# Rate limit of certificates: the maximum number that a node gets at once, and the seconds until the
# node may have one more. A node whose clock is far behind asks for a certificate every 15 seconds;
# a node whose enrolments fail asks several times in the first minute.
_CERTIFICATES_AT_ONCE, _CERTIFICATE_SECONDS = 10, 10.0
# Name under which log lines about refused enrolments are counted, in place of a node's name. They
# have the same rate limit as a node's certificates, because any pod can cause such lines.
_REFUSED = "why nodes were not enrolled"
# Maximum number of TokenReviews at once. At most one of them is for a token from the same host, so
# a host that sends invalid tokens delays no other host.
_REVIEWS_AT_ONCE = 16
# Options of the enrolment server. Requests are limited to 64 KiB: a request of Carver's nodes has
# only a token, an address and a certificate signing request.
_OPTIONS = (
    *certificates.SERVER_OPTIONS,
    ("grpc.max_receive_message_length", 64 << 10),
    ("grpc.max_concurrent_streams", 4),
)
# Seconds between two reads of the Secret with the authorities. For so long, this controller may not
# know of a change of the Secret by another controller.
_AUTHORITY_SECONDS = 60.0
# Grace period, in seconds, between the deletion of a node's Node object and the time from which the
# node's volumes count as deleted, too.
_DELETED_SECONDS = 600.0
# Age, in seconds, at which the controller's own certificate is renewed. The certificate is valid
# for a day.
_OWN_SECONDS = 6 * 3600.0
# Remaining time of the controller's own certificate below which the certificate is renewed. A
# certificate with less time, or one whose validity has not begun, shows that this machine's clock
# was set. Nodes with a right clock may refuse such a certificate.
_OWN_LEFT = datetime.timedelta(hours=12)


@dataclass(frozen=True)
class _Reviewed:
    """The result of a TokenReview: the node that the token proved.

    The result counts until `until`, while the Node object is the same, and while no other token
    proved the same node later.
    """

    # The name of the node.
    node: str
    # The UID of the Node object.
    uid: str
    # The time until which the result may be used (monotonic, seconds).
    until: float


class Enrolment:
    """The source of nodes and certificates of a controller in a cluster; the enrolment server."""

    def __init__(self, config: Config, objects: Objects, lists: Lists, namespace: str) -> None:
        self._config, self._objects, self._lists = config, objects, lists
        self._namespace = namespace
        self._authority = Authority(objects, namespace, config.controller_authority)
        grace_seconds = _DELETED_SECONDS if config.forget_deleted_nodes else None
        self.record = ClusterRecord(objects, lists, config.driver_name, grace_seconds=grace_seconds)
        self.questions = ClaimQuestions(
            Claims(objects, lists, config.driver_name, config.topology_key)
        )
        self._account = f"system:serviceaccount:{namespace}:{config.node_account}"
        # The results of TokenReviews, by the digest of the token; and the digest of the last token
        # that proved a node, by the node's name.
        self._reviewed: dict[str, _Reviewed] = {}
        self._last: dict[str, str] = {}
        # The rate limit of certificates: a time (monotonic, seconds) for each node, by its name.
        # Each certificate moves the node's time on by ten seconds. A node gets no certificate that
        # would move the time to more than 100 seconds after the present. Log lines about refused
        # enrolments are counted here, too.
        self._signed: dict[str, float] = {}
        # The hosts of which a token is being reviewed.
        self._reviewing: set[str] = set()
        self._reviewers = ThreadPoolExecutor(_REVIEWS_AT_ONCE, thread_name_prefix="review")
        # The text of the refused enrolment that was last logged. The same text is not logged twice
        # in succession.
        self._refusal = ""
        # When the authorities were last refreshed, and when the controller's own certificate was
        # made (monotonic, seconds); 0 for never.
        self._refreshed = self._own_made = 0.0
        self.certificates = Certificates(b"", b"", b"")
        self._server: grpc.aio.Server | None = None
        # The port on which the enrolment server listens; 0 before the server was started.
        self.port = 0

    @property
    def audience(self) -> str:
        """The audience that a node's token must have: the DNS name in the controller's certificate.

        A token for another audience is refused.
        """
        return certificates.controller_name(self._config.driver_name)

    @property
    def serving(self) -> Mapping[str, Serving]:
        """The members of the cluster by name, with their addresses and the UIDs of their Nodes."""
        return self.record.serving

    async def start(self) -> None:
        """Read certificate authorities, Nodes and PersistentVolumes; start the enrolment server.

        Raises ClusterRefused, BadConfig if the authorities cannot be read or made, ClusterSilent if
        the cluster's objects cannot be listed.
        """
        await self.look()
        server = self._server = grpc.aio.server(options=_OPTIONS)
        methods: dict[str, Any] = {"Enrol": grpc.unary_unary_rpc_method_handler(self._enrol)}
        handler: Any = grpc.method_handlers_generic_handler("carver.v2.Enrolment", methods)
        server.add_generic_rpc_handlers((handler,))
        credentials = certificates.server_credentials(lambda: self.certificates, any_client=True)
        self.port = server.add_secure_port(str(self._config.enrolment_address), credentials)
        await server.start()

    async def stop(self) -> None:
        """Stop the enrolment server, and cancel look-ups at the API server that have not begun."""
        if self._server is not None:
            await self._server.stop(1)
        self._reviewers.shutdown(wait=False, cancel_futures=True)
        self.questions.stop()

    async def look(self) -> None:
        """Read certificate authorities, Nodes and PersistentVolumes again, each if it is due.

        The controller's own certificate is renewed, too, if that is due. Raises ClusterRefused,
        ClusterSilent if the API server refuses or does not answer, BadConfig if the Secret with the
        authorities cannot be parsed. After an error, what was read last stays in use.
        """
        try:
            await self._look_at_authority()
        finally:
            # Read the cluster's objects also if the authority's Secret cannot be read.
            if self.record.is_due:
                await asyncio.to_thread(self.record.look)

    async def _look_at_authority(self) -> None:
        now = time.monotonic()
        if self._refreshed and (now - self._own_made >= _OWN_SECONDS or not self._own_lasts()):
            # Renew the controller's own certificate also while the API server does not answer.
            self.certificates, self._own_made = self._authority.own(self.audience), now
        if not self._refreshed or now - self._refreshed >= _AUTHORITY_SECONDS:
            old_bundle = self._authority.bundle
            await asyncio.to_thread(self._authority.refresh)
            self._refreshed = now
            if old_bundle != self._authority.bundle:
                self.certificates, self._own_made = self._authority.own(self.audience), now

    def _own_lasts(self) -> bool:
        """Return whether the controller's own certificate is valid now, and for 12 more hours."""
        certificate = x509.load_pem_x509_certificate(self.certificates.certificate)
        now = datetime.datetime.now(datetime.UTC)
        return (
            certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc - _OWN_LEFT
        )

    async def _enrol(self, data: bytes, context: Any) -> bytes:
        """Answer the RPC Enrol: keep the node's address, and sign a certificate if it asks for one.

        The call is aborted if the request is invalid, if the token does not prove a node, or if the
        node asks for too many certificates. The token is never logged.
        """
        try:
            request = carver.EnrolRequest.FromString(data)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be read")
            raise AssertionError from None
        try:
            address = str(values.parse_address(request.address) or "")
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"address: {error}")
        if not address:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "address: is required")
        review = await self._node_of(request.token, context)
        node, answer = review.node, carver.EnrolResponse()
        if request.certificate_request:
            if not self._takes_more(node):
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"certificate_request: node {node} asks for more than"
                    f" {_CERTIFICATES_AT_ONCE} certificates at once; ask again in"
                    f" {_CERTIFICATE_SECONDS:.0f} s",
                )
            key = await _public_key(request.certificate_request, context)
            name = certificates.node_name(node, self._config.driver_name)
            answer.certificate = self._authority.sign(name, key)
            _log.info("node %s at %s got a certificate", node, address)
        self.record.enrol(node, address, review.uid)
        return answer.SerializeToString()

    def _takes_more(self, node: str) -> bool:
        """Return whether a node may have one more certificate now; if so, count that certificate.

        With the name _REFUSED in place of a node's, log lines about refusals are limited in the
        same way. Certificates are limited because signing delays the enrolment of other nodes: a
        stolen token of one node must not get thousands of certificates.
        """
        now = time.monotonic()
        ahead_until = max(self._signed.get(node, now), now) + _CERTIFICATE_SECONDS
        if ahead_until - now > _CERTIFICATES_AT_ONCE * _CERTIFICATE_SECONDS:
            return False
        if len(self._signed) >= _MOST_REVIEWED:
            self._signed = {name: moment for name, moment in self._signed.items() if moment > now}
        self._signed[node] = ahead_until
        return True

    async def _node_of(self, token: str, context: Any) -> _Reviewed:
        """Return the node that a token proves, by an earlier TokenReview or a new one.

        The call `context` is aborted if the token proves no node, if the API server does not
        answer, or if another token of the same host is being reviewed.
        """
        digest = hashlib.sha256(token.encode()).hexdigest()
        review = self._reviewed.get(digest)
        if review is not None and self._counts(review, digest):
            return review
        # Remove the port from gRPC's name of the peer, for instance ipv4:10.0.0.1:40000.
        host = context.peer().rpartition(":")[0]
        if host in self._reviewing:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "another token of this host is being reviewed"
            )
        self._reviewing.add(host)
        reviewing = asyncio.get_running_loop().run_in_executor(
            self._reviewers, self._review, token, digest
        )

        def ended(future: "asyncio.Future[_Reviewed]") -> None:
            # Let the host send another token. Read the error, too: asyncio would log an error that
            # is not read, and the caller may be gone.
            self._reviewing.discard(host)
            _ = future.cancelled() or future.exception()

        reviewing.add_done_callback(ended)
        try:
            return await asyncio.shield(reviewing)
        except (errors.ClusterRefused, errors.ClusterSilent) as error:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, f"the API server did not review the token: {error}"
            )
        except ValueError as error:
            refusal = f"{host}: {error}"
            if self._refusal != refusal and self._takes_more(_REFUSED):
                self._refusal = refusal
                _log.warning("a node was not enrolled, %s", refusal)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"token: {error}")
        raise AssertionError

    def _counts(self, review: _Reviewed, digest: str) -> bool:
        """Return whether the result of a token's earlier TokenReview still counts."""
        is_last = self._last.get(review.node) == digest
        is_same = self.record.uid_of(review.node) == review.uid
        return is_last and is_same and review.until > time.monotonic()

    def _review(self, token: str, digest: str) -> _Reviewed:
        """Have the API server review a token, keep the result, and return it.

        The result is kept for the node's next call: a slow API server may answer after this call
        has timed out. Raises ValueError for a token that proves no node, ClusterRefused,
        ClusterSilent if the API server refuses or does not answer.
        """
        asked_seconds = time.monotonic()
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self.audience]},
        }
        node, uid = self._proved(self._objects.review(_REVIEWS, request))
        if len(self._reviewed) >= _MOST_REVIEWED:
            self._reviewed.clear()
            self._last.clear()
        reviewed = _Reviewed(node, uid, asked_seconds + _REVIEW_SECONDS)
        self._reviewed[digest] = reviewed
        self._last[node] = digest
        return reviewed

    def _proved(self, review: Mapping[str, Any]) -> tuple[str, str]:
        """Return the node that a TokenReview proves, and the UID of its Node object.

        The token must be of Carver's service account, and bound to an existing pod on a node that
        has a Node object. If the token names a node or the UID of a Node object, they must be the
        same. Raises ValueError for another token, ClusterRefused, ClusterSilent if the pod or the
        Node object cannot be read.
        """
        status = review.get("status") or {}
        if not status.get("authenticated") or self.audience not in status.get("audiences", ()):
            raise ValueError(f"it is not one for {self.audience}")
        user = status.get("user") or {}
        if user.get("username") != self._account:
            raise ValueError(f"it is {user.get('username')}'s, not {self._account}'s")
        extra = user.get("extra") or {}
        pods: Sequence[str] = extra.get(_POD_NAME) or ()
        uids: Sequence[str] = extra.get(_POD_UID) or ()
        if len(pods) != 1 or len(uids) != 1:
            raise ValueError("it is not bound to a pod")
        path = f"/api/v1/namespaces/{self._namespace}/pods/{pods[0]}"
        pod = self._objects.find(path, "Pod")
        if pod is None or pod["metadata"].get("uid") != uids[0]:
            raise ValueError(f"its pod {pods[0]} is gone")
        node = str(pod.get("spec", {}).get("nodeName") or "")
        node_names = extra.get(_NODE_NAME) or [node]
        if not node or list(node_names) != [node]:
            raise ValueError(f"it is bound to node {', '.join(node_names)}, its pod is on {node}")
        # Read the UID of the Node object: a pod outlives its Node object for a while, also if that
        # is deleted and made anew at once.
        items = self._lists.metadata(NODES, fieldSelector=f"metadata.name={node}").items
        uid = str(items[0]["metadata"]["uid"]) if items else ""
        if not uid:
            raise ValueError(f"its node {node} has no Node object")
        if list(extra.get(_NODE_UID) or [uid]) != [uid]:
            raise ValueError(
                f"it is bound to an earlier Node {node}, which was deleted and made anew; restart"
                f" Carver's pod {pods[0]} there, or wait until kubelet renews the token"
            )
        return node, uid


async def _public_key(request: bytes, context: Any) -> ec.EllipticCurvePublicKey:
    """Return the public key in a certificate signing request.

    The call `context` is aborted if the request cannot be parsed, is not signed by the key, or if
    the key is not on an elliptic curve. The signature proves that the caller has the private key.
    """
    problem = "is no signing request for a key on an elliptic curve"
    try:
        parsed = x509.load_der_x509_csr(request)
        key = parsed.public_key()
        if isinstance(key, ec.EllipticCurvePublicKey) and parsed.is_signature_valid:
            return key
    except (ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
        problem = f"is no signing request: {error}"
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"certificate_request: {problem}")
    raise AssertionError
