"""The notebook to play with: what a query sees, and what runs found."""
