"""Operations on volumes: one file for each use case, such as CreateVolume.

Terms of these files:

- A command is a command of lvm2, or another program that is started. Docstrings say how many
  commands a method runs.
- A report is lvm2's report of one or all volume groups. A fresh report is read after the call
  began, or proved to be still true (agent/groups/metadata_cache.py).
- The lock of a volume group (`hold`) is held while the group is read in order to be changed, and
  while it is changed.
- A device class is an entry of the configuration that a StorageClass names. A device class has the
  volume group, layout, file system and cache of its volumes (agent/settings/classes.py).
- A job is background work on one volume, thin pool or volume group (agent/work/group_worker.py).
- A crash point is a moment at which the process may die. A comment says what state is left at that
  moment, and which call, or which start of Carver, continues from that state.
- A bridge snapshot, or bridge, is a temporary snapshot of a volume that is being copied
  (agent/operations/clone.py).
- A sweep is the logical volume of a volume group in which free extents are zeroed
  (agent/operations/erase_free.py), or a search for inline volumes whose pods are gone
  (agent/operations/inline.py).
- A refused volume group is on this node's disks, and Carver does not use it: the group belongs to
  another node, or another group has its name.
"""
