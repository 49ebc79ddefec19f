"""How the controller learns of the nodes in a cluster: each proves which it is by its pod's token.

A node enrols at every controller again and again. The API server says whose a token is, and of
which pod and node (TokenReview); so a certificate has the name of the node that the pod runs on,
and no other. Nothing is kept but in memory: a new controller knows each node within seconds.
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
# Of the pod whose token it is (kubernetes.io/docs: "Bound service account tokens"), and of its Node
# when the token was made: these two since Kubernetes 1.32, and compared by no API server.
_NODE_NAME = "authentication.kubernetes.io/node-name"
_NODE_UID = "authentication.kubernetes.io/node-uid"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
# A token that was reviewed is not reviewed again for so long.
_REVIEW_SECONDS = 300.0
_MOST_REVIEWED = 20_000
# How many certificates a node gets at once, and how soon there is another for it. A node whose
# clock is far behind asks each 15 seconds, one that enrols in vain some times in the first minute.
_CERTIFICATES_AT_ONCE, _CERTIFICATE_SECONDS = 10, 10.0
# As many lines of the log say why some caller is not enrolled: any pod can ask.
_REFUSED = "why nodes were not enrolled"
# Reviews at once; each host has one of them, so that one that sends what is no token delays none.
_REVIEWS_AT_ONCE = 16
# A request is a token and a signing request. Who asks for more is none of Carver's nodes.
_OPTIONS = (
    *certificates.SERVER_OPTIONS,
    ("grpc.max_receive_message_length", 64 << 10),
    ("grpc.max_concurrent_streams", 4),
)
# How often the authority is looked at: for as long another one in its Secret is not known.
_AUTHORITY_SECONDS = 60.0
# A node is deleted for so long before its volumes are forgotten.
_DELETED_SECONDS = 600.0
# The controller's own certificate lasts a day. It is renewed after so long, and where less than so
# much is left of it or it has not begun: this clock was set, and nodes with a right one refuse it.
_OWN_SECONDS = 6 * 3600.0
_OWN_LEFT = datetime.timedelta(hours=12)


@dataclass(frozen=True)
class _Reviewed:
    """What a token proved. It counts while the Node is the same, and no other token came for it."""

    node: str
    # The UID of the Node.
    uid: str
    until: float


class Enrolment:
    """The nodes that enrolled, and what the controller shows to them."""

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
        # By the digest of the token; and the digest of each node's last token.
        self._reviewed: dict[str, _Reviewed] = {}
        self._last: dict[str, str] = {}
        # Until when each node has had its certificates (monotonic, seconds): more of them, later.
        # So the log its lines.
        self._signed: dict[str, float] = {}
        self._reviewing: set[str] = set()
        self._reviewers = ThreadPoolExecutor(_REVIEWS_AT_ONCE, thread_name_prefix="review")
        # Why a node was not enrolled last.
        self._refusal = ""
        self._refreshed = self._own_made = 0.0
        self.certificates = Certificates(b"", b"", b"")
        self._server: grpc.aio.Server | None = None
        # Where it listens, after its start.
        self.port = 0

    @property
    def audience(self) -> str:
        """For whom a node's token must be: no other service's token is taken."""
        return certificates.controller_name(self._config.driver_name)

    @property
    def serving(self) -> Mapping[str, Serving]:
        """The nodes of the cluster, and where they serve."""
        return self.record.serving

    async def start(self) -> None:
        """Serve enrolment. Raises ClusterRefused if the authority cannot be read or made."""
        await self.look()
        server = self._server = grpc.aio.server(options=_OPTIONS)
        own: dict[str, Any] = {"Enrol": grpc.unary_unary_rpc_method_handler(self._enrol)}
        handler: Any = grpc.method_handlers_generic_handler("carver.v2.Enrolment", own)
        server.add_generic_rpc_handlers((handler,))
        credentials = certificates.server_credentials(lambda: self.certificates, of_any=True)
        self.port = server.add_secure_port(str(self._config.enrolment_address), credentials)
        await server.start()

    async def stop(self) -> None:
        """Serve no more."""
        if self._server is not None:
            await self._server.stop(1)
        self._reviewers.shutdown(wait=False, cancel_futures=True)
        self.questions.stop()

    async def look(self) -> None:
        """Refresh what is old. Raises ClusterRefused, ClusterSilent; what was known stays."""
        try:
            await self._look_at_authority()
        finally:
            # Also where the Secret cannot be read.
            if self.record.is_due:
                await asyncio.to_thread(self.record.look)

    async def _look_at_authority(self) -> None:
        now = time.monotonic()
        if self._refreshed and (now - self._own_made >= _OWN_SECONDS or not self._own_lasts()):
            # Also while the API server does not answer.
            self.certificates, self._own_made = self._authority.own(self.audience), now
        if not self._refreshed or now - self._refreshed >= _AUTHORITY_SECONDS:
            before = self._authority.bundle
            await asyncio.to_thread(self._authority.refresh)
            self._refreshed = now
            if before != self._authority.bundle:
                self.certificates, self._own_made = self._authority.own(self.audience), now

    def _own_lasts(self) -> bool:
        """Whether the controller's own certificate has begun, and lasts for a while."""
        made = x509.load_pem_x509_certificate(self.certificates.certificate)
        now = datetime.datetime.now(datetime.UTC)
        return made.not_valid_before_utc <= now <= made.not_valid_after_utc - _OWN_LEFT

    async def _enrol(self, data: bytes, context: Any) -> bytes:
        """Answer a node. Its token is neither kept nor logged."""
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
        proved = await self._node_of(request.token, context)
        node, answer = proved.node, carver.EnrolResponse()
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
        self.record.enrol(node, address, proved.uid)
        return answer.SerializeToString()

    def _takes_more(self, node: str) -> bool:
        """Whether a node may ask for a certificate now, which then counts; or the log for a line.

        Signing holds up the other nodes' enrolments: who has one node's token may not ask for
        thousands.
        """
        now = time.monotonic()
        until = max(self._signed.get(node, now), now) + _CERTIFICATE_SECONDS
        if until - now > _CERTIFICATES_AT_ONCE * _CERTIFICATE_SECONDS:
            return False
        if len(self._signed) >= _MOST_REVIEWED:
            self._signed = {one: moment for one, moment in self._signed.items() if moment > now}
        self._signed[node] = until
        return True

    async def _node_of(self, token: str, context: Any) -> _Reviewed:
        """The node of the pod that a token is bound to; ends the call if it proves none."""
        digest = hashlib.sha256(token.encode()).hexdigest()
        known = self._reviewed.get(digest)
        if known is not None and self._counts(known, digest):
            return known
        # gRPC's name of a peer, such as ipv4:10.0.0.1:40000.
        host = context.peer().rpartition(":")[0]
        if host in self._reviewing:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "another token of this host is being reviewed"
            )
        self._reviewing.add(host)
        reviewing = asyncio.get_running_loop().run_in_executor(
            self._reviewers, self._review, token, digest
        )

        def ended(reviewed: "asyncio.Future[_Reviewed]") -> None:
            # Also where the caller has gone, and does not read the error.
            self._reviewing.discard(host)
            _ = reviewed.cancelled() or reviewed.exception()

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

    def _counts(self, known: _Reviewed, digest: str) -> bool:
        """Whether a review need not be repeated."""
        is_last = self._last.get(known.node) == digest
        is_same = self.record.uid_of(known.node) == known.uid
        return is_last and is_same and known.until > time.monotonic()

    def _review(self, token: str, digest: str) -> _Reviewed:
        """What a token proves by the API server.

        It is kept for the next call: a slow API server answers when this one has given up. Raises
        ValueError, ClusterRefused, ClusterSilent.
        """
        asked_seconds = time.monotonic()
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [self.audience]},
        }
        node, uid = self._proved(self._objects.review(_REVIEWS, asked))
        if len(self._reviewed) >= _MOST_REVIEWED:
            self._reviewed.clear()
            self._last.clear()
        found = _Reviewed(node, uid, asked_seconds + _REVIEW_SECONDS)
        self._reviewed[digest] = found
        self._last[node] = digest
        return found

    def _proved(self, review: Mapping[str, Any]) -> tuple[str, str]:
        """The node that a review proves, and the UID of its Node.

        Raises ValueError, ClusterRefused, ClusterSilent.
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
        named = extra.get(_NODE_NAME) or [node]
        if not node or list(named) != [node]:
            raise ValueError(f"it is bound to node {', '.join(named)}, its pod is on {node}")
        # A pod outlives its Node for a while, and also where that is made anew at once.
        found = self._lists.metadata(NODES, fieldSelector=f"metadata.name={node}").items
        uid = str(found[0]["metadata"]["uid"]) if found else ""
        if not uid:
            raise ValueError(f"its node {node} has no Node object")
        if list(extra.get(_NODE_UID) or [uid]) != [uid]:
            raise ValueError(
                f"it is bound to an earlier Node {node}, which was deleted and made anew; restart"
                f" Carver's pod {pods[0]} there, or wait until kubelet renews the token"
            )
        return node, uid


async def _public_key(request: bytes, context: Any) -> ec.EllipticCurvePublicKey:
    """The key of a certificate signing request, which proves that the caller has it."""
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
