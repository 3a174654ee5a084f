"""What tests of real servers and real processes are written with."""

from __future__ import annotations

from deadlines import eventually
from processes import Process
from servers import Server, free_port, servers_available, servers_expected
from sessions import list_children, list_living, list_members, read_stat

__all__ = [
    "Process",
    "Server",
    "eventually",
    "free_port",
    "list_children",
    "list_living",
    "list_members",
    "read_stat",
    "servers_available",
    "servers_expected",
]
