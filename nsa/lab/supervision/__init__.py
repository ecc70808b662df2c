"""What a supervisor sees of a trial from outside, and what it keeps of how it ended."""
