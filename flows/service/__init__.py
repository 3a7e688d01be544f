"""What ``align up`` runs: Prefect's server, a worker and the reconciler, and how commands find them."""
