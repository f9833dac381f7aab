"""Writing prepared datasets: inputs split into tasks, a shard for each task, and the manifest once all are done."""
