"""Files for Prometheus and Grafana, and their page of docs, made from the tables of metrics and alerts."""
