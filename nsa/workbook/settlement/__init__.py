"""The case study's figures read again, and what decides between its claims."""
