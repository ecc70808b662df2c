"""Child processes: their families, ranks and GPUs, and the runner that supervises them."""
