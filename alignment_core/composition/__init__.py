"""The building blocks of compositions: steps, branches, evaluations, and the plan of a composition. Imports no Prefect."""
