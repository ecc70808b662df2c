"""The notebook to play with: what a query sees, what it costs, what runs found."""
