"""`align ui`: pages over a store's index and the runs of this machine."""
