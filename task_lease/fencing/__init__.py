"""Let whatever a run writes to refuse the run that was overtaken.

A run that was paused past its ttl can still write when it wakes. *Claim before you
read*: a check at the write alone loses updates, for the late one reads first.

The guards of a driver are in a module of their own, which imports it: `sqlalchemy`,
`django`, `redis`, `s3`; plain DB-API and files need none.
"""

from __future__ import annotations

from task_lease.fencing.dbapi import RowGuard
from task_lease.fencing.fenced import Fenced
from task_lease.fencing.objects import FileStore, ObjectGuard, ObjectStore

__all__ = ["Fenced", "FileStore", "ObjectGuard", "ObjectStore", "RowGuard"]
