"""Several replicas of one server on a Ray cluster, behind the same API. Needs the extra `replicas`."""
