"""The case study's claims: rules as data over the numbers of one kept run."""
