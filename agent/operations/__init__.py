"""Operations on volumes: one file for each use case, such as CreateVolume.

Terms of these files:

- A command is a command of lvm2, or another program that is started. Docstrings say how many a
  method runs.
- A report is lvm2's report of one or all volume groups. A fresh report is read after the call
  began, or proved to be still true (agent/groups/metadata_cache.py).
- The lock of a volume group (`hold`) orders the changes of the group, and covers reading it.
- A device class is an entry of the configuration, which a StorageClass names: the volume group,
  layout, file system and cache of volumes (agent/settings/classes.py).
- A job is background work on one volume, thin pool or group (agent/work/group_worker.py).
- A crash point is a step after which the process may die. The comment says what is then left, and
  which call or start of Carver goes on from there.
- A bridge snapshot is a temporary snapshot of a volume that is being copied
  (agent/operations/clone.py).
- A sweep is the logical volume of a group in which free extents are zeroed
  (agent/operations/erase_free.py), or a search for inline volumes whose pods are gone
  (agent/operations/inline.py).
"""
