"""Writing prepared datasets: inputs cut into tasks, a shard from each task, and the manifest when all are done."""
