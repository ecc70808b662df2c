"""Does NSA train as well as dense attention? Same tokens in the same order, several seeds."""
