"""The processes: the mesh that names them, and every collective between them."""

from shardwise.dist.comm import Axis, Handle, Traffic
from shardwise.dist.mesh import Mesh, init_distributed

__all__ = ["Axis", "Handle", "Mesh", "Traffic", "init_distributed"]
