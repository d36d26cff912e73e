"""flashrecd: the daemon that keeps a job's state in host memory and replaces ranks that die."""
