"""The nodes of a cell: processes, network namespaces or hosts of a Ray cluster, their links and their CPU shares."""
