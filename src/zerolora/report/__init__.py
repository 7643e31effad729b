"""Stage report: a page with a run's results, its resource usage and the hashes of its inputs."""
