"""Training speed of the model, and how a step's time is spent."""
