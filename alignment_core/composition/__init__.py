"""What compositions are written with: steps, branches, evaluations, and the plan of a composition. Imports no Prefect."""
