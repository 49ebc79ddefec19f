"""Keys of parameters: what classes and inline volumes may say, and how each is read."""

from collections.abc import Callable, Mapping

from agent import fact
from agent.config import values

PARAMETER_PREFIX = "carver/"
# Each is kept as a fact of the same name.
PARAMETERS = (
    *(fact.CLASS, fact.FS_TYPE, fact.MKFS_OPTIONS, fact.MOUNT_OPTIONS),
    *(fact.ENCRYPTION, fact.REENCRYPT),
)
# What they may override of their class's layout: the field, and how it is read.
LAYOUT_PARAMETERS: Mapping[str, tuple[str, Callable[[str], int]]] = {
    "stripes": ("stripes", values.parse_count),
    "stripeSize": ("stripe_size_bytes", values.parse_size),
    "mirrors": ("mirrors", values.parse_count),
}
CACHE_SIZE = "cacheSize"
# What a parameter says that is either given so or not at all.
YES = "true"
STORAGE_CLASS_PARAMETERS = (*PARAMETERS, *LAYOUT_PARAMETERS, CACHE_SIZE)
# What a VolumeAttributesClass may say: the field of a Tuning, and how it is read.
MUTABLE = "mutable_parameters"
MUTABLE_PARAMETERS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "readAhead": ("read_ahead_bytes", values.parse_read_ahead),
    "minimumRecoveryRate": ("minimum_recovery_kib", values.parse_rate),
    "maximumRecoveryRate": ("maximum_recovery_kib", values.parse_rate),
}
# What a pod may say of an inline volume: as a StorageClass may, and how large it is.
SIZE = "size"
INLINE_PARAMETERS = (*STORAGE_CLASS_PARAMETERS, SIZE)
EPHEMERAL = "csi.storage.k8s.io/ephemeral"
# What a secret may hold: the volume's key, and the one that it had before.
PASSPHRASE, PREVIOUS_PASSPHRASE = "passphrase", "previousPassphrase"
# And a name for the key, which is no secret: it is kept in the clear.
GENERATION = "passphraseGeneration"
# What a VolumeSnapshotClass may say.
SNAPSHOT_PARAMETERS = (SIZE,)
