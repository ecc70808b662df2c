"""What arrives on which rank: traced training steps, with planted faults."""
