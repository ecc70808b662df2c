"""Several processes of one job: started, watched, and how each ended."""
