"""Enrolment at the controller: each node proves by its pod's token which node it is.

A node enrols at each controller, again and again. The API server reviews the token (TokenReview)
and says which service account, pod and node it is of. So a certificate has the name of the node
that the pod runs on, and no other name. Enrolments are kept in memory only: a new controller learns
of each node within seconds.
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
from agent.extras.controller import certificates
from agent.extras.controller.authority import Authority
from agent.extras.controller.certificates import Certificates
from agent.extras.controller.claims import ClaimQuestions, Claims
from agent.extras.controller.membership import ClusterRecord, Serving
from agent.extras.kubernetes.objects import NODES, Lists, Objects
from agent.settings import values
from agent.settings.settings import Config
from proto import carver_pb2 as carver

_log = logging.getLogger(__name__)

_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
# Keys of a token's review: the name of the token's node, and the UID of that Node when the token
# was made. Both keys exist since Kubernetes 1.32, and no API server compares the UID with the
# present Node's. Source: kubernetes.io/docs, "Bound service account tokens".
_NODE_NAME = "authentication.kubernetes.io/node-name"
_NODE_UID = "authentication.kubernetes.io/node-uid"
# Keys of a token's review: the name and the UID of the pod that the token is bound to.
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
# Time, in seconds, for which the review of a token is used again.
_REVIEW_SECONDS = 300.0
# Largest number of reviewed tokens that are kept, and of nodes whose certificates are counted.
_MOST_REVIEWED = 20_000
# Largest number of certificates that a node gets at once, and seconds until it may have another
# one. A node whose clock is far behind asks each 15 seconds; a node that enrols in vain asks
# several times in the first minute.
_CERTIFICATES_AT_ONCE, _CERTIFICATE_SECONDS = 10, 10.0
# Name under which log lines about refused enrolments are counted, with the same limit as a node's
# certificates. The limit is there because any pod can cause such lines.
_REFUSED = "why nodes were not enrolled"
# Largest number of token reviews at once. Each host has at most one, so a host that sends invalid
# tokens delays no other host.
_REVIEWS_AT_ONCE = 16
# Options of the enrolment server. A request consists of a token and a signing request, so it is
# small; Carver's nodes never send a larger one.
_OPTIONS = (
    *certificates.SERVER_OPTIONS,
    ("grpc.max_receive_message_length", 64 << 10),
    ("grpc.max_concurrent_streams", 4),
)
# Seconds between two reads of the authority's Secret. For that long, a change of the Secret by
# another controller is not known.
_AUTHORITY_SECONDS = 60.0
# Grace period, in seconds, for which a node is deleted before its volumes count as deleted, too.
_DELETED_SECONDS = 600.0
# Age, in seconds, at which the controller's own certificate, which lasts a day, is renewed.
_OWN_SECONDS = 6 * 3600.0
# Remaining time of the controller's own certificate below which it is renewed. A certificate with
# less time, or one that has not begun, shows that this machine's clock was set: nodes with a right
# clock refuse such a certificate.
_OWN_LEFT = datetime.timedelta(hours=12)


@dataclass(frozen=True)
class _Reviewed:
    """What a token proved: the node that it is of.

    The review counts while the Node object is the same, and no other token came for the node.
    """

    node: str
    # The UID of the Node object.
    uid: str
    # Until when the review may be used (monotonic, seconds).
    until: float


class Enrolment:
    """The enrolment server, and the controller's own certificate."""

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
        # The reviews, by the digest of the token; and the digest of each node's last token.
        self._reviewed: dict[str, _Reviewed] = {}
        self._last: dict[str, str] = {}
        # Until when each node has had its certificates (monotonic, seconds): each certificate adds
        # ten seconds, and a node may be 100 seconds ahead. The log's lines about refusals are
        # counted here, too.
        self._signed: dict[str, float] = {}
        self._reviewing: set[str] = set()
        self._reviewers = ThreadPoolExecutor(_REVIEWS_AT_ONCE, thread_name_prefix="review")
        # The last refusal of an enrolment that was logged.
        self._refusal = ""
        self._refreshed = self._own_made = 0.0
        self.certificates = Certificates(b"", b"", b"")
        self._server: grpc.aio.Server | None = None
        # The port of the enrolment server; 0 before it started.
        self.port = 0

    @property
    def audience(self) -> str:
        """The audience that a node's token must have.

        A token for another service is refused.
        """
        return certificates.controller_name(self._config.driver_name)

    @property
    def serving(self) -> Mapping[str, Serving]:
        """The members of the cluster by name, with their addresses and the UIDs of their Nodes."""
        return self.record.serving

    async def start(self) -> None:
        """Start the enrolment server.

        Raises ClusterRefused if the authority cannot be read or made.
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
        """Stop the enrolment server."""
        if self._server is not None:
            await self._server.stop(1)
        self._reviewers.shutdown(wait=False, cancel_futures=True)
        self.questions.stop()

    async def look(self) -> None:
        """Refresh the authority, the Nodes and PersistentVolumes, each if its time has come.

        Raises ClusterRefused, ClusterSilent. After an error the last state stays in use.
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
            # Renew the own certificate also while the API server does not answer.
            self.certificates, self._own_made = self._authority.own(self.audience), now
        if not self._refreshed or now - self._refreshed >= _AUTHORITY_SECONDS:
            old_bundle = self._authority.bundle
            await asyncio.to_thread(self._authority.refresh)
            self._refreshed = now
            if old_bundle != self._authority.bundle:
                self.certificates, self._own_made = self._authority.own(self.audience), now

    def _own_lasts(self) -> bool:
        """Return whether the controller's own certificate has begun, and lasts 12 more hours."""
        certificate = x509.load_pem_x509_certificate(self.certificates.certificate)
        now = datetime.datetime.now(datetime.UTC)
        return (
            certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc - _OWN_LEFT
        )

    async def _enrol(self, data: bytes, context: Any) -> bytes:
        """Enrol a node, and sign its certificate if it asks for one. The token is not logged."""
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
        """Count one more certificate for a node, and return whether the node may have it now.

        The log's lines about refusals are limited in the same way. The limit is there because
        signing delays the enrolment of other nodes: a stolen token of one node must not get
        thousands of certificates.
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
        """Return the node of the pod that a token is bound to; abort the call without one."""
        digest = hashlib.sha256(token.encode()).hexdigest()
        review = self._reviewed.get(digest)
        if review is not None and self._counts(review, digest):
            return review
        # gRPC's name of a peer is, for instance, ipv4:10.0.0.1:40000; the host is the part before
        # the port.
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
            # The host may send another token, also if this caller has gone and does not read the
            # error.
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
        """Return whether the review of a token need not be repeated."""
        is_last = self._last.get(review.node) == digest
        is_same = self.record.uid_of(review.node) == review.uid
        return is_last and is_same and review.until > time.monotonic()

    def _review(self, token: str, digest: str) -> _Reviewed:
        """Have the API server review a token, and keep the result.

        The result is kept for the node's next call: a slow API server answers when this call has
        ended. Raises ValueError for a token that proves nothing, ClusterRefused, ClusterSilent.
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
        """Return the node that a review proves, and the UID of its Node object.

        Raises ValueError for a token that proves nothing, ClusterRefused, ClusterSilent.
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
        # A pod outlives its Node for a while, also if that Node is deleted and made anew at once.
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
    """Return the public key of a certificate signing request; abort the call if it is invalid.

    The signature of the request proves that the caller has the private key.
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
