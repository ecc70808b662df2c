"""The case study's claims, each with the facts that decide it."""
