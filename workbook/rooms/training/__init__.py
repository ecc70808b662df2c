"""`nsa train`: the job, its ranks, its observers and its run folder."""
