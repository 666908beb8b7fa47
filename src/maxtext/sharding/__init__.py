"""Level 2: the device mesh and the sharding of tensors. The only package that uses
PartitionSpec.
"""

from maxtext.sharding.mesh import make_mesh
from maxtext.sharding.rules import AxisRules, constrain, use_rules

__all__ = ["AxisRules", "constrain", "make_mesh", "use_rules"]
