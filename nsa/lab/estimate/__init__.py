"""What a training will hold in memory, foretold without running it."""
