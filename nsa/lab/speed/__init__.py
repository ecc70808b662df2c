"""One attention call: accuracy first, then time and memory, beside others and the limit."""
