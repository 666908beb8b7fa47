"""One of two processes that save together; the second cannot write its part of step 2. Prints what
became of each.
"""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from maxtext.checkpoint.manager import CheckpointManager, MetadataHandler, StorageOptions
from maxtext.checkpoint.steps import all_steps

folder, address, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(address, num_processes=2, process_id=index)
write = MetadataHandler.write


def failing(self, directory, files):
    if index == 1 and directory.parent.name.startswith("2."):
        raise OSError(28, "No space left on device")
    write(self, directory, files)


MetadataHandler.write = failing
manager = CheckpointManager(folder, StorageOptions())
mesh = jax.make_mesh((2,), ("data",))
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
state = jax.jit(lambda: jnp.arange(8.0), out_shardings=everywhere)()
failures, seconds = [], []
for step in (1, 2, 3):
    begin = time.monotonic()
    manager.save(
        step,
        {"a": state},
        {"step": step, "processes": 2},
        "base_config: base.yml\n",
        {"process": index},
    )
    manager.wait()
    failures.append(manager.failure)
    seconds.append(time.monotonic() - begin)
manager.close()
print(json.dumps({"failures": failures, "seconds": max(seconds), "steps": all_steps(folder)}))
