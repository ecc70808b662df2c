"""What a training will hold, told before it runs: traced, extrapolated, laid out as CUDA would."""
