"""The services of ``align up``: Prefect's server, a worker and the reconciler, and the state by which commands find them."""
